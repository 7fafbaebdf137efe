"""Fixtures for tests of operations."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from tests.ops.stub_compiler import use_stub
from weft.ops import cpu
from weft.ops.cpu import build


@pytest.fixture(params=["tiles", "brgemm"])
def kernel(request: pytest.FixtureRequest, extension: None) -> Iterator[str]:
    """Select each kernel for bf16 sums in turn, independent of the machine's choice."""
    if request.param == "brgemm" and "brgemm" not in cpu.capabilities():
        pytest.skip("ATen's brgemm does not take bf16 on this CPU")
    before = torch.ops.weft_cpu.set_brgemm.default(request.param == "brgemm")
    yield request.param
    torch.ops.weft_cpu.set_brgemm.default(before)


@pytest.fixture
def sources(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "csrc"
    folder.mkdir()
    (folder / "one.cpp").write_text('#include "shared.h"\n')
    (folder / "two.cpp").write_text("int two;\n")
    (folder / "shared.h").write_text('#include "deep.h"\n')
    (folder / "deep.h").write_text("int deep;\n")
    monkeypatch.setattr(build, "SOURCES", folder)
    monkeypatch.setenv("WEFT_OPS_CACHE", str(tmp_path / "cache"))
    monkeypatch.delenv("WEFT_CPU_LEVEL", raising=False)
    return folder


@pytest.fixture
def calls(tmp_path: Path, sources: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Make the stub the compiler. Return the file with a line per call."""
    file = tmp_path / "calls"
    use_stub(tmp_path, monkeypatch, "1.0")
    return file
