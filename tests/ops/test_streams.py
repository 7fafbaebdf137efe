"""The C++ operations use no C++ streams, and the process has a single libstdc++.

A compiler may link a static libstdc++. Two copies of libstdc++ share the ids of locale facets, but not the
facets, so a stream of the second copy crashes at its first number.
"""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path

import pytest
import torch

from weft.ops import cpu
from weft.ops.cpu import build
from weft.ops.cpu.compilers import BuildError

STREAMS = re.compile(
    r"\b(basic_)?[io]?(stream|stringstream|stringbuf|streambuf)\b|\bbasic_ios\b|\blocale\b|\bios_base\b"
)
COUNTED = "std::ios_base::Init::"
"""g++ 12 and older count the users of std::cout in each source with <iostream>. Torch's headers include it."""


def symbols(path: Path) -> list[str]:
    """Return the readable names of the symbols that a library takes from other libraries."""
    names = subprocess.run(["nm", "-DCu", path], capture_output=True, text=True, check=True).stdout
    return [line.split(maxsplit=1)[1] for line in names.splitlines()]


@pytest.mark.skipif(shutil.which("nm") is None, reason="needs binutils")
def test_the_operations_use_no_streams() -> None:
    library = build.find()
    if library is None:
        pytest.skip("needs the C++ operations")
    streams = [name for name in symbols(library) if STREAMS.search(name) and COUNTED not in name]
    assert not streams, "a check with values is a WEFT_CHECK (csrc/check.h)"


@pytest.mark.skipif(shutil.which("readelf") is None, reason="needs binutils")
def test_a_compiler_that_links_a_static_libstdcxx_links_the_shared_one(tmp_path: Path) -> None:
    try:
        real = build.find_compiler()
    except BuildError:
        pytest.skip("needs a compiler")
    wrapper = tmp_path / "g++"
    wrapper.write_text(f'#!/bin/sh\nexec "{real.path}" -static-libstdc++ "$@"\n')
    wrapper.chmod(0o755)
    compiler = build.CppCompiler(path=str(wrapper), version=real.version)
    if not build._shared_runtime(compiler):
        pytest.skip("needs a shared libstdc++ beside the compiler")
    source, made = tmp_path / "one.cpp", tmp_path / "one.o"
    source.write_text("#include <string>\nstd::string text(int n) { return std::string(n + 40, 'a'); }\n")
    subprocess.run([wrapper, "-fPIC", "-c", source, "-o", made], check=True)
    build._link(compiler, [made], tmp_path / "libone.so", False, print)
    needs = subprocess.run(
        ["readelf", "-d", tmp_path / "libone.so"], capture_output=True, text=True, check=True
    )
    assert "[libstdc++.so.6]" in needs.stdout


def test_messages_have_integers_reals_and_names() -> None:
    if not cpu.load():
        pytest.skip("needs the C++ operations")
    x = torch.zeros(1, 4, dtype=torch.float16)
    with pytest.raises(RuntimeError, match="bfloat16 or float32, not Half"):
        torch.ops.weft_cpu.rms_norm(x, torch.ones(4, dtype=torch.float16), 1e-6)
    with pytest.raises(RuntimeError, match="gated: activation 9"):
        torch.ops.weft_cpu.gated(torch.zeros(1, 4), 9)
