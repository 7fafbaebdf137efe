"""Requests of trainers that broadcast: what is read, and what is refused before anything is received."""

from __future__ import annotations

from typing import Any

import pytest

from weft.common.errors import InvalidRequest
from weft.store.announced import broadcasts, read_group, read_tensors, sizes

GROUP: dict[str, Any] = {
    "master_address": "10.0.0.1",
    "master_port": 29500,
    "rank_offset": 2,
    "world_size": 6,
}
TENSORS: dict[str, Any] = {
    "names": ["a", "b", "c"],
    "dtype_names": ["float32", "torch.bfloat16", "int8"],
    "shapes": [[2, 3], [5], []],
}


def test_the_form_of_vllm_is_read() -> None:
    group, first = read_group(GROUP, "cuda", 4)
    assert (group.backend, group.world_size, first) == ("nccl", 6, 2)
    assert read_group(GROUP | {"timeout": 7}, "cpu", 4)[0].seconds == 7
    tensors = read_tensors(TENSORS, {})
    assert (tensors.dtypes, sizes(tensors)) == (("float32", "bfloat16", "int8"), [24, 10, 1])
    assert list(broadcasts(tensors)) == [[(0, 24)], [(1, 10)], [(2, 1)]]
    # A buffer takes tensors until their bytes exceed its size.
    packed = read_tensors(TENSORS, {"packed": True, "packed_buffer_size_bytes": 24})
    assert list(broadcasts(packed)) == [[(0, 24), (1, 10)], [(2, 1)]]


@pytest.mark.parametrize(
    ("change", "device", "why"),
    [
        ({"backend": "nccl"}, "cpu", "use gloo, shm or file"),
        ({"backend": "ipc"}, "cpu", "ipc passes memory of a GPU, and this server uses a CPU"),
        ({"backend": "gloo"}, "cuda", "use nccl"),
        ({"master_address": ""}, "cpu", "master_address"),
        ({"master_port": 0}, "cpu", "master_port"),
        ({"master_port": True}, "cpu", "master_port"),
        ({"rank_offset": 0}, "cpu", "rank_offset"),
        ({"world_size": 7}, "cpu", "the server has 4 ranks"),
        ({"timeout": 1e9}, "cpu", "timeout"),
    ],
)
def test_a_group_that_cannot_be_formed_is_refused(change: dict[str, Any], device: str, why: str) -> None:
    with pytest.raises(InvalidRequest, match=why):
        read_group(GROUP | change, device, 4)


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ({"names": ["a", "a", "c"]}, "different names"),
        ({"names": []}, "1 to 100000"),
        ({"names": "abc"}, "names must be a list"),
        ({"names": ["a", "b", "\0"]}, "printable"),
        ({"dtype_names": ["float32"]}, "dtype_names has 1 entries, and names has 3"),
        ({"dtype_names": ["float32", "complex64", "int8"]}, "b has type complex64"),
        ({"shapes": [[2, 3], [5], [-1]]}, "c has no possible shape"),
        ({"shapes": [[2, 3], [1 << 50], []]}, "b has no possible shape"),
        ({"shapes": [[2, 3], [True], []]}, "b has no possible shape"),
        ({"shapes": [[2, 3], [0], []]}, "b has no possible shape"),
        ({"shapes": [[2, 3], [1] * 9, []]}, "b has no possible shape"),
        ({"digests": [1, 2, 1 << 32]}, "CRC-32"),
        ({"digests": [1]}, "digests has 1 entries"),
        ({"ipc_handles_pickled": "gASVBQAAAA=="}, "a pickle runs code of its sender"),
        ({"ipc_handles": [{"GPU-1": ["rebuild", []]}] * 3}, "ipc_handles must be a list of"),
        ({"ipc_handles": [{"gpu": "GPU-1", "name": "AAAA", "offset": 0}] * 3}, "base64 of 64 bytes"),
        ({"ipc_handles": []}, "ipc_handles has 0 entries"),
        ({"packed": 1}, "packed must be"),
        ({"packed_buffer_size_bytes": 0}, "packed_buffer_size_bytes"),
        ({"packed_num_buffers": 1000}, "packed_num_buffers"),
    ],
)
def test_tensors_that_cannot_be_received_are_refused(change: dict[str, Any], why: str) -> None:
    with pytest.raises(InvalidRequest, match=why):
        read_tensors(TENSORS | change, {})
