"""Adapters of the key and value matrices of latent attention: equal to merged matrices, row by row."""

from __future__ import annotations

import pytest
import torch

from tests.support.latent import NAN, SMALL, Scene, Shape, bits
from weft.attention.base import CoreInput
from weft.attention.mla.latent import LatentBackend, LatentInput, UpMatrices
from weft.attention.mla.latent_cpu import CpuLatent
from weft.attention.mla.latent_invariant import InvariantLatent
from weft.attention.mla.latent_torch import TorchLatent
from weft.attention.mla.latent_triton import TritonLatent
from weft.attention.mla.up_adapters import UpAdapters, UpRows
from weft.layers.build import AdapterOptions, Build
from weft.ops import triton as kernels
from weft.ops.low_rank import AdapterRows

Tensor = torch.Tensor

ROWS = [(5, 9), (0, 70), (130, 1), (8, 4), (63, 1)]
PLACES = [1, -1, 0, 2, 1]
"""Place of the adapter of each row. Place 2 changes other matrices only."""
RANK = 4


def adapters(scene: Scene) -> UpAdapters:
    """Return random adapters in the places 0 and 1."""
    s = scene.shape
    build = Build(dtype=scene.dtype, device=torch.device("cpu"), adapters=AdapterOptions(places=3, rank=RANK))
    low = UpAdapters(build, s.heads, scene.mla)
    outputs = s.heads * (s.nope + s.v)
    low.allocate(1, (outputs, s.lora), [(0, 0, outputs)])
    random = torch.Generator().manual_seed(1)
    for place, rank in ((0, RANK), (1, 2)):
        low.pool.a[place, :, :rank].copy_(torch.randn(1, rank, s.lora, generator=random) * s.lora**-0.5)
        low.pool.b[place, :rank].copy_(torch.randn(rank, outputs, generator=random) * 0.5)
        low.pool.set_rank(place, rank)
        low.placed(place)
    return low


def merged(scene: Scene, low: UpAdapters, place: int) -> None:
    """Add the adapter of ``place`` to the matrices of ``scene``."""
    if place >= 0:
        product = (low.pool.b[place].T.double() @ low.pool.a[place, 0].double()).unflatten(
            0, (scene.shape.heads, -1)
        )
        scene.keys = (scene.keys.double() + product[:, : scene.shape.nope]).to(scene.dtype)
        scene.values = (scene.values.double() + product[:, scene.shape.nope :]).to(scene.dtype)


def run(scene: Scene, backend: LatentBackend, low: UpAdapters, rows: list[int]) -> Tensor:
    """Return the outputs of the sequences ``rows`` with their adapters."""
    segment, tokens = scene.segment([(row, 0, scene.rows[row][1]) for row in rows])
    numbers = torch.tensor(
        [PLACES[row] for row in rows for _ in range(scene.rows[row][1])], dtype=torch.int32
    )
    present = sorted({place for place in numbers.tolist() if place >= 0})
    changes = low.of(AdapterRows(numbers, present)) if present else None
    q, angles = scene.q[tokens], (scene.cos[tokens], scene.sin[tokens])
    out = q.new_full((len(q), scene.shape.heads, scene.shape.v), NAN)
    core = CoreInput(segment, {0: (scene.cache,)}, scene.mla.scale)
    backend.attend(q, out, core, LatentInput(angles, 0, scene.spec, scene.mla, scene.up, "absorbed", changes))
    return out


def check(scene: Scene, backend: LatentBackend, tolerance: float) -> None:
    low = adapters(scene)
    counts = [count for _, count in scene.rows]
    made = run(scene, backend, low, list(range(len(counts)))).split(counts)
    for place in (-1, 0, 1):
        other = Scene(scene.rows, scene.shape, dtype=scene.dtype)
        merged(other, low, place)
        due = other.expected().split(counts)
        for row, own in enumerate(PLACES):
            if place == (own if own < 2 else -1):
                assert (made[row].double() - due[row]).abs().max() < tolerance, (row, place)


@pytest.mark.parametrize("backend", [TorchLatent(), InvariantLatent()])
def test_rows_have_the_values_of_merged_matrices(backend: LatentBackend) -> None:
    check(Scene(ROWS), backend, 1e-11)


@pytest.mark.usefixtures("extension")
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-5), (torch.bfloat16, 6e-2)])
def test_the_compiled_operation(dtype: torch.dtype, tolerance: float) -> None:
    scene = Scene(ROWS, SMALL, dtype=dtype)
    check(scene, CpuLatent(), tolerance)
    low = adapters(scene)
    together = run(scene, CpuLatent(), low, [0, 1, 2, 3, 4]).split([count for _, count in ROWS])
    for row in range(len(ROWS)):
        assert torch.equal(bits(run(scene, CpuLatent(), low, [row])), bits(together[row])), row


def test_factors_scale_queries_and_values() -> None:
    """DoRA: factors of the outputs of a merged matrix."""
    scene = Scene([(3, 4), (0, 2)], Shape())
    low = adapters(scene)
    factors = (
        torch.rand(low.pool.b.shape[2], generator=torch.Generator().manual_seed(2), dtype=scene.dtype) + 0.5
    )
    low.pool.factors[0] = factors
    rows = AdapterRows(torch.tensor([0, 0, 0, 0, -1, -1], dtype=torch.int32), [0])
    changes = low.of(rows)
    assert isinstance(changes, UpRows)
    due = Scene([(3, 4), (0, 2)], Shape())
    merged(due, low, 0)
    own = factors.view(scene.shape.heads, -1, 1)
    due.keys, due.values = due.keys * own[:, : scene.shape.nope], due.values * own[:, scene.shape.nope :]
    plain = scene.expected()
    nope = changes.scaled_queries(scene.q[..., : scene.shape.nope])
    q = torch.cat((nope, scene.q[..., scene.shape.nope :]), dim=-1)
    segment, _ = scene.segment()
    out = torch.full_like(q[..., : scene.shape.v], NAN)
    core = CoreInput(segment, {0: (scene.cache,)}, scene.mla.scale)
    up = UpMatrices(keys=scene.keys, values=scene.values)
    angles = (scene.cos, scene.sin)
    TorchLatent().attend(q, out, core, LatentInput(angles, 0, scene.spec, scene.mla, up, "absorbed", changes))
    torch.testing.assert_close(out[:4], due.expected()[:4], rtol=1e-11, atol=1e-11)
    torch.testing.assert_close(out[4:], plain[4:], rtol=1e-11, atol=1e-11)


@pytest.mark.skipif(not kernels.interpreting(), reason="needs TRITON_INTERPRET=1")
def test_the_kernel_of_triton() -> None:
    """The backend adds the products around its kernel; the low-rank products here are torch's."""
    check(
        Scene([(5, 1), (0, 3), (130, 1), (8, 2), (63, 1)], Shape(), dtype=torch.float32), TritonLatent(), 1e-4
    )
