"""Private folders: folders of dead processes are removed, all other folders stay."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from weft.common import measurements
from weft.common.folder import cache_folder, expanded, private_folder

MAKER = "from weft.common.folder import private_folder; print(private_folder(), flush=True); input()"


@pytest.fixture
def temporary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="w") as short:  # otherwise in /tmp
        monkeypatch.setenv("TMPDIR", short)
        monkeypatch.setattr(tempfile, "tempdir", None)
        yield Path(short)
    tempfile.tempdir = None


def other_process() -> tuple[subprocess.Popen[str], Path]:
    """Return a process that holds a folder, and the folder."""
    process = subprocess.Popen(
        [sys.executable, "-c", MAKER], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    return process, Path(process.stdout.readline().strip())


def end(process: subprocess.Popen[str]) -> None:
    process.kill()
    process.communicate()


def test_the_folder_of_a_killed_process_is_swept_and_that_of_a_living_one_is_not(temporary: Path) -> None:
    dead, left = other_process()
    living, kept = other_process()
    try:
        (left / "head0").write_text("")
        end(dead)
        assert left.parent == temporary
        assert left.is_dir()
        own = private_folder()
        assert not left.exists()
        assert kept.is_dir()
        another = private_folder()
        assert own.is_dir()
        assert own != another
    finally:
        end(living)


def test_folders_of_owners_not_proven_dead_stay(temporary: Path) -> None:
    def made(name: str, mode: int = 0o700, lock: bool = True) -> Path:
        folder = temporary / name
        folder.mkdir(mode=mode)
        folder.chmod(mode)
        if lock:
            (folder / "owner.lock").write_text("")
        return folder

    swept = made("weft-abcd_123")
    stay = [
        made("weft-abcd_124", lock=False),
        made("weft-abcd_125", mode=0o755),  # others may enter: not made here
        made("weft-abcd"),
        made("weft-verify-abcd_126"),
        made("other-abcd_127"),
    ]
    outside = made("elsewhere")
    (temporary / "weft-abcd_128").symlink_to(outside)
    linked = made("weft-abcd_129", lock=False)
    (linked / "owner.lock").symlink_to(outside / "owner.lock")
    (swept / "link").symlink_to(outside)
    if os.geteuid() == 0:
        stay.append(made("weft-abcd_130"))
        os.chown(stay[-1], 12345, -1)
    private_folder()
    assert not swept.exists()
    assert all(folder.is_dir() for folder in [*stay, outside, linked])
    assert (temporary / "weft-abcd_128").is_symlink()
    assert (outside / "owner.lock").is_file()


def test_a_user_without_a_home(monkeypatch: pytest.MonkeyPatch) -> None:
    """In a container the user may have no entry in the list of users. Caches then cannot be written."""

    def no_home() -> Path:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.setattr(Path, "home", no_home)
    for name in ("XDG_CACHE_HOME", "WEFT_OPS_CACHE"):
        monkeypatch.delenv(name, raising=False)
    for folder in (cache_folder("kv"), measurements.cache_folder()):
        assert "no-home-folder" in str(folder)
        with pytest.raises(OSError, match="Not a directory"):
            folder.mkdir(parents=True)
    assert str(expanded("~nobody-here/x")) == "~nobody-here/x"
