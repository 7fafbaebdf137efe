"""Blocks written to records by one group and read by another, compared element by element."""

from __future__ import annotations

import numpy as np
import pytest

from tests.disagg.protocol.memory import KINDS, Group, heads_of
from weft.disagg.protocol.group_layout import tensor_of
from weft.disagg.protocol.store_layout import part_bytes, parts_of, spans_to_read, spans_to_write
from weft.types.transfer import TensorDims, TransferMessageError

NAMES = list(KINDS)
SIZES = [(1, 1), (1, 2), (2, 1), (2, 2), (2, 4), (4, 1), (4, 2)]


def copied(parts, sources, targets) -> int:
    """Copy spans; return the number of bytes."""
    for part in parts:
        for begin, to, size in part.spans.tolist():
            targets[part.target][to : to + size] = sources[part.source][begin : begin + size]
    return sum(part.nbytes for part in parts)


def written(group: Group, kind: int, block: int) -> list[np.ndarray]:
    """Return the payload of each part of a block."""
    parts, made = parts_of(group.dims, kind), []
    for rank in range(parts):
        payload = np.zeros(part_bytes(group.dims, kind, parts), np.uint8)
        spans = spans_to_write(group.dims, kind, rank)
        # The spans cover the payload exactly once.
        assert copied(spans.out(block), group.regions[rank], [payload]) == len(payload) == spans.nbytes
        made.append(payload)
    return made


@pytest.mark.parametrize(("ranks", "ranks_to"), SIZES)
def test_a_group_reads_what_another_group_wrote(ranks, ranks_to):
    rng = np.random.default_rng(ranks * 10 + ranks_to)
    caches = [KINDS[name] for name in NAMES]
    writer, reader = (Group(caches, count, 8, 6, snapshots=True) for count in (ranks, ranks_to))
    writer.fill(rng)
    for kind, spec in enumerate(caches):
        block, block_to = 5, 2
        payloads = written(writer, kind, block)
        before = [[region.copy() for region in regions] for regions in reader.regions]
        for rank in range(ranks_to):
            for part, payload in enumerate(payloads):
                spans = spans_to_read(reader.dims, kind, rank, part, len(payloads))
                copied(spans.into(block_to), [payload], reader.regions[rank])
        for rank in range(ranks_to):
            for region in reader.regions_of(kind):
                names = [name for name, _ in reader.layouts[region].dims]
                got = reader.elements(rank, region)[:, block_to]
                want = whole(writer, region, spec, block)
                if "head" in names:
                    begin, end = heads_of(spec, dict(reader.layouts[region].dims)["head"], rank, ranks_to)
                    want = want.take(range(begin, end), names.index("head") - 1)
                np.testing.assert_array_equal(got, want)
                # Nothing else has changed.
                others = [n for n in range(1 + reader.num_blocks) if n != block_to]
                was = before[rank][region].reshape(reader.elements(rank, region).shape)
                np.testing.assert_array_equal(reader.elements(rank, region)[:, others], was[:, others])


def whole(group: Group, region: int, spec, block: int) -> np.ndarray:
    """Return a block of the whole model: [layer, ..] with the heads of all ranks."""
    names = [name for name, _ in group.layouts[region].dims]
    if "head" not in names:
        return group.elements(0, region)[:, block]
    axis, heads = names.index("head") - 1, dict[int, np.ndarray]()
    for rank in range(group.ranks):
        local = group.elements(rank, region)[:, block]
        begin, end = heads_of(spec, local.shape[axis], rank, group.ranks)
        heads |= {head: local.take([head - begin], axis) for head in range(begin, end)}
    return np.concatenate([heads[n] for n in sorted(heads)], axis)


def test_bytes_of_a_part_are_layer_major_and_back_to_back():
    group = Group([KINDS["full, two heads, fp8"]], 1, 8, 4, snapshots=True)
    group.fill(np.random.default_rng(0))
    (payload,) = written(group, 0, 3)
    flat = [group.elements(0, region)[:, 3].reshape(-1) for region in group.regions_of(0)]
    np.testing.assert_array_equal(payload, np.concatenate(flat))


def test_kinds_without_heads_have_one_part():
    group = Group([KINDS["latent"], KINDS["full"]], 2, 8, 4, snapshots=True)
    assert [parts_of(group.dims, kind) for kind in (0, 1)] == [1, 2]


def test_page_first_dims_have_strides():
    dims = (("block", 3), ("layer", 2), ("kv", 2), ("head", 4), ("position", 8), ("width", 5))
    tensor = tensor_of(TensorDims("values", dims, "bfloat16"))
    assert (tensor.block_stride, tensor.layer_stride) == (1280, 640)
    assert (tensor.layers, tensor.blocks, tensor.nbytes) == (2, 3, 3840)
    with pytest.raises(TransferMessageError):
        tensor_of(TensorDims("values", dims[1:2] + dims[:1] + dims[3:], "int3"))
    with pytest.raises(TransferMessageError):
        tensor_of(TensorDims("values", dims[2:], "bfloat16"))
