"""``pyhotexperts info``: what was built, what was found."""

from __future__ import annotations

import argparse
import hashlib
import json
import sys
from dataclasses import asdict
from typing import Any

from pyhotexperts import _ffi, machine
from pyhotexperts.loading import embedded_model

NO_PATCHES = hashlib.sha256().hexdigest()


def add_parser(commands: Any) -> None:
    """Add the command."""
    parser: argparse.ArgumentParser = commands.add_parser(
        "info",
        help="show build, backends and devices",
        description="Show what this package was built from and what it found.",
    )
    parser.add_argument("--json", action="store_true", help="as a JSON object")
    parser.set_defaults(run=run)


def collect() -> dict[str, Any]:
    """Everything that the command shows."""
    return {
        **machine.build_info(),
        "devices": [asdict(device) for device in machine.devices()],
        "n_threads": machine.default_threads(),
        "embedded_model": str(embedded_model()),
        "library_dir": str(_ffi.library_dir()),
    }


def run(arguments: argparse.Namespace) -> None:
    """Run the command."""
    facts = collect()
    if arguments.json:
        json.dump(facts, sys.stdout, indent=2)
        print()
        return
    cuda = facts["cuda_built"]
    if facts["cuda_inactive_reason"]:
        cuda = f"{cuda}, but not active: " if cuda else ""
        cuda += machine.no_gpu_reason()
    rows = [
        ("pyhotexperts", f"{facts['version']}, Python {facts['python']}, {facts['platform']}"),
        (
            "llama.cpp",
            f"{facts['llama_cpp_version']}, commit {facts['llama_cpp_commit']} ({facts['llama_cpp_origin']})",
        ),
        ("patches", "none" if facts["patch_hash"] == NO_PATCHES else facts["patch_hash"][:12]),
        ("build", f"{facts['build_type']}, {facts['compiler']}, CPU {facts['cpu_built']}"),
        ("CUDA", cuda),
        (
            "CPU features",
            facts["system_info"].strip(" |").removeprefix("CPU : ").replace(" = 1", "").replace(" | ", " "),
        ),
        ("backends", ", ".join(facts["backends"])),
        ("threads", facts["n_threads"]),
        ("model", facts["embedded_model"]),
    ]
    for device in facts["devices"]:
        free, total = device["memory_free"] / 2**30, device["memory_total"] / 2**30
        rows.append((device["name"], f"{device['description']}, {free:.1f} of {total:.1f} GiB free"))
    for name, value in rows:
        print(f"{name:<13} {value}")
