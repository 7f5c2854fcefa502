"""Hit rate of the cache against an independent simulation of its policy, on routing recorded without a cache.

    python benchmarks/hit_rate.py -m MODEL --slots 24 -n 192

The model is fed consecutive token ids that nothing has seen before, one at a time, from empty heat. The simulation is
plain numpy and knows nothing of the package's own: `decay`, at most two uploads per layer and token, in effect from the
next token on. Prints one JSON line.
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path

import numpy as np

import pyhotexperts as phx
from provenance import provenance

HALF_LIFE, HYSTERESIS, UPLOADS = 12.0, 0.25, 2


def simulate(ids: np.ndarray, n_expert: int, slots: int) -> float:
    """Hit rate of one layer; ids: [n_tokens, top_k]. The slots begin with the first experts."""
    score = np.zeros(n_expert)
    resident = np.arange(n_expert) < slots
    hits = 0
    for token in ids:
        hits += int(resident[token].sum())
        score *= 0.5 ** (1 / HALF_LIFE)
        score[token] += 1
        for _ in range(UPLOADS):
            outside = np.where(resident, -1.0, score)
            best = int(outside.argmax())
            inside = np.where(resident, score, np.inf)
            inside[token] = np.inf  # what this token uses stays
            worst = int(inside.argmin())
            if outside[best] <= 0 or outside[best] <= inside[worst] * (1 + HYSTERESIS):
                break
            resident[best], resident[worst] = True, False
    return hits / ids.size


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("-m", "--model", default=str(phx.embedded_model()), help="GGUF; default: the embedded model")
    parser.add_argument("--slots", type=int, required=True, help="per layer")
    parser.add_argument("-n", "--tokens", type=int, default=192, help="default: 192")
    parser.add_argument("--start", type=int, default=8192, help="first token id; default: 8192")
    parser.add_argument("--record-on", choices=("full_gpu", "cpu_experts"), default="cpu_experts")
    a = parser.parse_args()
    options = {"n_ctx": a.tokens + 64, "progress": False, "flash_attn": "on"}
    offload = phx.full_gpu() if a.record_on == "full_gpu" else phx.cpu_experts()
    with phx.Model(a.model, offload=offload, **options) as model:
        ids = [(a.start + i) % model.info.n_vocab for i in range(a.tokens)]
        routing = model.record_routing(ids)
    with phx.Model(a.model, offload=phx.hot_experts(slots=a.slots, strict=True), **options) as model:
        mark = time.perf_counter()
        for token in ids:
            model.eval([token])
        seconds = time.perf_counter() - mark
        status = model.cache.status
    layers = range(len(routing.layers))
    simulated = float(np.mean([simulate(routing.experts[:, i].astype(int), routing.n_expert, a.slots) for i in layers]))
    row = {
        "model": Path(a.model).name,
        "slots": a.slots,
        "n_tokens": a.tokens,
        "hit_rate": round(status.hit_rate, 4),
        "simulated_hit_rate": round(simulated, 4),
        "simulated_by_the_package": round(phx.simulate_cache(routing, slots=a.slots).hit_rate, 4),
        "generated_tokens_per_second": round(a.tokens / seconds, 2),
        "observations_lost": status.observations_lost,
    }
    print(json.dumps({**row, **provenance()}))


if __name__ == "__main__":
    main()
