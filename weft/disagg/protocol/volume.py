"""Number of bytes moved by a transfer, computed from lengths and layouts."""

from __future__ import annotations

from weft.disagg.protocol.group_layout import Tensor, heads_of, tensors_of
from weft.disagg.protocol.spans import first_position
from weft.types.transfer import CacheGroupDims, GroupDims


def transfer_bytes(sender: GroupDims, receiver: GroupDims, start: int, end: int) -> int:
    """Return the number of bytes for all ranks of ``receiver`` together: positions ``start`` .. end - 1,
    and one recurrent state of each state group."""
    total = 0
    for source, target, tensors in zip(sender.kinds, receiver.kinds, tensors_of(receiver), strict=True):
        entries = _entries(source, target, start, end)
        for tensor in tensors:
            nbytes = tensor.layers * tensor.kv * tensor.entry_bytes * entries
            total += nbytes * _heads(target, tensor, receiver.ranks)
    return total


def _entries(sender: CacheGroupDims, receiver: CacheGroupDims, start: int, end: int) -> int:
    if receiver.kind == "state":
        return 1
    first = first_position(sender, receiver, start, end)
    return max(0, end // receiver.ratio - first // receiver.ratio)


def _heads(kind: CacheGroupDims, tensor: Tensor, ranks: int) -> int:
    """Return the number of copies of one entry over all ranks. A tensor without heads goes whole to each
    rank, except where ranks take shares of the rows."""
    if not tensor.heads:
        return 1 if kind.shards else ranks
    return sum(heads_of(kind, tensor, rank, ranks).size for rank in range(ranks))
