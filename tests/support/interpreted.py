"""Triton's interpreter in tests: less work per launch, and launches of several threads at the same time.

The interpreter patches ``triton.language`` for the time of a launch, and again at each call of a device
function, for milliseconds each. It also keeps the place in the grid in one object.
"""

from __future__ import annotations

import importlib
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

_lock = threading.Lock()
_patched: Any = None


class _Nothing:
    """Replaces the patches of one launch: they stay for all launches."""

    def restore(self) -> None: ...


def patch_language_once() -> None:
    """Let patches of ``triton.language`` stay until the process ends, if the interpreter is imported."""
    global _patched
    interpreter: Any = sys.modules.get("triton.runtime.interpreter")
    if interpreter is None or interpreter._patch_lang is _patched:
        return
    language: Any = importlib.import_module("triton.language")
    original, made = interpreter._patch_lang, set[tuple[bool, bool]]()

    def patched(fn: Any) -> _Nothing:
        """Patch the modules that ``fn`` uses, at the first time."""
        used = list(fn.__globals__.values())
        key = (any(one is language for one in used), any(one is language.core for one in used))
        with _lock:
            if key not in made:
                original(fn)
                made.add(key)
        return _Nothing()

    interpreter._patch_lang = _patched = patched


@contextmanager
def launches_beside_each_other() -> Iterator[None]:
    """Let several threads run interpreted kernels. Skip the test without the interpreter."""
    from weft.ops.triton import interpreting  # imports torch, which tests/conftest.py imports late

    if not interpreting():
        pytest.skip("needs Triton's interpreter")
    interpreter: Any = importlib.import_module("triton.runtime.interpreter")
    patch_language_once()
    here = threading.local()
    patch = pytest.MonkeyPatch()
    switching = sys.getswitchinterval()
    try:
        for name in ("grid_idx", "grid_dim"):
            patch.delattr(interpreter.interpreter_builder, name, raising=False)
            patch.setattr(interpreter.InterpreterBuilder, name, _of_thread(here, name), raising=False)
        sys.setswitchinterval(1e-4)  # a thread that polls gives way sooner
        yield
    finally:
        sys.setswitchinterval(switching)
        patch.undo()


def _of_thread(here: threading.local, name: str) -> property:
    return property(lambda _: getattr(here, name), lambda _, value: setattr(here, name, value))
