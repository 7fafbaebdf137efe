"""Adapters of embedding and output head: values of the definition, and rows that depend on nothing else."""

from __future__ import annotations

import pytest
import torch

from weft.layers.build import AdapterOptions, Build
from weft.layers.dense import LMHead, TokenEmbedding
from weft.ops.low_rank import AdapterRows

CPU = torch.device("cpu")
VOCAB, HIDDEN, RANK = 37, 64, 3
PLACES = [-1, 1, 0, 0, 2, 1, -1]
IDS = torch.tensor([3, 3, 36, 0, 5, 9, 1])


def rows(numbers: list[int]) -> AdapterRows:
    return AdapterRows(
        torch.tensor(numbers, dtype=torch.int32), sorted({place for place in numbers if place >= 0})
    )


def layers(dtype: torch.dtype, quantization: str, tied: bool) -> tuple[TokenEmbedding, LMHead]:
    """Return both layers. Place 0 has low-rank parts, place 1 whole matrices, and place 2 nothing."""
    options = AdapterOptions(places=3, rank=4, saved=True)
    build = Build(dtype=dtype, device=CPU, quantization=quantization, adapters=options)
    embedding = TokenEmbedding(VOCAB, HIDDEN, build, tied=tied, adapted=True)
    head = LMHead(embedding, build, tied=tied)
    random = torch.Generator().manual_seed(2)
    for layer in (embedding, head):
        if layer.weight is not None:
            layer.weight.data.copy_(torch.randn(VOCAB, HIDDEN, generator=random) * 0.2)
    embedding.pack()
    head.pack()
    of_rows, of_head = embedding.low, head.low
    assert of_rows is not None
    assert of_head is not None
    of_rows.rows[0, :, :RANK] = torch.randn(VOCAB, RANK, generator=random).to(dtype)
    of_rows.low.pool.b[0, :RANK] = torch.randn(RANK, HIDDEN, generator=random).to(dtype)
    of_rows.low.pool.set_rank(0, RANK)
    of_rows.changing |= {0, 1}
    of_rows.whole[1] = torch.randn(VOCAB, HIDDEN, generator=random).to(dtype)
    of_rows.replaced.add(1)
    of_head.low.pool.a[0, 0, :RANK] = torch.randn(RANK, HIDDEN, generator=random).to(dtype)
    of_head.low.pool.b[0, :RANK] = torch.randn(RANK, VOCAB, generator=random).to(dtype)
    of_head.low.pool.set_rank(0, RANK)
    of_head.replace(1, torch.randn(VOCAB, HIDDEN, generator=random).to(dtype))
    return embedding, head


@pytest.mark.usefixtures("extension")
@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize(
    ("dtype", "quantization"),
    [(torch.float64, "none"), (torch.bfloat16, "none"), (torch.float32, "int8")],
)
def test_rows_of_each_place(dtype: torch.dtype, quantization: str, tied: bool) -> None:
    embedding, head = layers(dtype, quantization, tied)
    x = torch.randn(len(PLACES), HIDDEN, generator=torch.Generator().manual_seed(7)).to(dtype)
    found, logits = embedding(IDS, rows(PLACES)), head(x, rows(PLACES))
    plain, base = embedding(IDS), head(x)
    tolerance = {torch.float64: 1e-12, torch.float32: 1e-4, torch.bfloat16: 5e-2}[dtype]
    low, top = embedding.low, head.low.low.pool
    for row, place in enumerate(PLACES):
        due, of_head = plain[row], base[row]
        if place == 0:
            due = due + low.rows[0, IDS[row]] @ low.low.pool.b[0]
            of_head = of_head + top.b[0].T @ (top.a[0, 0] @ x[row])
        elif place == 1:
            due = low.whole[1, IDS[row]]
        torch.testing.assert_close(found[row], due, rtol=tolerance, atol=tolerance)
        if place != 1:
            torch.testing.assert_close(logits[row], of_head, rtol=tolerance, atol=5 * tolerance)
        if dtype == torch.float64:
            continue
        alone = rows([place])
        assert torch.equal(embedding(IDS[row : row + 1], alone)[0], found[row])
        assert torch.equal(head(x[row : row + 1], alone)[0], logits[row])
        assert torch.equal(logits[row], base[row]) == (place in (-1, 2))
