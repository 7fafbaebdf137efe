"""Latent attention of the CPU extension: close to float64, equal bits in any batch within a form."""

from __future__ import annotations

import pytest
import torch

from tests.support.latent import NAN, SMALL, WIDE, Scene, Shape, bits
from tests.support.pairwise import sampled
from tests.support.slow import mostly_slow
from tests.support.specs import model_spec
from weft.attention.base import CoreInput
from weft.attention.mla.latent import Form, LatentInput
from weft.attention.mla.latent_cpu import CpuLatent
from weft.common.errors import ConfigError
from weft.config.spec import MLASpec
from weft.ops.cpu import latent as cpu_ops
from weft.ops.latent_ops import latent_rope_cache

Tensor = torch.Tensor

pytestmark = pytest.mark.usefixtures("extension", "kept_threads")

FORMS: tuple[Form, Form] = ("expanded", "absorbed")
TOLERANCE = {torch.bfloat16: 2e-2, torch.float32: 4e-6}
#: First tokens, decodes at edges of tiles (64) and splits (512), chunks across both.
ROWS = [(0, 1), (0, 70), (1200, 3), (5, 140), (639, 1), (64, 64), (63, 1), (511, 2), (1023, 1)]
#: The same, for large entries.
FEW_ROWS = [(0, 1), (60, 70), (639, 1), (511, 2)]
#: Engines of csrc/attend_tile.h for bf16: the default of the machine, float products, ATen (conftest.py).
ENGINES = (0, 1, 3, 4)


def run(
    scene: Scene,
    form: Form,
    rows: list[tuple[int, int, int]] | None = None,
    *,
    engine: int = 0,
    budget: int = 0,
) -> Tensor:
    """Run the operator with an engine and a budget for expanded keys and values."""
    segment, tokens = scene.segment(rows)
    up, q = scene.up.packed, scene.q[tokens]
    out = q.new_full((len(q), scene.shape.heads, scene.shape.v), NAN)
    absorbed = form == "absorbed"
    op = torch.ops.weft_cpu.latent_absorbed if absorbed else torch.ops.weft_cpu.latent_expanded
    op.default(
        q,
        scene.cos[tokens],
        scene.sin[tokens],
        scene.interleaved,
        out,
        scene.cache,
        segment.q_offsets,
        segment.starts,
        segment.tables[0],
        up.absorb if absorbed else up.keys,
        up.values,
        scene.mla.kv_lora,
        scene.window,
        scene.mla.scale,
        engine,
        *(() if absorbed else (budget,)),
    )
    return out


@mostly_slow("window", [0, 50, 600], [50])
@pytest.mark.parametrize("shape", [SMALL, WIDE, Shape(heads=1, nope=16, rope=16, v=16, lora=16, block=1)])
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize(("dtype", "engine"), [(torch.float32, 0), *((torch.bfloat16, e) for e in ENGINES)])
def test_close_to_float64_and_nothing_foreign_enters(
    dtype: torch.dtype, engine: int, form: Form, shape: Shape, window: int
) -> None:
    scene = Scene(FEW_ROWS if shape is WIDE else ROWS, shape, window, dtype)
    made = run(scene, form, engine=engine)
    assert (made.double() - scene.expected()).abs().max() < TOLERANCE[dtype]


@pytest.mark.parametrize("interleaved", [True, False])
@pytest.mark.parametrize("form", FORMS)
def test_as_a_backend(form: Form, interleaved: bool) -> None:
    """Queries may be parts of wider rows."""
    scene = Scene([(3, 9), (70, 1)], SMALL, dtype=torch.float32, interleaved=interleaved)
    made = scene.run(CpuLatent(), form)
    assert (made.double() - scene.expected()).abs().max() < TOLERANCE[torch.float32]
    tokens, heads, dim = scene.q.shape
    wider = torch.full((tokens, heads * dim + 7), NAN)
    wider[:, : heads * dim] = scene.q.view(tokens, -1)
    scene.q = wider[:, : heads * dim].view(tokens, heads, dim)
    segment, _ = scene.segment()
    out = torch.empty(tokens, heads, scene.shape.v)
    latent = LatentInput((scene.cos, scene.sin), 0, scene.spec, scene.mla, scene.up, form)
    CpuLatent().attend(scene.q, out, CoreInput(segment, {0: (scene.cache,)}, scene.mla.scale), latent)
    assert torch.equal(bits(out), bits(made))


@sampled({"engine": [None, *ENGINES], "form": list(FORMS), "shape": [SMALL, WIDE], "window": [0, 600]})
def test_bits_do_not_depend_on_company_chunks_or_threads(
    engine: int | None, form: Form, shape: Shape, window: int
) -> None:
    """``engine`` None: float32, which has a single engine."""
    dtype, engine = (torch.float32, 0) if engine is None else (torch.bfloat16, engine)
    scene = Scene(FEW_ROWS if shape is WIDE else ROWS, shape, window, dtype)
    torch.set_num_threads(1)
    whole = bits(run(scene, form, engine=engine))
    torch.set_num_threads(2)
    assert torch.equal(bits(run(scene, form, engine=engine)), whole)
    for size in (1, 7, 64):
        pieces = [
            (r, first, min(size, count - first))
            for r, (_, count) in enumerate(scene.rows)
            for first in range(0, count, size)
        ]
        torch.set_num_threads(2)
        assert torch.equal(bits(run(scene, form, pieces, engine=engine)), whole), size
        torch.set_num_threads(1)
        alone = torch.cat([run(scene, form, [piece], engine=engine) for piece in pieces[:9]])
        assert torch.equal(bits(alone), whole[: len(alone)]), size


@pytest.mark.parametrize("window", [0, 600])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_memory_for_expanded_keys_changes_no_bit(dtype: torch.dtype, window: int) -> None:
    """Positions come in parts of 512: states are carried over, and some rows see nothing of a part."""
    scene = Scene([(900, 300), (0, 30), (1500, 1), (505, 20)], SMALL, window, dtype)
    whole = bits(run(scene, "expanded"))
    torch.set_num_threads(2)
    assert torch.equal(bits(run(scene, "expanded", budget=1)), whole)
    assert torch.equal(bits(run(scene, "expanded", budget=700 * 3 * 80 * dtype.itemsize)), whole)
    torch.set_num_threads(1)
    assert torch.equal(bits(run(scene, "expanded", budget=1)), whole)


def test_many_heads_and_a_long_row_divided_among_threads() -> None:
    shape = Shape(heads=128, nope=16, rope=16, v=16, lora=32, block=64)
    scene = Scene([(4095, 1), (600, 2)], shape, dtype=torch.bfloat16)
    torch.set_num_threads(1)
    alone = run(scene, "absorbed")
    torch.set_num_threads(2)
    assert torch.equal(bits(run(scene, "absorbed")), bits(alone))
    assert torch.equal(bits(run(scene, "absorbed", [(0, 0, 1)])), bits(alone[:1]))
    assert (alone.double() - scene.expected()).abs().max() < TOLERANCE[torch.bfloat16]


@pytest.mark.parametrize("value", [NAN, float("inf")])
@pytest.mark.parametrize("at", [2, 70])
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("window", [0, 20])
def test_a_broken_line_reaches_only_queries_that_see_it(
    window: int, form: Form, at: int, value: float
) -> None:
    """The broken value is in the latent or in the rotated key."""
    scene = Scene([(30, 90)], SMALL, window, torch.bfloat16)
    before = run(scene, form)
    scene.cache[scene.table[0, 70 // 16], 70 % 16, at] = value
    after = run(scene, form)
    unseen = torch.tensor([p < 70 or bool(window and p >= 70 + window) for p in range(30, 120)])
    assert torch.equal(bits(after)[unseen], bits(before)[unseen])
    assert not after[~unseen].isfinite().all()


@pytest.mark.parametrize("form", FORMS)
def test_a_broken_query_spoils_its_own_row_alone(form: Form) -> None:
    scene = Scene([(100, 9)], SMALL, dtype=torch.bfloat16)
    before = run(scene, form)
    scene.q[4, 1, 7] = NAN
    after = run(scene, form)
    spoiled = after.isnan().any(-1)
    assert spoiled.nonzero().tolist() == [[4, 1]]
    assert torch.equal(bits(after)[~spoiled], bits(before)[~spoiled])


@pytest.mark.parametrize(
    ("change", "dtype", "device", "lacking"),
    [
        ({}, torch.float64, "cpu", "float64"),
        ({}, torch.float32, "cuda", "cuda"),
        ({"kv_lora": 24}, torch.float32, "cpu", "kv_lora of 24"),
        ({"v": 8}, torch.float32, "cpu", "v of 8"),
        ({"nope": 1024}, torch.float32, "cpu", "more than 1024"),
    ],
)
def test_what_is_not_served_is_refused(
    change: dict[str, int], dtype: torch.dtype, device: str, lacking: str
) -> None:
    scene = Scene([], SMALL)
    facts = {"q_lora": None, "kv_lora": 64, "nope": 32, "rope": 16, "v": 48, "scale": 1.0}
    spec = model_spec(3, scene.spec, mla=MLASpec(**{**facts, **change}))
    CpuLatent().check(
        scene.spec, model_spec(3, scene.spec, mla=scene.mla), 4, torch.bfloat16, torch.device("cpu")
    )
    with pytest.raises(ConfigError, match=lacking):
        CpuLatent().check(scene.spec, spec, 4, dtype, torch.device(device))


@pytest.mark.parametrize("interleaved", [True, False])
@pytest.mark.parametrize("first", [0, 24, 96])
@pytest.mark.parametrize("normed", [True, False])
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 2e-6), (torch.bfloat16, 2e-2)])
def test_cache_lines(
    dtype: torch.dtype, tolerance: float, normed: bool, first: int, interleaved: bool
) -> None:
    torch.manual_seed(0)
    lora, rope, tokens = 40, 24, 5
    joined = torch.randn(tokens, first + lora + rope).to(dtype)
    q_weight = torch.rand(first).to(dtype) if normed else None
    weight, angles = torch.rand(lora).to(dtype), torch.rand(tokens, rope // 2)
    writes = torch.tensor([7, 3, 21, 20, 8])
    caches = [torch.full((6, 4, lora + rope), NAN, dtype=dtype) for _ in range(2)]
    made = [
        op(joined, q_weight, weight, 1e-6, angles.cos(), angles.sin(), interleaved, cache, writes)
        for op, cache in zip((cpu_ops.latent_rope_cache, latent_rope_cache), caches, strict=True)
    ]
    assert made[0].shape == made[1].shape == (tokens, first)
    assert torch.allclose(made[0].float(), made[1].float(), rtol=tolerance, atol=tolerance)
    assert torch.allclose(
        caches[0].float(), caches[1].float(), rtol=tolerance, atol=tolerance, equal_nan=True
    )
    written = caches[0].view(24, -1).isfinite().all(1).nonzero().flatten()
    assert written.tolist() == sorted(writes.tolist())
    alone = torch.full_like(caches[0], NAN)
    cpu_ops.latent_rope_cache(
        joined[2:3],
        q_weight,
        weight,
        1e-6,
        angles.cos()[2:3],
        angles.sin()[2:3],
        interleaved,
        alone,
        writes[2:3],
    )
    assert torch.equal(bits(alone.view(24, -1)[21]), bits(caches[0].view(24, -1)[21]))


def test_places_beyond_the_cache_are_refused() -> None:
    with pytest.raises(RuntimeError, match="goes to 24 of 24"):
        cpu_ops.latent_rope_cache(
            torch.zeros(1, 32),
            None,
            torch.ones(16),
            1e-6,
            torch.ones(1, 8),
            torch.ones(1, 8),
            True,
            torch.zeros(6, 4, 32),
            torch.tensor([24]),
        )
    scene = Scene([(100, 9)], SMALL, dtype=torch.float32)
    scene.table[0, 2] = 10**6
    for form in FORMS:
        with pytest.raises(RuntimeError, match="names block 1000000"):
            run(scene, form)
