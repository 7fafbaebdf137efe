"""Files of new weights in shared memory do not outlive their process."""

from __future__ import annotations

import fcntl
import os
import time
from pathlib import Path

from weft.store.shared_files import LOST_S, STALE_S, SharedFiles, delete_stale, new_token, shared_name


def _file(path: Path, age: float) -> Path:
    path.write_bytes(b"x")
    os.utime(path, (time.time() - age, time.time() - age))
    return path


def test_files_of_killed_processes_are_deleted(tmp_path: Path) -> None:
    name = "weft-7-0123456789abcdef.safetensors"
    stale = [_file(tmp_path / name, STALE_S + 60), _file(tmp_path / f".{name}.7", LOST_S + 10)]
    kept = [
        _file(tmp_path / name.replace("7", "8", 1), LOST_S + 10),
        _file(tmp_path / "weft-lost.safetensors", STALE_S + 60),
        locked := _file(tmp_path / name.replace("7", "9", 1), STALE_S + 60),
    ]
    with locked.open() as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        delete_stale(tmp_path)
    assert not any(one.exists() for one in stale)
    assert all(one.exists() for one in kept)


def test_the_last_process_that_needs_a_file_deletes_the_file(tmp_path: Path) -> None:
    ours = _file(tmp_path / shared_name(0, new_token()), 0)
    theirs = _file(tmp_path / "trainer.safetensors", 0)
    files = [str(ours), str(theirs), str(tmp_path / shared_name(1, new_token()))]
    first, last = SharedFiles(), SharedFiles()
    for one in (first, last):
        one.hold(files)
        one.hold(files)
        one.keep(files)
    first.keep([])
    assert ours.exists()
    del last, one  # a process that ends without a word
    assert not ours.exists()
    assert theirs.exists()
