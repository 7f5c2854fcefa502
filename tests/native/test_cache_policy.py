"""Slots and policies of the cache, replayed against plain references that share no code with them."""

from __future__ import annotations

from collections import OrderedDict, deque
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import pyhotexperts as phx

N_EXPERT = 12
TOP_K = 3


def routing_of(tokens: list[list[int]], n_expert: int = N_EXPERT) -> phx.Routing:
    """Routing of one layer."""
    experts = np.array(tokens, np.uint16).reshape(len(tokens), 1, TOP_K if not tokens else len(tokens[0]))
    return phx.Routing(layers=(0,), experts=experts, n_expert=n_expert)


token_lists = st.lists(st.permutations(range(N_EXPERT)).map(lambda p: list(p[:TOP_K])), max_size=60)


def random_tokens(n: int, seed: int = 0) -> list[list[int]]:
    """Tokens that come back to the same experts for a while, as real ones do."""
    rng = np.random.default_rng(seed)
    tokens = []
    for i in range(n):
        weights = np.exp(3 * np.sin(np.arange(N_EXPERT) * (1 + i // 40)))
        tokens.append(rng.choice(N_EXPERT, TOP_K, replace=False, p=weights / weights.sum()).tolist())
    return tokens


class Reference:
    """The rules of src/hotexperts/policy.h in plain Python: exact arithmetic, everything recomputed for each token."""

    def __init__(
        self, policy: str, slots: int, uploads: int | None, interval: int, half_life: float, hysteresis: float
    ):
        self.policy, self.slots, self.uploads = policy, slots, uploads
        self.interval, self.half_life, self.hysteresis = interval, half_life, hysteresis
        self.history: list[list[int]] = []
        self.resident: set[int] = set()

    def score(self, expert: int, profile: dict[int, float]) -> float:
        now = len(self.history)
        uses = [t for t, token in enumerate(self.history) if expert in token]
        if self.policy == "static":
            return profile[expert]
        if self.policy == "lru":
            return self.recency(expert)
        if self.policy in ("decay", "markov"):
            heat = sum(2.0 ** (-(now - 1 - t) / self.half_life) for t in uses)
            return heat + (10 * self.likelihood(expert) if self.policy == "markov" else 0)
        end = now // self.interval * self.interval  # of the last rebalance
        return sum(end - self.interval <= t < end for t in uses)

    def likelihood(self, expert: int) -> float:
        """The share of uses of the last token's experts that it followed, later uses counting more."""
        shares = []
        for now in self.history[-1]:
            nexts = [b for a, b in pairwise(self.history) if now in a]
            weights = [0.99 ** (len(nexts) - 1 - i) for i in range(len(nexts))]
            followed = sum(w for w, token in zip(weights, nexts, strict=True) if expert in token)
            shares.append(followed / (sum(weights) + 1))
        return sum(shares) / len(shares)

    def recency(self, expert: int) -> int:
        """Larger = used later; a better rank counts as later. 0 = never."""
        for t in range(len(self.history) - 1, -1, -1):
            if expert in self.history[t]:
                return t * 1000 + 999 - self.history[t].index(expert)
        return 0

    def step(self, token: list[int], profile: dict[int, float]) -> tuple[int, int]:
        hits = len(self.resident & set(token))
        self.history.append(token)
        if self.policy == "frozen":
            return hits, 0
        scores = {e: self.score(e, profile) for e in range(N_EXPERT)}
        order = sorted(range(N_EXPERT), key=lambda e: (-scores[e], -self.recency(e), e))
        newcomers = [e for e in order if e not in self.resident and scores[e] > 0]
        victims = [e for e in reversed(order) if e in self.resident and e not in token]
        margin = 1 + self.hysteresis if self.policy in ("decay", "markov") else 1
        done = 0
        for e in newcomers:
            if done == self.uploads:
                break
            if len(self.resident) == self.slots:
                if not victims or not scores[e] > scores[victims[0]] * margin:
                    break
                self.resident.remove(victims.pop(0))
            self.resident.add(e)
            done += 1
        return hits, done


@settings(max_examples=300)
@given(
    tokens=token_lists,
    policy=st.sampled_from(["lru", "decay", "markov", "window", "static", "frozen"]),
    slots=st.integers(0, N_EXPERT),
    uploads=st.one_of(st.none(), st.integers(0, 4)),
    interval=st.integers(1, 9),
    half_life=st.sampled_from([0.5, 3.0, 12.0]),
    hysteresis=st.sampled_from([0.0, 0.3, 1.0]),
)
def test_every_policy_follows_its_rules(
    tokens: list[list[int]],
    policy: str,
    slots: int,
    uploads: int | None,
    interval: int,
    half_life: float,
    hysteresis: float,
) -> None:
    profile = {e: float((e * 7) % 5) for e in range(N_EXPERT)}
    reference = Reference(policy, slots, uploads, interval, half_life, hysteresis)
    expected = [reference.step(token, profile) for token in tokens]
    result = phx.simulate_cache(
        routing_of(tokens),
        slots=slots,
        policy=policy,
        uploads_per_step=uploads,
        rebalance_interval=interval,
        half_life=half_life,
        hysteresis=hysteresis,
        profile=[list(profile.values())] if policy == "static" else None,
    )
    assert (result.hits[0], result.uploads[0]) == tuple(np.sum(expected, axis=0) if expected else (0, 0))


@settings(max_examples=100)
@given(tokens=token_lists, slots=st.integers(TOP_K, N_EXPERT))
def test_lru_is_the_textbooks(tokens: list[list[int]], slots: int) -> None:
    cache: OrderedDict[int, None] = OrderedDict()
    hits = 0
    for token in tokens:
        hits += sum(e in cache for e in token)
        for e in reversed(token):
            cache[e] = None
            cache.move_to_end(e)
        while len(cache) > slots:
            cache.popitem(last=False)
    assert phx.simulate_cache(routing_of(tokens), slots=slots, policy="lru", uploads_per_step=None).hits[0] == hits


@settings(max_examples=50)
@given(tokens=token_lists)
def test_more_slots_never_cost_lru_a_hit(tokens: list[list[int]]) -> None:
    hits = [
        phx.simulate_cache(routing_of(tokens), slots=n, policy="lru", uploads_per_step=None).hits[0]
        for n in range(TOP_K, N_EXPERT + 1)
    ]
    assert hits == sorted(hits)


def belady_hits(tokens: list[list[int]], slots: int) -> int:
    """Hits of the best eviction in hindsight, every miss loaded: evict what is needed last."""
    resident: set[int] = set()
    hits = 0
    for t, token in enumerate(tokens):
        hits += len(resident & set(token))
        resident |= set(token)
        later = {e: next((u for u in range(t + 1, len(tokens)) if e in tokens[u]), len(tokens)) for e in resident}
        while len(resident) > slots:
            resident.remove(max(resident, key=lambda e: (later[e], e)))
    return hits


@pytest.mark.parametrize("policy", ["lru", "decay", "window"])
@pytest.mark.parametrize("slots", [3, 5, 8])
def test_no_policy_beats_hindsight(policy: str, slots: int) -> None:
    tokens = random_tokens(300)
    result = phx.simulate_cache(routing_of(tokens), slots=slots, policy=policy, uploads_per_step=None)
    assert 0 < result.hits[0] <= belady_hits(tokens, slots)


@pytest.mark.parametrize("policy", ["lru", "decay", "markov", "window"])
@pytest.mark.parametrize("limit", [0, 1, 2])
def test_uploads_are_bounded(policy: str, limit: int) -> None:
    tokens = random_tokens(200)
    result = phx.simulate_cache(routing_of(tokens), slots=6, policy=policy, uploads_per_step=limit)
    assert result.uploads[0] <= limit * len(tokens)
    assert (result.uploads[0] == 0) == (limit == 0)


def test_everything_hits_once_everything_is_resident() -> None:
    tokens = random_tokens(400)
    result = phx.simulate_cache(routing_of(tokens), slots=N_EXPERT, policy="lru", uploads_per_step=None)
    used = len({e for token in tokens for e in token})
    assert result.uploads[0] == used
    assert result.hits[0] == result.requests - used


def test_a_replay_gives_the_same_again(model: phx.Model) -> None:
    routing = model.record_routing("def main():\n    return 0\n" * 20)
    results = [phx.simulate_cache(routing, slots=16, policy=p) for p in ("decay", "decay", "window", "window")]
    for a, b in (results[:2], results[2:]):
        np.testing.assert_array_equal(a.hits, b.hits)
        np.testing.assert_array_equal(a.uploads, b.uploads)


def test_markov_brings_what_comes_next() -> None:
    """Three groups take turns, and two fit: the one that was used least lately is the next one."""
    routing = routing_of([[0, 1, 2], [3, 4, 5], [6, 7, 8]] * 50)
    options: dict[str, Any] = {"slots": 6, "uploads_per_step": 3, "half_life": 3, "hysteresis": 0}
    assert phx.simulate_cache(routing, policy="decay", **options).hit_rate < 0.1
    assert phx.simulate_cache(routing, policy="markov", **options).hit_rate > 0.9


def test_markov_forgets_as_its_rules_say() -> None:
    tokens = random_tokens(350, seed=3)
    reference = Reference("markov", 5, 1, 60, 12, 0.25)
    expected = [reference.step(token, {}) for token in tokens]
    result = phx.simulate_cache(routing_of(tokens), slots=5, policy="markov", uploads_per_step=1)
    assert (result.hits[0], result.uploads[0]) == tuple(np.sum(expected, axis=0))


def test_markov_takes_no_more_experts_than_fit() -> None:
    with pytest.raises(phx.ConfigError, match="layers of at most 4096"):
        phx.simulate_cache(routing_of([[0, 1, 2]], n_expert=5000), slots=4, policy="markov")


def test_markov_hits_more_of_real_routing(texts: Any) -> None:
    """In each domain of the recorded trace, with at most a tenth more uploads than decay."""
    trace = np.load(texts / "trace.npz")
    for ids in trace["ids"]:
        routing = phx.Routing(layers=tuple(range(6)), experts=ids.astype(np.uint16), n_expert=64)
        options: dict[str, Any] = {"slots": 16, "uploads_per_step": 1}
        decay, markov = (phx.simulate_cache(routing, policy=p, **options) for p in ("decay", "markov"))
        assert markov.hit_rate > decay.hit_rate + 0.015
        assert markov.uploads.sum() < 1.1 * decay.uploads.sum()


def test_the_window_moves_every_interval() -> None:
    tokens = [[0, 1, 2]] * 10 + [[3, 4, 5]] * 10
    result = phx.simulate_cache(
        routing_of(tokens), slots=3, policy="window", uploads_per_step=None, rebalance_interval=5
    )
    # resident from token 5 on: 0 1 2; at token 15 the window holds 3 4 5 alone
    assert (result.hits[0], result.uploads[0]) == (3 * 5 + 3 * 5, 6)


def test_hit_rates_of_the_recorded_trace(texts: Any) -> None:
    """Against the table of models/README.md: LRU in each domain alone, 16 of 64 experts."""
    trace = np.load(texts / "trace.npz")
    rates = {}
    for domain, ids in zip(trace["domains"].tolist(), trace["ids"], strict=True):
        routing = phx.Routing(layers=tuple(range(6)), experts=ids.astype(np.uint16), n_expert=64)
        rates[domain] = 100 * phx.simulate_cache(routing, slots=16, policy="lru", uploads_per_step=None).hit_rate
    published = {"prose": 53.2, "dict": 55.7, "tech": 50.2, "python": 52.0, "fr": 52.0, "de": 54.2}
    assert rates == pytest.approx(published, abs=0.06)


@pytest.mark.parametrize(
    ("options", "word"),
    [
        ({"slots": -1}, "slots"),
        ({"slots": 4.5}, "slots"),
        ({"slots": 4, "policy": "oracle"}, "policy"),
        ({"slots": 4, "uploads_per_step": -2}, "uploads_per_step"),
        ({"slots": 4, "policy": "static", "profile": "abc"}, "profile"),
        ({"slots": 4, "policy": "static", "profile": [[1.0], [1.0, 2.0]]}, "profile"),
        ({"slots": 4, "rebalance_interval": 0}, "rebalance_interval"),
        ({"slots": 4, "half_life": 0}, "half_life"),
        ({"slots": 4, "hysteresis": float("nan")}, "hysteresis"),
        ({"slots": 4, "policy": "static"}, "profile"),
        ({"slots": 4, "profile": [[0.0] * N_EXPERT]}, "profile"),
        ({"slots": 4, "policy": "static", "profile": [[0.0]]}, "profile"),
        ({"slots": 4, "policy": "static", "profile": [[float("inf")] * N_EXPERT]}, "profile"),
    ],
)
def test_bad_parameters_are_named(options: dict[str, Any], word: str) -> None:
    with pytest.raises(phx.ConfigError, match=word):
        phx.simulate_cache(routing_of([[0, 1, 2]]), **options)


def test_more_slots_than_experts_are_all_of_them() -> None:
    routing = routing_of([[0, 1, 2], [2, 3, 4], [0, 3, 4]])
    everything = phx.simulate_cache(routing, slots=N_EXPERT)
    assert phx.simulate_cache(routing, slots=10 * N_EXPERT).hit_rate == everything.hit_rate


def test_routing_with_impossible_experts_is_refused() -> None:
    with pytest.raises(phx.ConfigError, match="too large"):
        phx.simulate_cache(routing_of([[0, 1, N_EXPERT]]), slots=4)


def test_the_window_forgets() -> None:
    """A long run in which the window's counts must neither grow nor go negative: equal to a fresh count each time."""
    tokens = random_tokens(500, seed=3)
    window: deque[list[int]] = deque(maxlen=7)
    resident: set[int] = set()
    hits = 0
    scores = [0] * N_EXPERT
    for t, token in enumerate(tokens, 1):
        hits += len(resident & set(token))
        window.append(token)
        if t % 7 == 0:
            scores = [sum(e in w for w in window) for e in range(N_EXPERT)]
        newcomers = sorted((e for e in range(N_EXPERT) if scores[e] and e not in resident), key=lambda e: -scores[e])
        for e in newcomers:
            if len(resident) < N_EXPERT:
                resident.add(e)
    result = phx.simulate_cache(
        routing_of(tokens), slots=N_EXPERT, policy="window", uploads_per_step=None, rebalance_interval=7
    )
    assert result.hits[0] == hits
