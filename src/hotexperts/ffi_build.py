"""Generate the C source of the cffi module from phx.h.

Usage: ffi_build.py PHX_H OUTPUT_C (CMake calls it).
"""

from __future__ import annotations

import re
import sys
from pathlib import Path

from cffi import FFI


def declarations(header: str) -> str:
    """The part of phx.h that cffi's parser understands: no preprocessor, no C++ linkage, no PHX_API."""
    text = re.sub(r"//[^\n]*", "", header)
    text = re.sub(r"#ifdef __cplusplus.*?#endif", "", text, flags=re.DOTALL)
    text = re.sub(r"^\s*#.*$", "", text, flags=re.MULTILINE)
    return text.replace("PHX_API ", "")


def main(header: str, output: str) -> None:
    ffi = FFI()
    ffi.cdef(declarations(Path(header).read_text(encoding="utf-8")))
    ffi.set_source("pyhotexperts._native", '#include "phx.h"')
    ffi.emit_c_code(output)


if __name__ == "__main__":
    main(*sys.argv[1:])
