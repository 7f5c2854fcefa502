#!/usr/bin/env python3
"""Report in Markdown how a routing trace uses the experts: popularity, reuse, hit rates of simple caches.

The trace is the trace.npz that train.py writes: windows of 1024 tokens for each domain, 64 experts a layer.
The caches take most of the time, less than a minute for six domains; --no-caches leaves them out.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import numpy as np

from cachesim import belady, best_fixed_set, lfu_window, lru

N_EXPERT = 64
WINDOW = 1024  # tokens; the trace's windows do not continue each other
TOP = (6, 11, 16, 32)  # sizes of sets of experts
CACHE_SIZES = (8, 11, 16, 24, 32)
POLICIES = {"LRU": lru, "LFUw": lfu_window, "Belady": belady, "static": best_fixed_set}


class Report:
    """The lines of the report; printed as they come."""

    def __init__(self) -> None:
        self.lines: list[str] = []

    def add(self, line: str) -> None:
        print(line, flush=True)
        self.lines.append(line)

    def table(self, *titles: str) -> None:
        self.add("| " + " | ".join(titles) + " |")
        self.add("|---" * len(titles) + "|")

    def row(self, *cells: object) -> None:
        self.add("| " + " | ".join(str(cell) for cell in cells) + " |")


class Trace:
    """A routing trace: `ids` and `weights` [domain, token, layer, rank], `domains` the names."""

    def __init__(self, path: Path) -> None:
        with np.load(path) as arrays:
            self.ids = arrays["ids"]
            self.weights = arrays["weights"].astype(np.float32)
            self.domains = [str(domain) for domain in arrays["domains"]]
        self.n_domain, self.n_token, self.n_layer, self.top_k = self.ids.shape
        if self.n_token % WINDOW:
            raise ValueError(f"{path}: {self.n_token} tokens per domain are no multiple of {WINDOW}")
        if self.ids.max() >= N_EXPERT:
            raise ValueError(f"{path}: expert {self.ids.max()} in a trace of {N_EXPERT} experts")

    def counts(self) -> np.ndarray:
        """Return how often each expert was used: [domain, layer, expert]."""
        counts = np.zeros((self.n_domain, self.n_layer, N_EXPERT))
        for domain in range(self.n_domain):
            for layer in range(self.n_layer):
                counts[domain, layer] = np.bincount(self.ids[domain, :, layer].ravel(), minlength=N_EXPERT)
        return counts

    def mixed(self) -> np.ndarray:
        """Return the ids as one stream that takes a window of each domain in turn: [token, layer, rank]."""
        windows = self.ids.reshape(self.n_domain, -1, WINDOW, self.n_layer, self.top_k)
        return windows.swapaxes(0, 1).reshape(-1, self.n_layer, self.top_k)


def percent(share: float) -> str:
    return f"{100 * share:5.1f}"


def top_share(counts: np.ndarray, size: int) -> float:
    """Return the share of the uses that goes to the `size` most used experts."""
    return float(np.sort(counts)[::-1][:size].sum() / counts.sum())


def mean_top_share(counts: np.ndarray, size: int) -> float:
    """Return the mean of top_share over the rows of `counts` [row, expert]."""
    return float(np.mean([top_share(row, size) for row in counts]))


def top_set(counts: np.ndarray, size: int) -> np.ndarray:
    return np.argsort(-counts)[:size]


def entropy(p: np.ndarray) -> np.ndarray:
    """Return the entropy, in bits, of the distributions in the last axis."""
    return -(np.where(p > 0, p * np.log2(np.maximum(p, 1e-30)), 0)).sum(-1)


def report_popularity(report: Report, trace: Trace, counts: np.ndarray) -> None:
    mix = counts.sum(0)
    layers = range(trace.n_layer)
    tops = [f"top {size}" for size in TOP]

    def extremes(rows: np.ndarray) -> list[str]:
        uniform = rows.sum(-1) / N_EXPERT
        return [f"{(rows.min(-1) / uniform).mean():.2f}x", f"{(rows.max(-1) / uniform).mean():.2f}x"]

    report.add("### Expert popularity: share of routing hits (in %) of the most used experts of a layer")
    report.add("(6, 11, 16, 32 of 64 experts = 9.4, 17.2, 25, 50 %: the shares if use were uniform)\n")
    report.table("data", "layer", *tops, "least used expert vs. uniform", "most used vs. uniform")
    for layer in layers:
        shares = [percent(top_share(mix[layer], size)) for size in TOP]
        report.row("mix", layer, *shares, *extremes(mix[layer : layer + 1]))
    report.add("| mix | mean | " + " | ".join(percent(mean_top_share(mix, size)) for size in TOP) + " | | |")
    for domain, name in enumerate(trace.domains):
        shares = [percent(mean_top_share(counts[domain], size)) for size in TOP]
        report.row(name, "mean", *shares, *extremes(counts[domain]))

    report.add(f"\nPer layer, mean over the {trace.n_domain} domains (each domain's own ranking):\n")
    report.table("layer", *tops)
    for layer in layers:
        report.row(layer, *(percent(mean_top_share(counts[:, layer], size)) for size in TOP))

    report.add(
        "\nA fixed set chosen on the mix, hit share per domain (mean over layers), "
        "against the domain's own best fixed set:\n"
    )
    sizes = TOP[1:]
    report.table("domain", *(f"{kind} top {size}" for size in sizes for kind in ("mix", "own")))
    for domain, name in enumerate(trace.domains):
        cells = []
        own = counts[domain]
        for size in sizes:
            of_mix = [own[layer][top_set(mix[layer], size)].sum() / own[layer].sum() for layer in layers]
            cells += [percent(float(np.mean(of_mix))), percent(mean_top_share(own, size))]
        report.row(name, *cells)


def report_domains(report: Report, trace: Trace, counts: np.ndarray) -> None:
    shares = counts / counts.sum(-1, keepdims=True)
    information = entropy(shares.mean(0)) - entropy(shares).mean(0)
    most = np.log2(trace.n_domain)
    report.add(
        f"\nInformation about the domain in one expert choice (bits, of at most {most:.3g}), per layer: "
        + ", ".join(f"{bits:.2f}" for bits in information)
    )
    size = 16
    sets = [[set(top_set(layer, size).tolist()) for layer in domain] for domain in counts]
    report.add(f"\nOverlap of the top-{size} sets of two domains (%, mean over layers; chance 25):\n")
    report.table("", *trace.domains)
    for name, a in zip(trace.domains, sets, strict=True):
        overlaps = [np.mean([len(x & y) / size for x, y in zip(a, b, strict=True)]) for b in sets]
        report.row(name, *(f"{100 * overlap:.0f}" for overlap in overlaps))


def report_reuse(report: Report, trace: Trace) -> None:
    used = np.zeros((*trace.ids.shape[:3], N_EXPERT), bool)
    np.put_along_axis(used, trace.ids.astype(int), True, -1)
    windows = used.reshape(trace.n_domain, -1, WINDOW, trace.n_layer, N_EXPERT)
    # all [domain, window, token, layer]
    next_one = (windows[:, :, :-1] & windows[:, :, 1:]).sum(-1) / trace.top_k
    totals = np.cumsum(windows, 2, dtype=np.int32)
    within_8 = (totals[:, :, 8:] - totals[:, :, :-8]) > 0
    next_8 = (windows[:, :, :-8] & within_8).sum(-1) / trace.top_k
    first = np.take_along_axis(used[:, 1:], trace.ids[:, :-1, :, :1].astype(int), -1)[..., 0]

    report.add("\n### Reuse: probability (in %) that an expert used at token t is used again\n")
    report.add("(independent uniform routing would give 12.5 % for t+1 and 65.6 % within 8)\n")
    report.table("layer", "at t+1", "within the next 8", "top-1 expert again among the 8 at t+1")
    for layer in range(trace.n_layer):
        report.row(layer, *(percent(array[..., layer].mean()) for array in (next_one, next_8, first)))
    report.row("mean", *(percent(array.mean()) for array in (next_one, next_8, first)))
    report.add(
        "\nPer domain (mean over layers): "
        + ", ".join(
            f"{name} {100 * next_one[domain].mean():.1f}/{100 * next_8[domain].mean():.1f}"
            for domain, name in enumerate(trace.domains)
        )
    )
    distinct = [distinct_experts(trace, length, step) for length, step in ((8, 32), (32, 64), (256, 256))]
    report.add(
        "Distinct experts of a layer in a window of 8 / 32 / 256 tokens: "
        + " / ".join(f"{number:.1f}" for number in distinct)
        + " of 64 (64 / 256 / 2048 requests)"
    )
    by_rank = trace.weights.mean((0, 1, 2))
    report.add("Mean routing weight by rank: " + ", ".join(f"{weight:.3f}" for weight in by_rank))


def distinct_experts(trace: Trace, length: int, step: int) -> float:
    """Return how many experts `length` tokens use in a layer, averaged over windows at every `step`."""
    numbers = [
        len(np.unique(trace.ids[domain, start : start + length, layer]))
        for domain in range(trace.n_domain)
        for layer in range(trace.n_layer)
        for start in range(0, trace.n_token - length, step)
    ]
    return float(np.mean(numbers))


def hit_rates(trace: Trace) -> dict[tuple[str, int, int, str], float]:
    """Return the hit rate by (policy, slots, layer, domain or "mix")."""
    mixed = trace.mixed()
    rates = {}
    for layer in range(trace.n_layer):
        streams = {name: trace.ids[domain, :, layer].tolist() for domain, name in enumerate(trace.domains)}
        streams["mix"] = mixed[:, layer].tolist()
        for policy, simulate in POLICIES.items():
            for size in CACHE_SIZES:
                for name, stream in streams.items():
                    rates[policy, size, layer, name] = simulate(stream, size)
    return rates


def report_caches(report: Report, trace: Trace, rates: dict[tuple[str, int, int, str], float]) -> None:
    def mean_rate(policy: str, size: int, layers: range, names: list[str]) -> float:
        return float(np.mean([rates[policy, size, layer, name] for layer in layers for name in names]))

    report.add(
        "\n### Cache hit rates (in %) per layer: requests are the 8 experts of each token, "
        "a miss must be loaded (no bypass), cold start included"
    )
    report.add(
        "(LFU-window counts over the last 256 tokens, ties by recency; "
        "static = best fixed set of that stream in hindsight; "
        f"'domain' = each domain's {trace.n_token} tokens alone, mean of the {trace.n_domain}; "
        f"'mix' = {WINDOW}-token windows of the domains in turn)\n"
    )
    sizes = ["8 (12.5 %)", "11 (17 %)", "16 (25 %)", "24 (37.5 %)", "32 (50 %)"]
    report.table("stream", "policy", "layer", *sizes)
    all_layers = range(trace.n_layer)
    for stream, names in (("domain", trace.domains), ("mix", ["mix"])):
        for policy in POLICIES:
            if policy != "static":
                for layer in all_layers:
                    cells = [mean_rate(policy, size, range(layer, layer + 1), names) for size in CACHE_SIZES]
                    report.row(stream, policy, layer, *map(percent, cells))
            cells = [mean_rate(policy, size, all_layers, names) for size in CACHE_SIZES]
            report.row(stream, policy, "mean", *map(percent, cells))
    by_domain = []
    for name in trace.domains:
        rates_of = [mean_rate("LRU", size, all_layers, [name]) for size in CACHE_SIZES]
        by_domain.append(f"{name} " + "/".join(f"{100 * rate:.1f}" for rate in rates_of))
    report.add("\nLRU hit rate by domain, mean over layers (8/11/16/24/32): " + "; ".join(by_domain))


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("trace", type=Path, help="trace.npz")
    parser.add_argument("--out", type=Path, help="write the report to this file as well")
    parser.add_argument("--json", type=Path, help="write every hit rate to this file")
    parser.add_argument("--no-caches", action="store_true", help="leave out the hit rates")
    args = parser.parse_args()

    trace = Trace(args.trace)
    report = Report()
    counts = trace.counts()
    report_popularity(report, trace, counts)
    report_domains(report, trace, counts)
    report_reuse(report, trace)
    if not args.no_caches:
        rates = hit_rates(trace)
        report_caches(report, trace, rates)
        if args.json:
            by_name = {"|".join(map(str, key)): rate for key, rate in rates.items()}
            args.json.write_text(json.dumps(by_name), encoding="utf-8")
    if args.out:
        args.out.write_text("\n".join(report.lines) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
