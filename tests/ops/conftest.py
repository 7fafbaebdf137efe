"""The CPU extension, built once for all tests of a session."""

from __future__ import annotations

import pytest

from weft.ops import cpu
from weft.ops.cpu import build


@pytest.fixture(scope="session")
def extension() -> None:
    """``torch.ops.weft_cpu`` can be called. Skips without a compiler; a build that fails is a failure."""
    try:
        build.find_compiler()
    except build.BuildError as error:
        pytest.skip(error.message)
    build.build()
    cpu.load.cache_clear()
    assert cpu.load()
