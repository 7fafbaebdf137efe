"""For every test. Without a GPU, Triton's kernels run in its interpreter, on the CPU.

That is chosen when Triton is imported, so it is set here, before any test module can import it.
"""

from __future__ import annotations

import os

import pytest
import torch

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--write-composition", action="store_true", help="write docs/composition.md from tests/composition"
    )


@pytest.fixture(scope="session")
def extension() -> None:
    """``torch.ops.weft_cpu`` can be called. Skips without a compiler; a build that fails is a failure."""
    from weft.ops import cpu
    from weft.ops.cpu import build

    try:
        build.find_compiler()
    except build.BuildError as error:
        pytest.skip(error.message)
    build.build()
    cpu.load.cache_clear()
    assert cpu.load()
