"""Bytes that other processes read by name: real processes, ends of processes, and invalid names."""

from __future__ import annotations

import fcntl
import os
import resource
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest

from weft.common import shared_bytes
from weft.common.errors import PixelsLost
from weft.common.shared_bytes import (
    UNREACHABLE,
    SharedBytes,
    SharedName,
    most_descriptors,
    open_shared,
    reaches,
    write_shared,
)

OWNER = """
import os, sys, msgspec
from weft.common.shared_bytes import SharedBytes, write_shared
made = SharedBytes(100_000)
write_shared(made.name, b"ab" * 50_000)
made.seal()
os.write(1, msgspec.msgpack.encode(made.name))
os.close(1)
sys.stdin.read()
"""
WRITER = """
import sys, msgspec
from weft.common.shared_bytes import SharedName, write_shared
write_shared(msgspec.msgpack.decode(sys.stdin.buffer.read(), type=SharedName), b"cd" * 50_000)
"""


@pytest.fixture
def owner() -> Iterator[tuple[subprocess.Popen[bytes], SharedName]]:
    """Return another process, and its shared bytes."""
    process = subprocess.Popen([sys.executable, "-c", OWNER], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    with process:
        assert process.stdout is not None
        yield process, msgspec.msgpack.decode(process.stdout.read(), type=SharedName)
        process.kill()


def read(name: SharedName) -> memoryview:
    fd, view = open_shared(name)
    os.close(fd)
    return view


@pytest.mark.requirement("D6")
def test_what_was_mapped_outlives_a_process_that_is_killed(
    owner: tuple[subprocess.Popen[bytes], SharedName],
) -> None:
    process, name = owner
    assert reaches(name)
    view = read(name)
    process.send_signal(signal.SIGKILL)
    process.wait()
    assert bytes(view) == b"ab" * 50_000
    assert view.readonly
    with pytest.raises(PixelsLost) as caught:
        read(name)
    assert caught.value.error_code == PixelsLost.code  # gone: there is nothing to be sent instead
    assert not reaches(name)


def test_another_process_writes_until_it_is_sealed() -> None:
    made = SharedBytes(100_000)
    words = msgspec.msgpack.encode(made.name)
    subprocess.run([sys.executable, "-c", WRITER], input=words, check=True)
    view = made.seal()
    assert bytes(view) == b"cd" * 50_000
    with pytest.raises(PixelsLost):
        write_shared(made.name, bytes(100_000))
    assert bytes(view) == b"cd" * 50_000
    made.close()


@pytest.mark.requirement("D6")
def test_nobody_can_cut_it_off() -> None:
    """Or a reader would die of SIGBUS."""
    made = SharedBytes(100_000)
    fd = os.open(f"/proc/self/fd/{made.name.fd}", os.O_RDWR)
    for sealed in (False, True):
        if sealed:
            view = made.seal()
        with pytest.raises(PermissionError):
            os.ftruncate(fd, 0)
    assert bytes(view) == bytes(100_000)
    os.close(fd)
    made.close()


def test_what_is_not_sealed_is_not_read() -> None:
    made = SharedBytes(10)
    with pytest.raises(PixelsLost):
        read(made.name)
    made.seal()
    assert bytes(read(made.name)) == bytes(10)
    with pytest.raises(PixelsLost):
        read(msgspec.structs.replace(made.name, size=11))
    made.close()


@pytest.mark.requirement("D6")
def test_a_descriptor_that_is_something_else_by_now(tmp_path: Path) -> None:
    """Other memory, files, pipes (which would block) and other descriptors of this process are refused."""
    made = SharedBytes(10)
    made.seal()
    name = made.name
    made.close()
    made.close()
    with pytest.raises(PixelsLost):
        read(name)
    others = [SharedBytes(10).name.fd]
    fcntl.fcntl(others[0], fcntl.F_ADD_SEALS, shared_bytes.SEALED)
    others.append(os.open(tmp_path, os.O_RDONLY))
    others += os.pipe()
    for fd in others:
        assert not reaches(msgspec.structs.replace(name, fd=fd))
    for pid in (1 << 30, -1):
        assert not reaches(msgspec.structs.replace(name, pid=pid))
    for fd in others:
        os.close(fd)


def test_without_a_descriptor_to_spare_it_is_said_that_bytes_are_wanted() -> None:
    made = SharedBytes(10)
    made.seal()
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (made.name.fd, hard))
        assert most_descriptors() == made.name.fd // 4
        with pytest.raises(PixelsLost) as caught:
            read(made.name)
        with pytest.raises(OSError):
            SharedBytes(10)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    assert caught.value.error_code == UNREACHABLE
    made.close()
