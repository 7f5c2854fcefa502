"""Python files of the standard library and of PyPI packages, C files of the Linux kernel."""

from __future__ import annotations

import glob
import re

from .cleaning import chunks, clean_code, read_text
from .readers import Collector

_PIECE_CHARS = 40000

_KERNEL_KEPT = re.compile(
    r"^(kernel|mm|block|ipc|init|net|security/(keys|integrity|apparmor|landlock|tomoyo|commoncap)|crypto|lib|"
    r"fs/(ext4|btrfs|xfs|proc|nfsd|overlayfs|fuse|jbd2|f2fs|kernfs|notify|iomap|[a-z_]+\.[ch])|"
    r"drivers/(base|md)|include/linux|tools/(perf|lib))(/|$|\.)"
)
_KERNEL_DROPPED = re.compile(
    r"testmgr\.h|/nls/|test_.*\.c|_test\.c|selftest|raid6/|crypto/.*table|lib/fonts|oid_registry|lzo|zstd/|"
    r"pmu-events|uapi/|cpuid|/arch/|hist_data|dict"
)


def is_table(text: str, table_chars: str, limit: float) -> bool:
    """Tell whether more than the share `limit` of a text is digits and `table_chars`: data, not code."""
    return sum(char.isdigit() or char in table_chars for char in text) > limit * len(text)


def read_python(out: Collector, source: str, root: str, skip: str) -> None:
    """Add the Python files under `root` whose path below it does not match the expression `skip`."""
    for path in sorted(glob.glob(root + "/**/*.py", recursive=True)):
        if re.search(skip, path[len(root) :]):
            continue
        text = read_text(path)
        if not 400 <= len(text) <= 400000:
            continue
        if max(map(len, text.split("\n"))) > 600 or is_table(text, ",.x()[]{}'\"-+ \n", 0.75):
            continue
        for number, part in enumerate(chunks(clean_code(text), _PIECE_CHARS)):
            out.add("python", source, f"{path}#{number}", part, 400)


def read_kernel_source(out: Collector) -> None:
    """Add C files of the Linux kernel: core, some file systems and drivers, no tests, no tables."""
    root = f"{out.packages}/linux-src/linux-source-6.1"
    for path in sorted(glob.glob(root + "/**/*.[ch]", recursive=True)):
        relative = path[len(root) + 1 :]
        if _KERNEL_DROPPED.search(relative) or not _KERNEL_KEPT.search(relative):
            continue
        text = read_text(path)
        if len(text) < 500 or is_table(text, ",xX{} \t\n", 0.6):
            continue
        for number, part in enumerate(chunks(clean_code(text), _PIECE_CHARS)):
            out.add("c", "linux-source-6.1", f"{relative}#{number}", part, 400)
