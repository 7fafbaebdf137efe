"""Broadcasts of a trainer over gloo, between two members in threads of this process."""

from __future__ import annotations

import ctypes
import pickle
import threading
from dataclasses import dataclass

import msgspec
import pytest
import torch

from tests.support.slowness import deadline
from tests.support.trainers import free_port, group_info, trainer_group
from weft.common.errors import InvalidRequest
from weft.models.weight_group import WeightGroup, announce, communicator_id, receive, send
from weft.types.weights import AnnouncedTensors

SENT = [
    ("a", torch.arange(6.0).reshape(2, 3)),
    ("b", torch.arange(7, dtype=torch.bfloat16)[::2]),
    ("c", torch.tensor(3, dtype=torch.int8)),
    ("d", torch.arange(40, dtype=torch.uint8).reshape(5, 8)),
]


@dataclass
class Pair:
    """The trainer and one receiver."""

    trainer: WeightGroup
    receiver: WeightGroup

    def receive(self, announced: AnnouncedTensors) -> list[tuple[str, torch.Tensor]]:
        """Send ``SENT``, and return what arrives as ``announced``."""
        thread = threading.Thread(
            target=lambda: send(self.trainer, SENT, announce(SENT, announced.packed, 30))
        )
        thread.start()
        try:
            return [(name, tensor.clone()) for name, tensor in receive(self.receiver, announced)]
        finally:
            thread.join(deadline(30))


@pytest.fixture(scope="module")
def pair() -> Pair:
    group = trainer_group(group_info(free_port(), 1))
    made: list[WeightGroup] = []
    thread = threading.Thread(target=lambda: made.append(WeightGroup(group, 1)))
    thread.start()
    trainer = WeightGroup(group, 0)
    thread.join(deadline(30))
    return Pair(trainer, made[0])


@pytest.mark.parametrize("packed", [False, True])
def test_tensors_arrive_with_their_bits(pair: Pair, packed: bool) -> None:
    found = pair.receive(announce(SENT, packed, 30))
    assert [name for name, _ in found] == [name for name, _ in SENT]
    for (_, tensor), (_, sent) in zip(found, SENT, strict=True):
        assert tensor.dtype == sent.dtype
        assert torch.equal(tensor, sent)


def test_other_bytes_than_announced_are_named(pair: Pair) -> None:
    announced = announce(SENT)
    longer = msgspec.structs.replace(announced, shapes=(*announced.shapes[:3], (5, 16)))
    with pytest.raises(InvalidRequest, match="fewer bytes than announced, up to tensor d"):
        pair.receive(longer)
    other = msgspec.structs.replace(announced, digests=(*announced.digests[:3], 1))
    with pytest.raises(InvalidRequest, match="tensor d arrived with other bytes"):
        pair.receive(other)


class _Id(ctypes.Structure):
    _fields_ = (("internal", ctypes.c_byte * 128),)


def test_the_identifier_of_a_communicator_is_found_in_a_pickle_without_running_the_pickle() -> None:
    sent = bytes(range(128))
    assert communicator_id(sent) == sent
    for protocol in range(3, pickle.HIGHEST_PROTOCOL + 1):
        assert communicator_id(pickle.dumps(_Id.from_buffer_copy(sent), protocol)) == sent
    for data in (b"", b"x", pickle.dumps([1]), pickle.dumps([sent, sent[::-1]]), b"\x80\x05cos\nsystem\n."):
        with pytest.raises(InvalidRequest, match="no NCCL communicator"):
            communicator_id(data)
