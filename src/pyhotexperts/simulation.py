"""What a hot-expert cache would hit: recorded routing replayed through the slots and policies of the native part."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from pyhotexperts import _ffi
from pyhotexperts.errors import ConfigError
from pyhotexperts.results import Routing
from pyhotexperts.validation import choice, integer, real, upload_limit

POLICIES = {
    "lru": "PHX_POLICY_LRU",
    "decay": "PHX_POLICY_DECAY",
    "markov": "PHX_POLICY_MARKOV",
    "window": "PHX_POLICY_WINDOW",
    "static": "PHX_POLICY_FIXED",
    "frozen": "PHX_POLICY_FROZEN",
}


MAX_MARKOV_EXPERTS = 4096  # of a layer: 64 MiB of counts


@dataclass(frozen=True)
class CacheSimulation:
    """Outcome of a replay, layer by layer.

    Parameters
    ----------
    layers
        Layer numbers.
    requests
        Experts that each layer was asked for: tokens times experts per token.
    hits
        int64[len(layers)]: those that were resident.
    uploads
        int64[len(layers)]: experts that were copied into a slot.
    """

    layers: tuple[int, ...]
    requests: int
    hits: npt.NDArray[np.int64]
    uploads: npt.NDArray[np.int64]

    @property
    def hit_rate(self) -> float:
        """Share of all requests that hit, 0..1."""
        return float(self.hits.sum() / max(1, self.requests * len(self.layers)))


def simulate_cache(
    routing: Routing,
    *,
    slots: int,
    policy: str = "decay",
    uploads_per_step: int | None = 2,
    rebalance_interval: int = 60,
    half_life: float = 12.0,
    hysteresis: float = 0.25,
    profile: npt.ArrayLike | None = None,
) -> CacheSimulation:
    """Replay routing through a cache that starts empty, each layer on its own, one token a step.

    A token's experts hit if they were resident before it; what it causes to be uploaded is resident for the next one.
    The cache itself begins with the first experts of each layer in its slots, and an upload may take a token longer.

    Parameters
    ----------
    routing
        What `Model.record_routing` recorded.
    slots
        Experts that fit into VRAM, per layer; more than there are = all.
    policy
        "lru": used last; "decay": uses, each worth half as much `half_life` tokens later; "markov": the same, and what
        is likely for the next token, from what followed this token's experts before; "window": uses in the last
        `rebalance_interval` tokens, looked at so often; "static": the scores of `profile`; "frozen": nothing moves.
    uploads_per_step
        Most uploads per layer and token, None or -1 = no limit.
    rebalance_interval
        Tokens, for "window".
    half_life
        Tokens, for "decay" and "markov".
    hysteresis
        Share by which a newcomer's score must exceed the victim's, for "decay" and "markov".
    profile
        float64[n_layers, n_expert] scores for "static", such as `Routing.counts` of another text.

    Raises
    ------
    ConfigError
        If a parameter is out of range.
    """
    if not isinstance(routing, Routing):
        raise ConfigError(f"routing must be what Model.record_routing returns, not {type(routing).__name__}")
    if routing.experts.ndim != 3 or not 1 <= routing.n_expert <= 65_536:
        raise ConfigError("routing must have experts of shape [n_tokens, n_layers, top_k], of 1 to 65536 experts")
    if policy == "markov" and routing.n_expert > MAX_MARKOV_EXPERTS:
        raise ConfigError(
            f'the policy "markov" counts for each pair of experts, so it takes layers of at most {MAX_MARKOV_EXPERTS}, '
            f"and the routing has {routing.n_expert}: take another policy"
        )
    n_tokens, n_layers, top_k = routing.experts.shape
    ffi = _ffi.ffi
    params = ffi.new("phx_simulation_params *")
    params.policy = getattr(_ffi.lib, POLICIES[choice("policy", policy, POLICIES)])
    params.n_slots = min(integer("slots", slots, 0, 2**31 - 1), routing.n_expert)
    params.interval = integer("rebalance_interval", rebalance_interval, 1, 2**31 - 1)
    params.half_life = real("half_life", half_life, 0.01, 1e9)
    params.hysteresis = real("hysteresis", hysteresis, 0, 1e9)
    limit = upload_limit("uploads_per_step", uploads_per_step)
    params.max_uploads = -1 if limit is None else limit
    scores = ffi.NULL
    if (policy == "static") != (profile is not None):
        raise ConfigError('profile is needed for the policy "static", and for no other')
    if profile is not None:
        try:
            table = np.ascontiguousarray(profile, np.float64)
        except (TypeError, ValueError) as e:
            raise ConfigError(f"profile must be numbers of shape {(n_layers, routing.n_expert)}: {e}") from None
        if table.shape != (n_layers, routing.n_expert) or not np.isfinite(table).all():
            raise ConfigError(
                f"profile must be finite numbers of shape {(n_layers, routing.n_expert)}, not {table.shape}"
            )
        scores = ffi.from_buffer("double[]", table)
    experts = np.ascontiguousarray(routing.experts, np.uint16)
    hits, uploads = np.zeros(n_layers, np.int64), np.zeros(n_layers, np.int64)
    status = _ffi.lib.phx_cache_simulate(
        params,
        ffi.from_buffer("uint16_t[]", experts),
        n_tokens,
        n_layers,
        top_k,
        routing.n_expert,
        scores,
        ffi.from_buffer("int64_t[]", hits),
        ffi.from_buffer("int64_t[]", uploads),
    )
    _ffi.check(status, "cannot simulate the cache")
    return CacheSimulation(layers=routing.layers, requests=n_tokens * top_k, hits=hits, uploads=uploads)
