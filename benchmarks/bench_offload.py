"""`pyhotexperts bench`, with the baselines on a build without the patch queue, and with the origin in every row.

    python benchmarks/bench_offload.py --unpatched DIR -m 30b.gguf --consecutive -p 2048 -n 128 -ub 2048 -o jsonl

DIR holds this package built without the patch queue: its CUDA backend differs, nothing else. Without it, everything
runs on this build. All other flags are those of `pyhotexperts bench`.
"""

from __future__ import annotations

import argparse
import sys
from typing import Any

from provenance import provenance
from pyhotexperts.bench import runner
from pyhotexperts.bench.config import Run
from pyhotexperts.cli import bench, complain, prepare_streams
from pyhotexperts.errors import PyHotExpertsError


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--unpatched", metavar="DIR", help="a folder that holds this package built without the patch queue"
    )
    a, rest = parser.parse_known_args()
    commands = argparse.ArgumentParser(prog="bench_offload.py").add_subparsers()
    bench.add_parser(commands)
    arguments = commands.choices["bench"].parse_args(rest)

    def execute(run: Run) -> dict[str, Any]:
        is_ours = run.mode.name == "hot_experts" or a.unpatched is None
        return runner.execute(run, package=None if is_ours else a.unpatched)

    try:
        prepare_streams()
        bench.run(arguments, execute, {"baselines": "unpatched" if a.unpatched else "this build", **provenance()})
    except PyHotExpertsError as e:
        return complain(str(e), 1)
    except KeyboardInterrupt:
        return complain("interrupted: the rows above are complete", 130)
    return 0


if __name__ == "__main__":
    sys.exit(main())
