"""Fused kernels of routed blocks, state mixers and latent attention on a GPU, in published sizes.

Each kernel is compared with torch on the same device.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields, replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from msgspec.structs import replace as replaced

from tests.attention.test_mixers import Scene as MixerScene
from tests.attention.test_mixers import Whole, WholeMamba1
from tests.support.latent import Scene, Shape, on_device
from tests.support.routed import routed
from weft.attention.base import CoreInput
from weft.attention.conv.conv_backend import ConvInput
from weft.attention.conv.conv_torch import TorchConv
from weft.attention.conv.conv_triton import TritonConv
from weft.attention.mamba.mamba_backend import MambaInput
from weft.attention.mamba.mamba_torch import TorchMamba
from weft.attention.mamba.mamba_triton import TritonInvariantMamba, TritonMamba
from weft.attention.mamba1.mamba1_backend import Mamba1Input
from weft.attention.mamba1.mamba1_triton import TritonMamba1
from weft.attention.mla.latent import LatentInput
from weft.attention.mla.latent_torch import TorchLatent
from weft.attention.mla.latent_triton import TritonLatent
from weft.config.parts.mixers import ConvSpec, Mamba1Spec, MambaSpec
from weft.ops import kv_fp8, latent_ops, torch_ops
from weft.ops import moe as torch_moe
from weft.ops.moe import Routed
from weft.ops.routing import Rule, route

Tensor = torch.Tensor

DEVICE = torch.device("cuda")
HALF = torch.bfloat16
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU"),
]
GROUPED = Rule(8, "sigmoid", True, groups=8, top_groups=4, group_rule="top2", scale=2.5)
#: Name -> (kind of ``routed``, experts, hidden size, inner size, rule).
BLOCKS = {
    "qwen3-30b-a3b": ("plain", 128, 2048, 768, Rule(8, renormalize=True)),
    "qwen3-next": ("gated_shared", 512, 2048, 512, Rule(10, renormalize=True)),
    "deepseek-v3": ("corrected", 256, 7168, 256, GROUPED),
    "gpt-oss": ("biased", 32, 2880, 2880, Rule(4, renormalize=True)),
}


def noise(*shape: int, dtype: torch.dtype = HALF, seed: int = 0, scale: float = 1.0) -> Tensor:
    generator = torch.Generator(DEVICE).manual_seed(seed)
    return (torch.randn(shape, generator=generator, device=DEVICE) * scale).to(dtype)


def block(name: str) -> tuple[Routed, int]:
    """Return (weights of a block on the GPU, hidden size). The shared expert has the size of an expert."""
    kind, experts, hidden, inner, rule = BLOCKS[name]
    wide = torch.float32
    made = {
        "router": noise(experts, hidden, dtype=wide, seed=1, scale=2 * hidden**-0.5),
        "gate_up": noise(experts, 2 * inner, hidden, seed=2, scale=hidden**-0.5),
        "down": noise(experts, hidden, inner, seed=3, scale=inner**-0.5),
    }
    if kind == "biased":
        made["router_bias"] = noise(experts, dtype=wide, seed=4)
        made["gate_up_bias"] = noise(experts, 2 * inner, seed=5, scale=0.3)
        made["down_bias"] = noise(experts, hidden, seed=6, scale=0.3)
    if kind == "corrected":
        made["correction"] = noise(experts, dtype=wide, seed=7, scale=0.2)
    if kind in ("corrected", "gated_shared"):
        made["shared_gate_up"] = noise(2 * inner, hidden, seed=8, scale=hidden**-0.5)
        made["shared_down"] = noise(hidden, inner, seed=9, scale=inner**-0.5)
    if kind == "gated_shared":
        made["shared_gate"] = noise(1, hidden, dtype=wide, seed=10, scale=hidden**-0.5)
    gate = routed(kind, HALF).gate
    return Routed(rule=rule, gate=gate, **made), hidden


def near(made: Tensor, wanted: Tensor, tolerance: float) -> bool:
    return bool((made.double() - wanted.double()).abs().max() <= tolerance * wanted.double().abs().max())


@pytest.mark.parametrize("tokens", [1, 7, 64, 300])
@pytest.mark.parametrize("name", BLOCKS)
def test_choice_of_experts(name: str, tokens: int) -> None:
    """Equal ids for equal logits, with ties. The logits of few tokens equal those of float64."""
    from weft.ops.triton import routing

    weights, hidden = block(name)
    logits = noise(tokens, weights.experts, dtype=torch.float32)
    logits[::2] = (2 * logits[::2]).round() / 2
    plain = replace(weights, shared_gate=None)
    found, scales, _ = routing.choose(logits, plain, lambda *_: logits, own=False)
    # Scores by another exponential may order near ties otherwise, so scores are compared, too.
    wanted, by = route(logits, weights.rule, weights.correction)
    equal = (found == wanted).all(1)
    assert equal.float().mean() > 0.97
    assert torch.allclose(scales[equal], by[equal], rtol=1e-5, atol=1e-6)
    x = noise(tokens, hidden, seed=20)
    made, gate = routing._logits(x, weights, F.linear, True)
    bias = None if weights.router_bias is None else weights.router_bias.double()
    assert near(made[:, : weights.experts], F.linear(x.double(), weights.router.double(), bias), 1e-4)
    if weights.shared_gate is not None:
        assert gate is not None
        assert near(gate, x.double() @ weights.shared_gate.double().T, 1e-4)


@pytest.mark.parametrize("slots", [8, 640, 40_000])
def test_tiles(slots: int) -> None:
    """The order within an expert is the order of the slots, as in a stable sort."""
    from weft.ops.triton import routing

    for experts, tile_m in ((128, 16), (512, 64)):
        generator = torch.Generator(DEVICE).manual_seed(slots)
        ids = torch.randint(-1, experts, (slots, 1), generator=generator, device=DEVICE)
        tiles = routing.cut(ids, experts, tile_m)
        flat = ids.reshape(-1)
        kept = (flat >= 0).nonzero().reshape(-1)
        order = kept[torch.sort(flat[kept], stable=True).indices]
        assert torch.equal(tiles.order[: len(order)], order)
        sizes = torch.bincount(flat[kept], minlength=experts)
        assert torch.equal(tiles.ends, sizes.cumsum(0))
        real = tiles.experts < experts
        assert torch.equal(
            torch.bincount(tiles.experts[real], minlength=experts), (sizes + tile_m - 1) // tile_m
        )


@pytest.mark.parametrize("tokens", [1, 16, 64, 200])
@pytest.mark.parametrize("name", BLOCKS)
def test_block(name: str, tokens: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The whole block, with the shared expert as one more expert for few tokens. The next norm adds the
    experts with the bits of the sum."""
    from weft.ops.triton import fused, moe

    monkeypatch.setattr(moe, "_table_form", lambda *_: "triton")
    weights, hidden = block(name)
    x = noise(tokens, hidden, seed=30)
    assert moe.joins(tokens, weights) == (weights.shared_down is not None and tokens <= 64)
    made = moe.moe(x, None, weights)
    wanted = torch_moe.block(x, None, weights, replace_pieces())
    assert near(made, wanted, 3e-2)
    invariant = moe.moe_invariant(x, None, weights)
    assert near(invariant, wanted, 3e-2)
    assert torch.equal(moe.moe_invariant(x[:1].clone(), None, weights), invariant[:1])
    weight, terms = noise(hidden, seed=31), moe.moe_terms(x, None, weights)
    added = [fused.add_rms_norm(x.clone(), one, weight, 1e-6) for one in (terms, terms.total())]
    assert all(map(torch.equal, *added))


def replace_pieces() -> torch_moe.Pieces:
    """Return the parts of torch, expert by expert."""
    return torch_moe.Pieces(F.linear, torch_ops.linear, torch_ops.gated, torch_moe.by_expert)


@pytest.mark.parametrize("count", [1, 3])
@pytest.mark.parametrize(("heads", "channels"), [((16, 32), False), ((2, 6), False), ((32, 32), True)])
def test_gated_delta_net(heads: tuple[int, int], channels: bool, count: int) -> None:
    """Outputs and every copy of the states equal torch; a row alone has equal bits."""
    from weft.attention.delta.delta_torch import TorchDelta
    from weft.attention.delta.delta_triton import TritonDelta

    run: dict[str, tuple[Tensor, tuple[Tensor, ...]]] = {}
    for backend in (TorchDelta(), TritonDelta()):
        run[type(backend).__name__] = delta_step(backend.run, heads, 5, count, channels)
    (wanted, states), (made, own) = run["TorchDelta"], run["TritonDelta"]
    assert near(made, wanted, 2e-2)
    for one, other in zip(own, states, strict=True):
        assert torch.equal(one.isnan(), other.isnan())
        assert near(one.nan_to_num(), other.nan_to_num(), 1e-4)
    alone, _ = delta_step(TritonDelta().run, heads, 1, count, channels)
    assert torch.equal(alone, made[:count])


def delta_step(
    run: Callable[..., None], heads: tuple[int, int], rows: int, count: int, by_channel: bool
) -> tuple[Tensor, tuple[Tensor, ...]]:
    """Return (outputs, states) of a step of ``count`` tokens for ``rows`` rows; row 2 begins.

    by_channel: with a decay for every key channel.
    """
    import numpy as np

    from weft.attention.base import SegmentInput
    from weft.attention.delta.delta_backend import DeltaInput, DeltaInputs, DeltaWeights

    (k_heads, v_heads), dim, taps, copies = heads, 128, 4, 4
    channels = (2 * k_heads + v_heads) * dim
    weights = DeltaWeights(
        taps=noise(taps, channels, dtype=torch.float32, seed=1),
        rate=noise(v_heads, dtype=torch.float32, seed=2).exp(),
        bias=noise(*((v_heads, dim) if by_channel else (v_heads,)), dtype=torch.float32, seed=3),
        norm=noise(dim, dtype=torch.float32, seed=4),
        eps=1e-6,
        sigmoid=by_channel,
    )
    shapes = ((k_heads, taps - 1), (k_heads, taps - 1), (v_heads, taps - 1), (v_heads, dim))
    dtypes = (HALF, HALF, HALF, torch.float32)
    state = tuple(
        torch.full((8, copies, *shape, dim), float("nan"), dtype=dtype, device=DEVICE)
        for shape, dtype in zip(shapes, dtypes, strict=True)
    )
    live = torch.tensor([1, 0, 3, 2, 0][:rows], device=DEVICE)
    slots = torch.tensor([6, 0, 3, 1, 4][:rows], device=DEVICE)
    starts = torch.tensor([9, 12, 0, 70, 5][:rows], device=DEVICE)
    for row in range(rows):
        for number, part in enumerate(state):
            part[slots[row], live[row]] = noise(*part.shape[2:], seed=100 * row + number).to(part.dtype)
    qkvz = noise(5 * count, channels + v_heads * dim, seed=7)[: rows * count]
    decays = v_heads * dim if by_channel else v_heads
    gates = noise(5 * count, v_heads + decays, seed=8)[: rows * count]
    inputs = DeltaInputs(qkvz[:, :channels], qkvz[:, channels:], gates[:, :v_heads], gates[:, v_heads:])
    segment = SegmentInput(
        begin=0,
        rows=rows,
        tokens=rows * count,
        host_counts=np.full(rows, count, np.int32),
        host_starts=np.zeros(rows, np.int32),
        q_offsets=torch.arange(0, rows * count + 1, count, dtype=torch.int32, device=DEVICE),
        starts=starts,
        slots=slots,
        live=live,
        tables=(),
    )
    out = torch.empty(rows * count, v_heads * dim, dtype=HALF, device=DEVICE)
    run(inputs, out, DeltaInput(segment, state, weights, True))
    return out, state


MAMBAS = {
    "nemotron-h": MambaSpec(layers=(0,), heads=128, dim=64, groups=8, state=128, conv=4, norm_groups=8),
    "granite-4-h": MambaSpec(layers=(0,), heads=48, dim=64, groups=1, state=128, conv=4),
    "falcon-h1": MambaSpec(layers=(0,), heads=24, dim=128, groups=1, state=256, conv=4, norm="none"),
    "norm before the gate": MambaSpec(
        layers=(0,), heads=24, dim=100, groups=2, state=96, conv=4, norm="normed", norm_groups=2
    ),
}
CONVS = {
    "lfm2": ConvSpec(layers=(0,), heads=32, dim=64, taps=3),
    "bias": ConvSpec(layers=(0,), heads=3, dim=300, taps=5, bias=True),
}
MAMBA1S = {
    "falcon-mamba": Mamba1Spec(layers=(0,), heads=16, dim=512, state=16, rank=256, conv=4),
    "parts of programs": Mamba1Spec(layers=(0,), heads=3, dim=100, state=12, rank=8, conv=2),
}
MIXERS = {**MAMBAS, **MAMBA1S, **CONVS}


class TritonWholeMamba1(Whole, TritonMamba1):
    """Both parts by kernels."""


def mixers_of(spec: ConvSpec | MambaSpec | Mamba1Spec, *, invariant: bool) -> tuple[Any, Any]:
    """Return the backends (torch, Triton) of a mixer."""
    if isinstance(spec, ConvSpec):
        return TorchConv(), TritonConv()
    if isinstance(spec, Mamba1Spec):
        return WholeMamba1(), TritonWholeMamba1()
    return TorchMamba(), TritonInvariantMamba() if invariant else TritonMamba()


def mixer_step(run: Callable[..., None], scene: MixerScene, counts: list[int], each: bool) -> Tensor:
    """Return the outputs of ``counts`` tokens of the first rows. Rows behind position 0 have a state."""
    made = scene.stage(list(zip(scene.rows, counts, strict=False)))
    segment, x = on_device(made[0], DEVICE), made[1].to(DEVICE)
    segment = replace(segment, slots=segment.slots.to(DEVICE), live=segment.live.to(DEVICE))
    weights = type(scene.weights)(
        **{
            one.name: value.to(DEVICE) if isinstance(value, Tensor) else value
            for one in fields(scene.weights)
            for value in [getattr(scene.weights, one.name)]
        }
    )
    for number, row in enumerate(scene.rows):
        if row.done:
            for place, part in enumerate(scene.state):
                given = noise(*part.shape[2:], seed=10 * number + place).to(part)
                if isinstance(scene.spec, MambaSpec) and place in (
                    1,
                    2,
                ):  # the places of B and C: all places of a group are equal
                    each_group = len(given) // scene.spec.groups
                    given = given[::each_group].repeat_interleave(each_group, dim=0)
                part[row.slot, row.live] = given
    scene.state = tuple(part.to(DEVICE) for part in scene.state)
    out = torch.empty(len(x), scene.columns, dtype=x.dtype, device=DEVICE)
    make: Any = {ConvSpec: ConvInput, MambaSpec: MambaInput, Mamba1Spec: Mamba1Input}[type(scene.spec)]
    run(x, out, make(segment, scene.state, weights, each))
    return out


@pytest.mark.parametrize(
    ("counts", "each"), [([1] * 5, True), ([3, 1, 4, 2, 1], True), ([40, 3, 64, 1, 7], False)]
)
@pytest.mark.parametrize("name", MIXERS)
def test_state_mixers(name: str, counts: list[int], each: bool) -> None:
    """Outputs and every copy of the states equal torch; a row alone has equal bits."""
    spec: Any = MIXERS[name]
    backends = mixers_of(spec, invariant=False)
    found = []
    for backend, rows in ((backends[0], counts), (backends[1], counts), (backends[1], counts[:1])):
        scene = MixerScene(spec, HALF, lengths=[100] * 5)
        for row, (done, live) in zip(scene.rows, ((9, 1), (12, 0), (0, 3), (30, 2), (5, 0)), strict=True):
            row.done, row.live = done, live
        found.append((mixer_step(backend.run, scene, rows, each), scene.state))
    (wanted, states), (made, own), (alone, _) = found
    assert near(made, wanted, 2e-2)
    # Mamba 1 rounds the convolution before the recurrence. Sums in other orders may round otherwise.
    limit = 2e-2 if isinstance(spec, Mamba1Spec) else 1e-4
    for one, other in zip(own, states, strict=True):
        assert torch.equal(one.isnan(), other.isnan())
        assert near(one.nan_to_num(), other.nan_to_num(), limit)
    assert torch.equal(alone, made[: counts[0]])


@pytest.mark.parametrize("name", MIXERS)
def test_long_rows_of_invariant_mixers(name: str) -> None:
    """A prompt of 1,000 tokens equals torch, and has the bits of its pieces."""
    spec: Any = MIXERS[name]
    reference, backend = mixers_of(spec, invariant=True)
    scenes = [MixerScene(spec, HALF, lengths=[1000]) for _ in range(3)]
    wanted = mixer_step(reference.run, scenes[0], [1000], False)
    whole = mixer_step(backend.run, scenes[1], [1000], False)
    assert near(whole, wanted, 2e-2)
    first = mixer_step(backend.run, scenes[2], [333], False)
    assert torch.equal(first, whole[:333])


def test_entries_of_latent_attention() -> None:
    from weft.ops.triton.latent import latent_rope_cache

    joined, angles = noise(33, 1536 + 512 + 64), noise(33, 32, dtype=torch.float32)
    weights = (noise(1536, seed=1), noise(512, seed=2))
    writes = torch.randperm(4 * 64, device=DEVICE)[:33]
    made = []
    for run in (latent_ops.latent_rope_cache, latent_rope_cache):
        cache = torch.zeros(4, 64, 576, dtype=HALF, device=DEVICE)
        q = run(joined, *weights, 1e-6, angles.cos(), angles.sin(), True, cache, writes)
        made.append((q, cache))
    for one, other in zip(*made, strict=True):
        assert near(other, one, 1e-2)


@pytest.mark.parametrize(("interleaved", "fp8"), [(False, False), (True, False), (True, True)])
def test_absorbed_attention(interleaved: bool, fp8: bool) -> None:
    """Queries rotate inside the kernel. DeepSeek-V3's sizes with 32 heads; short and split rows.

    ``fp8``: latents in 8 bits.
    """
    shape = Shape(heads=32, nope=128, rope=64, v=128, lora=512, block=64)
    scene = Scene([(700, 1), (0, 1), (64, 2)], shape, dtype=HALF, interleaved=interleaved)
    segment = on_device(scene.segment()[0], DEVICE)
    up = replace(scene.up, keys=scene.keys.to(DEVICE), values=scene.values.to(DEVICE), packed=None)
    spec, caches = scene.spec, (scene.cache,)
    if fp8:
        latents, keys = scene.cache.split((shape.lora, shape.rope), dim=-1)
        spec, caches = (
            replaced(spec, fp8=True, exact=shape.rope),
            (*kv_fp8.quantize(latents), keys.contiguous()),
        )
    latent = LatentInput((scene.cos.to(DEVICE), scene.sin.to(DEVICE)), 0, spec, scene.mla, up, "absorbed")
    of_layer = {0: tuple(one.to(DEVICE) for one in caches)}
    q, core = scene.q.to(DEVICE), CoreInput(segment, of_layer, scene.mla.scale)
    outs = []
    for backend in (TorchLatent(), TritonLatent()):
        out = torch.empty(len(q), shape.heads, shape.v, dtype=HALF, device=DEVICE)
        backend.attend(q, out, core, latent)
        outs.append(out)
    assert near(outs[1], outs[0], 2e-2)
    assert near(outs[1].cpu(), scene.expected(), 1e-1 if fp8 else 2e-2)
