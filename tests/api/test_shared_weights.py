"""Files of new weights in shared memory do not outlive their process."""

from __future__ import annotations

import fcntl
import os
import time
from pathlib import Path

from weft.api.weights import STALE_S, Weights, _Written, delete_stale


def _file(path: Path, age: float) -> Path:
    path.write_bytes(b"x")
    os.utime(path, (time.time() - age, time.time() - age))
    return path


def test_files_of_killed_processes_are_deleted(tmp_path: Path) -> None:
    name = "weft-7-0123456789abcdef.safetensors"
    stale = [_file(tmp_path / one, STALE_S + 60) for one in (name, f".{name}.7")]
    kept = [
        _file(tmp_path / name.replace("7", "8", 1), 0),
        _file(tmp_path / "weft-lost.safetensors", STALE_S + 60),
        locked := _file(tmp_path / name.replace("7", "9", 1), STALE_S + 60),
    ]
    with locked.open() as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        delete_stale(tmp_path)
    assert not any(one.exists() for one in stale)
    assert all(one.exists() for one in kept)


def test_files_end_with_an_llm_that_was_not_shut_down(tmp_path: Path) -> None:
    path = _file(tmp_path / "a", 0)
    weights = Weights()
    weights._kept.append(_Written(path, os.open(path, os.O_RDONLY)))
    del weights
    assert not path.exists()
