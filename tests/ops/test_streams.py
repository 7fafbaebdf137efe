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

from weft.common.measurements import cache_folder
from weft.ops import cpu
from weft.ops.cpu import build
from weft.ops.cpu.compilers import BuildError

CHECK = re.compile(r"\bTORCH_CHECK[A-Z_]*\(")
CONSTANT = re.compile(r'(\s*"[^"]*")+|\s*kAbortedText')
STREAMS = re.compile(r"\b(basic_)?([io]*(string)?stream|streambuf|stringbuf|ios)\b|\b(locale|ios_base)\b")
COUNTED = "std::ios_base::Init::"
"""g++ 12 and older count the users of std::cout in each source with <iostream>, as torch's headers do."""
BOXED = {"library.cpp"}
"""The source with torch's boxed values. The headers of boxed values format their own errors by streams."""


def symbols(path: Path) -> list[str]:
    """Return the readable names of the symbols that an object takes from other objects."""
    names = subprocess.run(["nm", "-Cu", path], capture_output=True, text=True, check=True).stdout
    return [line.split(maxsplit=1)[1] for line in names.splitlines()]


def arguments(call: str) -> list[str]:
    """Return the arguments of the call that ``call`` begins with, after its opening parenthesis."""
    depth, texts, found = 1, 0, [""]
    for letter in call:
        texts += letter == '"'
        if texts % 2 == 0:
            depth += (letter in "([{") - (letter in ")]}")
            if depth == 0:
                break
            if letter == "," and depth == 1:
                found.append("")
                continue
        found[-1] += letter
    return found


def test_checks_of_torch_have_constant_text() -> None:
    for source in build.SOURCES.iterdir():
        code = re.sub(r"//.*", "", source.read_text())
        for check in CHECK.finditer(code):
            found = arguments(code[check.end() :])
            assert len(found) == 2, f"{source.name}: use WEFT_CHECK for {found}"
            assert CONSTANT.fullmatch(found[1]), f"{source.name}: use WEFT_CHECK for {found}"


@pytest.mark.skipif(shutil.which("nm") is None, reason="needs binutils")
def test_the_operations_use_no_streams() -> None:
    try:
        compiler = build.find_compiler()
    except BuildError:
        pytest.skip("needs a compiler")
    paths = build.object_paths(compiler, build._target(), cache_folder() / "objects")
    built = {source.name: made for source, made in paths.items() if made.exists()}
    if not built:
        pytest.skip("needs objects of `weft build-ops`")
    for name in built.keys() - BOXED:
        streams = [symbol for symbol in symbols(built[name]) if STREAMS.search(symbol)]
        assert not [symbol for symbol in streams if COUNTED not in symbol], name


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
