"""Settings of every test. Without a GPU, Triton's kernels run in Triton's interpreter on the CPU.

Triton reads the choice at import, and torch reads the wait mode of CPU threads at import. Both are therefore
set here, before any test module can import Triton or torch.
"""

from __future__ import annotations

import ast
import functools
import gc
import os
import threading
from collections.abc import Generator, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.support import forked, order
from tests.support.counted import drop_counts
from tests.support.interpreted import patch_language_once
from tests.support.slow import ELSEWHERE
from tests.support.slowness import deadline
from weft.common import env
from weft.common.open_files import allow_files

env.spin_briefly()  # before torch is imported: waiting threads would take the core from other processes

import hypothesis  # noqa: E402
import numpy as np  # noqa: E402
import torch  # noqa: E402

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")

# By default an example that takes 200 ms fails, which depends on the load of the machine.
hypothesis.settings.register_profile("weft", hypothesis.settings(), deadline=None)
hypothesis.settings.load_profile("weft")

_parsing = threading.RLock()  # a finalizer in the middle of a parse may parse, too
_parse = ast.parse


@functools.wraps(_parse)
def _parse_alone(*args: Any, **kwargs: Any) -> ast.AST:
    with _parsing:
        return _parse(*args, **kwargs)


# Python 3.11 before 3.11.8, and 3.12 before 3.12.2: `ast.parse` in two threads at the same time may raise
# SystemError (python/cpython issue 106905). Ranks that are threads parse kernels for Triton's interpreter.
ast.parse = _parse_alone


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--write-composition", action="store_true", help="write docs/composition.md from tests/composition"
    )
    parser.addoption(
        "--real-processes", action="store_true", help="processes of Weft import everything anew, each"
    )


def pytest_configure(config: pytest.Config) -> None:
    allow_files()  # one process runs thousands of tests, and cycles keep the files of a test open for a while
    if not config.getoption("real_processes") and not torch.cuda.is_available():
        forked.install()


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup() -> None:
    """Make the random tensors of a test, and of its fixtures, independent of earlier tests. Keep the patches
    of Triton's interpreter."""
    patch_language_once()
    torch.manual_seed(0)


@pytest.hookimpl(trylast=True)
def pytest_runtest_teardown(item: pytest.Item) -> None:
    """Undo a change of the default dtype, and name the test. Threads that load models of transformers at the
    same time may leave such a change. Drop counts of log lines, which would appear in a later test."""
    drop_counts()
    if torch.get_default_dtype() is not torch.float32:
        torch.set_default_dtype(torch.float32)
        item.warn(pytest.PytestWarning(f"{item.nodeid} left another default dtype"))


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """Freeze the loaded modules and tests, so that the cycle collector does not scan them repeatedly."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.collect()
        gc.freeze()
        gc.enable()


def pytest_itemcollected(item: pytest.Item) -> None:
    """Mark a case with a slow value and a grid value as grid only."""
    if any(mark.name == "slow" for mark in item.own_markers) and any(map(item.get_closest_marker, ELSEWHERE)):
        item.own_markers[:] = [mark for mark in item.own_markers if mark.name != "slow"]


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Place files that wait between files that compute: see ``tests.support.order``."""
    files: dict[Path, list[pytest.Item]] = {}
    for item in items:
        files.setdefault(item.path.relative_to(Path(__file__).parent), []).append(item)
    items[:] = [item for file in order.by_turns(list(files)) for item in files[file]]


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_protocol(item: pytest.Item) -> Generator[None, object, object]:
    """Scale the time-out of a test (marker or default) to the speed of this machine.

    A test with the marker ``real_processes`` starts new processes, no forks (``tests.support.forked``).
    """
    marker = item.get_closest_marker("timeout")
    given = marker.args[0] if marker else item.config.getoption("timeout") or item.config.getini("timeout")
    item.add_marker(pytest.mark.timeout(deadline(float(given))), append=False)
    if item.get_closest_marker("real_processes") is None:
        return (yield)
    with forked.real():
        return (yield)


@pytest.fixture
def kept_threads() -> Iterator[None]:
    """Let a test change torch's number of CPU threads of this thread; the number comes back afterwards."""
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="session")
def extension() -> None:
    """Load ``torch.ops.weft_cpu``. Skip without a compiler. A failed build is a failure."""
    from weft.ops import cpu
    from weft.ops.cpu import build

    try:
        build.find_compiler()
    except build.BuildError as error:
        pytest.skip(error.message)
    build.build()
    cpu.load.cache_clear()
    assert cpu.load()


@pytest.fixture
def ordered_products(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make products of Triton's interpreter sum each element in a fixed order.

    The order of numpy can depend on the place of the row, with OpenBLAS on CPUs without AVX-512.
    """
    if torch.cuda.is_available():
        return
    interpreter = pytest.importorskip("triton.runtime.interpreter")

    def dot(builder: Any, a: Any, b: Any, d: Any, *_: Any) -> Any:
        made = np.einsum("...mk,...kn->...mn", a.data, b.data, dtype=d.data.dtype, optimize=False)
        return interpreter.TensorHandle(made + d.data, d.dtype.scalar)

    monkeypatch.setattr(interpreter.InterpreterBuilder, "create_dot", dot)
