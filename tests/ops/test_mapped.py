"""Pages of mapped files are recognized, and dropped after reading."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch

from tests.support.mapped_pages import resident_of
from weft.ops.mapped import Mapped, mapped_around

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="/proc")
SIZE = 8 << 20


def mapped(path: Path) -> tuple[torch.Tensor, torch.Tensor]:
    """Write a file. Return its mapped content, and the expected numbers."""
    numbers = torch.arange(SIZE // 8)
    path.write_bytes(numbers.numpy().tobytes())
    storage = torch.UntypedStorage.from_file(str(path), shared=False, nbytes=SIZE)
    return torch.empty(0, dtype=torch.int64).set_(storage), numbers


def test_what_was_read_goes_and_is_read_again(tmp_path: Path) -> None:
    tensor, numbers = mapped(tmp_path / "file")
    found = mapped_around(tensor[1000:])
    assert found is not None
    assert (found.begin, found.end) == (tensor.data_ptr(), tensor.data_ptr() + SIZE)
    assert torch.equal(tensor, numbers)
    assert resident_of(tmp_path / "file") == SIZE
    found.drop(tensor[: SIZE // 16])  # neighbouring pages may go too
    assert SIZE // 4 <= resident_of(tmp_path / "file") <= SIZE // 2
    found.drop(tensor.view(-1, 64)[:, 3:5])  # columns: everything between the first and the last
    assert resident_of(tmp_path / "file") == 0
    assert torch.equal(tensor, numbers)
    assert resident_of(tmp_path / "file") == SIZE
    found.drop()
    assert resident_of(tmp_path / "file") == 0


def test_other_memory_stays(tmp_path: Path) -> None:
    """Covers memory of the process, of another file, and of an empty tensor."""
    tensor, numbers = mapped(tmp_path / "file")
    other, _ = mapped(tmp_path / "other")
    found = mapped_around(tensor)
    assert found is not None
    own = torch.arange(1 << 20)
    assert mapped_around(own) is None
    assert int(other.sum()) == int(numbers.sum())
    for one in (own, other, tensor[:0]):
        assert not found.has(one)
        found.drop(one)
    assert torch.equal(own, torch.arange(1 << 20))
    assert resident_of(tmp_path / "other") == SIZE


def test_it_keeps_the_mapping(tmp_path: Path) -> None:
    """Without the reference the addresses could become other memory."""
    tensor, _ = mapped(tmp_path / "file")
    found: Mapped | None = mapped_around(tensor)
    del tensor
    assert found is not None
    assert int(found.owner[-1]) == SIZE // 8 - 1
