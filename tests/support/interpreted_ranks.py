"""Ranks as threads of one process whose Triton kernels run in the interpreter at the same time.

The interpreter keeps the place in the grid in one object, and patches ``triton.language`` for the time of a
launch. Both assume one launch at a time.
"""

from __future__ import annotations

import importlib
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from weft.ops.triton import interpreting


class _Nothing:
    """Replaces the patches of one launch: they stay for all launches."""

    def restore(self) -> None: ...


@contextmanager
def launches_beside_each_other() -> Iterator[None]:
    """Let several threads run interpreted kernels. Skip the test without the interpreter."""
    if not interpreting():
        pytest.skip("needs Triton's interpreter")
    interpreter: Any = importlib.import_module("triton.runtime.interpreter")
    language: Any = importlib.import_module("triton.language")
    here, lock = threading.local(), threading.Lock()
    original, made = interpreter._patch_lang, dict[tuple[bool, bool], Any]()

    def patched(fn: Any) -> _Nothing:
        """Patch the modules that ``fn`` uses, at the first time."""
        used = list(fn.__globals__.values())
        key = (any(one is language for one in used), any(one is language.core for one in used))
        with lock:
            if key not in made:
                made[key] = original(fn)
        return _Nothing()

    patch = pytest.MonkeyPatch()
    switching = sys.getswitchinterval()
    try:
        patch.setattr(interpreter, "_patch_lang", patched)
        for name in ("grid_idx", "grid_dim"):
            patch.delattr(interpreter.interpreter_builder, name, raising=False)
            patch.setattr(interpreter.InterpreterBuilder, name, _of_thread(here, name), raising=False)
        sys.setswitchinterval(1e-4)  # a thread that polls gives way sooner
        yield
    finally:
        sys.setswitchinterval(switching)
        patch.undo()
        for scope in reversed(made.values()):
            scope.restore()


def _of_thread(here: threading.local, name: str) -> property:
    return property(lambda _: getattr(here, name), lambda _, value: setattr(here, name, value))
