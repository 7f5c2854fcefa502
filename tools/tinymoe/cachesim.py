"""Hit rates of simple cache policies on a routing trace: LRU, LFU over a window, Belady, a fixed set.

A trace is one list of expert numbers per token. All experts of a token are requested together; a missed
expert must be loaded (nothing bypasses the cache) and never replaces an expert of the same token. The cold
start counts. Plain Python, no packages needed.
"""

from __future__ import annotations

import collections
from collections.abc import Sequence

Trace = Sequence[Sequence[int]]


def _check(trace: Trace, slots: int) -> None:
    if not trace:
        raise ValueError("the trace is empty")
    widest = max(len(experts) for experts in trace)
    if slots < widest:
        raise ValueError(f"{slots} slots cannot hold the {widest} experts of one token")


def _requests(trace: Trace) -> int:
    return sum(len(experts) for experts in trace)


def lru(trace: Trace, slots: int) -> float:
    """Replace the expert that was unused for longest; of one token's experts the last ones are the oldest."""
    _check(trace, slots)
    cache: collections.OrderedDict[int, None] = collections.OrderedDict()
    hits = 0
    for experts in trace:
        hits += sum(expert in cache for expert in experts)
        for expert in reversed(experts):
            cache.pop(expert, None)
            cache[expert] = None
        while len(cache) > slots:
            cache.popitem(last=False)
    return hits / _requests(trace)


def lfu_window(trace: Trace, slots: int, window: int = 256) -> float:
    """Replace the expert used least in the last `window` tokens, of equal ones the one unused for longest."""
    _check(trace, slots)
    cache: set[int] = set()
    counts: collections.Counter[int] = collections.Counter()
    last_use: dict[int, int] = {}
    recent: collections.deque[Sequence[int]] = collections.deque()
    hits = 0
    for now, experts in enumerate(trace):
        missed = [expert for expert in experts if expert not in cache]
        hits += len(experts) - len(missed)
        for expert in experts:
            counts[expert] += 1
            last_use[expert] = now
        recent.append(experts)
        if len(recent) > window:
            counts.subtract(recent.popleft())
        for expert in missed:
            if len(cache) >= slots:
                candidates = (expert for expert in cache if expert not in experts)
                cache.remove(min(candidates, key=lambda e: (counts[e], last_use[e])))
            cache.add(expert)
    return hits / _requests(trace)


def belady(trace: Trace, slots: int) -> float:
    """Replace the expert whose next use is farthest: the best possible policy, which must know the future."""
    _check(trace, slots)
    never = len(trace) + 1
    upcoming: dict[int, int] = {}
    next_uses: list[dict[int, int]] = []
    for now in range(len(trace) - 1, -1, -1):
        next_uses.append({expert: upcoming.get(expert, never) for expert in trace[now]})
        upcoming.update(dict.fromkeys(trace[now], now))
    next_uses.reverse()
    cache: set[int] = set()
    next_use: dict[int, int] = {}
    hits = 0
    for experts, uses in zip(trace, next_uses, strict=True):
        missed = [expert for expert in experts if expert not in cache]
        hits += len(experts) - len(missed)
        next_use.update(uses)
        for expert in missed:
            if len(cache) >= slots:
                candidates = (expert for expert in cache if expert not in experts)
                cache.remove(max(candidates, key=lambda e: next_use[e]))
            cache.add(expert)
    return hits / _requests(trace)


def best_fixed_set(trace: Trace, slots: int) -> float:
    """Keep the experts that the whole trace uses most, loaded in advance."""
    _check(trace, slots)
    counts = collections.Counter(expert for experts in trace for expert in experts)
    return sum(count for _, count in counts.most_common(slots)) / counts.total()
