"""Cores of short convolutions, Mamba2 and Mamba 1: every backend against the definition in float64, whole and
in pieces, and equal bits.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
import torch

from tests.support.specs import model_spec
from weft.attention.base import Backend, SegmentInput
from weft.attention.conv.conv_backend import ConvInput, ConvWeights
from weft.attention.conv.conv_torch import TorchConv
from weft.attention.mamba.mamba_backend import MambaInput, MambaWeights
from weft.attention.mamba.mamba_torch import ROWS, InvariantMamba, TorchMamba
from weft.attention.mamba1 import mamba1_torch
from weft.attention.mamba1.mamba1_backend import Mamba1Backend, Mamba1Input, Mamba1Weights, Selected
from weft.attention.mamba1.mamba1_torch import TorchMamba1
from weft.attention.registry import choose
from weft.common.errors import ConfigError
from weft.config.families.mixers.state_caches import conv_cache, mamba1_cache, mamba_cache
from weft.config.parts.mixers import ConvSpec, Mamba1Spec, MambaSpec
from weft.config.spec import CacheSpec
from weft.ops import cpu
from weft.ops.torch_ops import wide

Tensor = torch.Tensor

NAN = float("nan")
COPIES = 4
LENGTHS = [1, 70, 5, 17, 33]
CONV = ConvSpec(layers=(0,), heads=3, dim=4, taps=3, bias=True)
SHORT_CONV = ConvSpec(layers=(0,), heads=1, dim=5, taps=2)
MAMBA = MambaSpec(layers=(0,), heads=4, dim=6, groups=2, state=5, conv=4, norm_groups=2)
ONE_GROUP = MambaSpec(
    layers=(0,), heads=6, dim=3, groups=1, state=8, conv=2, conv_bias=False, norm="normed", low=0.05, high=0.6
)
NO_NORM = MambaSpec(layers=(0,), heads=3, dim=4, groups=3, state=2, conv=3, norm="none")
MAMBA1 = Mamba1Spec(layers=(0,), heads=3, dim=4, state=5, rank=2, conv=4)
BARE = Mamba1Spec(layers=(0,), heads=1, dim=5, state=8, rank=2, conv=2, conv_bias=False)
SPECS = {
    **{"conv": CONV, "conv-2": SHORT_CONV, "mamba": MAMBA, "one-group": ONE_GROUP, "no-norm": NO_NORM},
    **{"mamba1": MAMBA1, "mamba1-bare": BARE},
}


class Whole(Mamba1Backend):
    """Both parts of the core on inputs [T, x | steps | B | C | z], without projections in between."""

    def run(self, inputs: Tensor, out: Tensor, mamba: Mamba1Input) -> None:
        inner, state = out.shape[1], mamba.state[1].shape[3]
        x, *others = inputs.split((inner, inner, state, state, inner), dim=1)
        convolved = torch.full_like(out, NAN)
        self.convolve(x, convolved, mamba)
        self.scan(Selected(convolved, *others), out, mamba)


class WholeMamba1(Whole, TorchMamba1):
    """Both parts in torch."""


@dataclass
class Row:
    """A sequence: its inputs, the number of computed tokens, and the place of its state."""

    x: Tensor
    slot: int
    done: int = 0
    live: int = 0
    out: list[Tensor] = field(default_factory=list)


class Scene:
    """Sequences with random inputs, and states with NaN in all unwritten entries."""

    def __init__(
        self,
        spec: ConvSpec | MambaSpec | Mamba1Spec,
        dtype: torch.dtype = torch.float64,
        lengths: list[int] = LENGTHS,
    ) -> None:
        self.spec = spec
        generator = torch.Generator().manual_seed(0)

        def noise(*size: int) -> Tensor:
            return torch.randn(size, generator=generator, dtype=torch.float64)

        exact = wide(dtype)
        self.weights: Any
        if isinstance(spec, ConvSpec):
            self.columns = spec.heads * spec.dim
            inputs = 3 * self.columns
            self.weights = ConvWeights(
                taps=noise(spec.taps, self.columns).to(exact),
                bias=noise(self.columns).to(exact) if spec.bias else None,
            )
            self.cache: CacheSpec = conv_cache(spec)
        elif isinstance(spec, Mamba1Spec):
            self.columns = spec.inner
            inputs = 3 * spec.inner + 2 * spec.state
            self.weights = Mamba1Weights(
                taps=noise(spec.conv, spec.inner).to(exact),
                conv_bias=noise(spec.inner).to(exact) if spec.conv_bias else None,
                rate=noise(spec.heads, spec.state, spec.dim).exp().to(exact),
                step_bias=noise(spec.inner).to(exact),
                skip=noise(spec.inner).to(exact),
            )
            self.cache = mamba1_cache(spec)
        else:
            self.columns = spec.heads * spec.dim
            channels = self.columns + 2 * spec.groups * spec.state
            inputs = self.columns + channels + spec.heads
            self.weights = MambaWeights(
                groups=spec.groups,
                taps=noise(spec.conv, channels).to(exact),
                conv_bias=noise(channels).to(exact) if spec.conv_bias else None,
                rate=noise(spec.heads).exp().to(exact),
                step_bias=noise(spec.heads).to(exact),
                skip=noise(spec.heads).to(exact),
                low=spec.low,
                high=spec.high,
                finish=spec.norm,
                norm=None if spec.norm == "none" else (1 + 0.3 * noise(self.columns)).to(exact),
                norm_groups=spec.norm_groups,
                eps=1e-6,
            )
            self.cache = mamba_cache(spec)
        slots = random.Random(0).sample(range(len(lengths) + 2), len(lengths))
        self.rows = [Row(noise(n, inputs).to(dtype), slot) for n, slot in zip(lengths, slots, strict=True)]
        self.state = tuple(
            torch.full((len(lengths) + 3, COPIES, *part.shape), NAN, dtype=exact if part.wide else dtype)
            for part in self.cache.parts
        )

    def stage(self, parts: list[tuple[Row, int]]) -> tuple[SegmentInput, Tensor]:
        """Return a segment of ``count`` more tokens of each row, and its inputs."""
        counts = np.array([count for _, count in parts], np.int32)
        segment = SegmentInput(
            begin=0,
            rows=len(parts),
            tokens=int(counts.sum()),
            host_counts=counts,
            host_starts=np.array([row.done for row, _ in parts], np.int32),
            q_offsets=torch.tensor([0, *np.cumsum(counts)], dtype=torch.int32),
            starts=torch.tensor([row.done for row, _ in parts], dtype=torch.int64),
            slots=torch.tensor([row.slot for row, _ in parts], dtype=torch.int64),
            live=torch.tensor([row.live for row, _ in parts], dtype=torch.int64),
            tables=(torch.zeros(len(parts), 0, dtype=torch.int64),),
        )
        return segment, torch.cat([row.x[row.done : row.done + n] for row, n in parts])

    def given(self, backend: Any, segment: SegmentInput, each: bool) -> Any:
        """Return the input of ``backend`` for ``segment``."""
        prepared = backend.prepare(segment, 0, self.cache, 64, self.rows[0].x.dtype)
        make = {ConvSpec: ConvInput, MambaSpec: MambaInput, Mamba1Spec: Mamba1Input}[type(self.spec)]
        return make(segment, self.state, self.weights, each, prepared)

    def step(self, backend: Any, parts: list[tuple[Row, int]], *, each: bool = False) -> None:
        """Run ``count`` more tokens of each row, as one segment."""
        segment, x = self.stage(parts)
        out = torch.full((len(x), self.columns), NAN, dtype=x.dtype)
        backend.run(x, out, self.given(backend, segment, each))
        for (row, count), values in zip(parts, out.split(segment.host_counts.tolist()), strict=True):
            row.out += list(values)
            row.done += count
            row.live = count - 1 if each else 0

    def whole(self, backend: Backend) -> list[Tensor]:
        """Run every row in one piece, in one segment. Return the outputs."""
        self.step(backend, [(row, len(row.x)) for row in self.rows])
        return self.outputs()

    def outputs(self) -> list[Tensor]:
        return [torch.stack(row.out) for row in self.rows]


def expected(scene: Scene, row: Row) -> Tensor:
    """Return the outputs of a row by the definition in float64: token by token, head by head."""
    x = row.x.double()
    if isinstance(scene.spec, Mamba1Spec):
        return _mamba1(scene, scene.spec, x)
    return _conv(scene, x) if isinstance(scene.spec, ConvSpec) else _mamba(scene, scene.spec, x)


def _convolved(x: Tensor, taps: Tensor) -> Tensor:
    padded = torch.cat((x.new_zeros(len(taps) - 1, x.shape[1]), x))
    made = sum(padded[j : j + len(x)] * taps[j].double() for j in range(len(taps)))
    assert isinstance(made, Tensor)
    return made


def _conv(scene: Scene, x: Tensor) -> Tensor:
    gate, gate_out, x = x.chunk(3, dim=1)
    made = _convolved(gate * x, scene.weights.taps)
    return gate_out * (made if scene.weights.bias is None else made + scene.weights.bias.double())


def _mamba(scene: Scene, spec: MambaSpec, x: Tensor) -> Tensor:
    weights = scene.weights
    inner, shared = scene.columns, spec.groups * spec.state
    z, mixed, steps = x.split((inner, inner + 2 * shared, spec.heads), dim=1)
    mixed = _convolved(mixed, weights.taps)
    if weights.conv_bias is not None:
        mixed = mixed + weights.conv_bias.double()
    mixed = torch.nn.functional.silu(mixed)
    y = torch.empty(len(x), spec.heads, spec.dim, dtype=torch.float64)
    for head in range(spec.heads):
        at = inner + head * spec.groups // spec.heads * spec.state
        state = torch.zeros(spec.dim, spec.state, dtype=torch.float64)
        for t in range(len(x)):
            value = mixed[t, head * spec.dim : (head + 1) * spec.dim]
            b, c = mixed[t, at : at + spec.state], mixed[t, at + shared : at + shared + spec.state]
            dt = torch.nn.functional.softplus(steps[t, head] + weights.step_bias[head].double())
            dt = dt.clamp(spec.low, spec.high)
            state = state * (-weights.rate[head].double() * dt).exp() + dt * value.outer(b)
            y[t, head] = state @ c + weights.skip[head].double() * value
    gate = torch.nn.functional.silu(z)
    flat = y.flatten(1)
    if spec.norm == "none":
        return flat * gate
    flat = flat * gate if spec.norm == "gated" else flat
    grouped = flat.unflatten(1, (spec.norm_groups, -1))
    grouped = grouped / (grouped.square().mean(2, keepdim=True) + 1e-6).sqrt()
    normed = grouped.flatten(1) * weights.norm.double()
    return normed if spec.norm == "gated" else normed * gate


def _mamba1(scene: Scene, spec: Mamba1Spec, inputs: Tensor) -> Tensor:
    weights, inner = scene.weights, spec.inner
    x, steps, b, c, z = inputs.split((inner, inner, spec.state, spec.state, inner), dim=1)
    x = _convolved(x, weights.taps)
    x = torch.nn.functional.silu(x if weights.conv_bias is None else x + weights.conv_bias.double())
    x = x.to(scene.rows[0].x.dtype).double()  # rounded between the two parts
    dt = torch.nn.functional.softplus(steps + weights.step_bias.double())
    rate = weights.rate.double().transpose(1, 2).flatten(0, 1)  # [channels, state]
    y = torch.empty_like(x)
    for channel in range(inner):
        state = torch.zeros(spec.state, dtype=torch.float64)
        for t in range(len(x)):
            state = state * (-rate[channel] * dt[t, channel]).exp() + dt[t, channel] * b[t] * x[t, channel]
            y[t, channel] = state @ c[t]
    return (y + weights.skip.double() * x) * torch.nn.functional.silu(z)


def backends_of(name: str) -> list[Backend]:
    if name.startswith("mamba1"):
        return [WholeMamba1()]
    return [TorchConv()] if name.startswith("conv") else [TorchMamba(), InvariantMamba()]


@pytest.mark.parametrize("name", list(SPECS))
def test_whole_and_pieces_follow_the_definition(name: str) -> None:
    """Prefill pieces of 1, 5 and 7 tokens, then decode rows of up to three tokens."""
    scene = Scene(SPECS[name])
    wanted = [expected(scene, row) for row in scene.rows]
    for backend in backends_of(name):
        whole = Scene(SPECS[name]).whole(backend)
        for found, one in zip(whole, wanted, strict=True):
            torch.testing.assert_close(found, one, rtol=1e-10, atol=1e-10)
        for piece in (5,) if backend.invariant else (1, 5, 7):
            pieces = Scene(SPECS[name])
            while rows := [row for row in pieces.rows if row.done < len(row.x)]:
                each = rows[0].done > 20
                size = min(piece, 3) if each else piece
                pieces.step(backend, [(row, min(size, len(row.x) - row.done)) for row in rows], each=each)
            for found, one in zip(pieces.outputs(), wanted, strict=True):
                torch.testing.assert_close(found, one, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("name", ["conv", "mamba", "one-group", "mamba1"])
def test_a_rejected_draft_leaves_the_state_before(name: str) -> None:
    """A decode row of three tokens, of which one stays, continues from copy 0."""
    for backend in backends_of(name):
        scene = Scene(SPECS[name], lengths=[30, 12])
        wanted = [expected(scene, row) for row in scene.rows]
        scene.step(backend, [(row, 6) for row in scene.rows])
        scene.step(backend, [(row, 3) for row in scene.rows], each=True)
        for row in scene.rows:  # two drafts are rejected
            row.done, row.live = row.done - 2, row.live - 2
            del row.out[-2:]
        scene.step(backend, [(row, 2) for row in scene.rows], each=True)
        scene.step(backend, [(row, 3) for row in scene.rows])
        for row, one in zip(scene.rows, wanted, strict=True):
            torch.testing.assert_close(torch.stack(row.out), one[: row.done], rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", ["conv", "mamba", "no-norm", "mamba1"])
def test_invariant_backends_give_equal_bits(name: str, dtype: torch.dtype) -> None:
    """Bits of a row depend neither on other rows nor on pieces."""
    for backend in backends_of(name):
        if not backend.invariant:
            continue
        whole = Scene(SPECS[name], dtype).whole(backend)
        alone = Scene(SPECS[name], dtype)
        for row in alone.rows:
            while row.done < len(row.x):
                alone.step(backend, [(row, min(row.done + 3, len(row.x) - row.done))])
        for found, one in zip(alone.outputs(), whole, strict=True):
            assert torch.equal(found, one)


@pytest.mark.parametrize("each", [False, True])
def test_bits_do_not_depend_on_parts_of_rows(each: bool) -> None:
    """More rows than ``InvariantMamba`` computes together: prefill, then two tokens of each row."""
    backend = InvariantMamba()
    together, alone = (Scene(MAMBA, torch.float32, lengths=[5] * (ROWS + 3)) for _ in range(2))
    for count, verify in ((3, False), (2, each)):
        together.step(backend, [(row, count) for row in together.rows], each=verify)
        for row in alone.rows:
            alone.step(backend, [(row, count)], each=verify)
    for found, one in zip(together.outputs(), alone.outputs(), strict=True):
        assert torch.equal(found, one)
    for part, other in zip(together.state, alone.state, strict=True):
        assert torch.equal(part.nan_to_num(7.0), other.nan_to_num(7.0))


@pytest.mark.parametrize("most", [1, 70, 1 << 10])
def test_bits_do_not_depend_on_parts_of_states(most: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Parts of one token, of some tokens of one row, and of some rows."""
    lengths = [1, 9, 5, 5, 5, 1]
    due = Scene(MAMBA1, torch.float32, lengths=lengths).whole(WholeMamba1())
    monkeypatch.setattr(mamba1_torch, "MOST_STATES", most)
    for found, one in zip(
        Scene(MAMBA1, torch.float32, lengths=lengths).whole(WholeMamba1()), due, strict=True
    ):
        assert torch.equal(found, one)


@pytest.mark.parametrize("name", ["conv", "mamba", "mamba1"])
def test_low_precision_is_close_to_the_definition(name: str) -> None:
    for backend in backends_of(name):
        for dtype, bound in ((torch.float32, 1e-4), (torch.bfloat16, 0.03)):
            scene = Scene(SPECS[name], dtype)
            for found, row in zip(scene.whole(backend), scene.rows, strict=True):
                wanted = expected(scene, row)
                assert found.dtype == dtype
                assert (found.double() - wanted).abs().max() <= bound * wanted.abs().max()


def test_deterministic_chooses_the_invariant_backend() -> None:
    spec = model_spec(layers=1, mamba=MAMBA, caches=(mamba_cache(MAMBA),))
    chosen: Callable[..., Any] = lambda **more: choose(  # noqa: E731
        "auto", spec, torch.float64, torch.device("cpu"), 16, **more
    )["mamba"]
    assert type(chosen()) is TorchMamba
    assert type(chosen(invariant=True)) is InvariantMamba


@pytest.mark.parametrize(("invariant", "chosen"), [(False, TorchMamba), (True, InvariantMamba)])
def test_torch_serves_machines_without_the_compiled_operations(
    invariant: bool, chosen: type, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cpu, "load", lambda: False)
    spec = model_spec(layers=1, mamba=MAMBA, caches=(mamba_cache(MAMBA),))
    for dtype in (torch.bfloat16, torch.float32):
        made = choose("auto", spec, dtype, torch.device("cpu"), 16, invariant=invariant)
        assert type(made["mamba"]) is chosen
    with pytest.raises(ConfigError, match="weft build-ops"):
        choose("cpu", spec, torch.float32, torch.device("cpu"), 16, invariant=invariant)


@pytest.mark.parametrize("groups", [1, 2, 4])
@torch.no_grad()
def test_mamba_equals_the_module_of_transformers(groups: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The core equals transformers' own mixer between its projections, in float64."""
    import transformers
    from transformers.models.nemotron_h.modeling_nemotron_h import NemotronHMamba2Mixer

    monkeypatch.setattr(torch.Tensor, "float", torch.Tensor.double)  # the module rounds to float32
    monkeypatch.setattr(torch, "float32", torch.float64)
    config = transformers.NemotronHConfig(
        hidden_size=8,
        mamba_num_heads=4,
        mamba_head_dim=6,
        ssm_state_size=5,
        n_groups=groups,
        conv_kernel=4,
        chunk_size=16,
        time_step_min=1e-9,
        layers_block_type=["linear_attention"],
    )
    torch.manual_seed(0)
    module = NemotronHMamba2Mixer(config, 0).double().eval()
    for weight in module.parameters():
        weight.normal_(0.0, 0.5)
    spec = MambaSpec(layers=(0,), heads=4, dim=6, groups=groups, state=5, conv=4, norm_groups=groups)
    scene = Scene(spec, lengths=[70])
    scene.weights = MambaWeights(
        groups=groups,
        taps=module.conv1d.weight[:, 0].T.contiguous(),
        conv_bias=module.conv1d.bias,
        rate=module.A_log.exp(),
        step_bias=module.dt_bias,
        skip=module.D,
        low=0.0,
        high=spec.high,
        finish="gated",
        norm=module.norm.weight,
        norm_groups=groups,
        eps=config.layer_norm_epsilon,
    )
    hidden = torch.randn(1, 70, 8, dtype=torch.float64)
    scene.rows[0].x = module.in_proj(hidden)[0]
    (found,) = scene.whole(TorchMamba())
    torch.testing.assert_close(module.out_proj(found), module(hidden)[0], rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("shape", ["Mamba", "FalconMamba", "Jamba"])
@torch.no_grad()
def test_mamba1_equals_the_module_of_transformers(shape: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The layer equals transformers' own mixer with projections and norms, in float64."""
    import transformers
    from transformers.models.falcon_mamba.modeling_falcon_mamba import FalconMambaMixer
    from transformers.models.jamba.modeling_jamba import JambaMambaMixer
    from transformers.models.mamba.modeling_mamba import MambaMixer

    monkeypatch.setattr(torch.Tensor, "float", torch.Tensor.double)  # the modules round to float32
    monkeypatch.setattr(torch, "float32", torch.float64)
    sizes: dict[str, Any] = {"hidden_size": 8, "num_hidden_layers": 1}
    if shape == "Jamba":
        sizes |= {"mamba_d_state": 5, "mamba_dt_rank": 3, "mamba_proj_bias": True}
    else:
        sizes |= {"state_size": 5, "time_step_rank": 3, "use_bias": True}
    kind = {"Mamba": MambaMixer, "FalconMamba": FalconMambaMixer, "Jamba": JambaMambaMixer}[shape]
    torch.manual_seed(0)
    own = {"initialize_mixer_weights": False} if shape == "FalconMamba" else {}
    module = kind(getattr(transformers, f"{shape}Config")(**sizes), 0, **own).double().eval()
    for weight in module.parameters():
        weight.normal_(0.0, 0.5)
    scene = Scene(Mamba1Spec(layers=(0,), heads=4, dim=4, state=5, rank=3, conv=4), lengths=[70])
    scene.weights = Mamba1Weights(
        taps=module.conv1d.weight[:, 0].T.contiguous(),
        conv_bias=module.conv1d.bias,
        rate=module.A_log.exp().unflatten(0, (4, 4)).transpose(1, 2).contiguous(),
        step_bias=module.dt_proj.bias,
        skip=module.D,
    )
    hidden = torch.randn(1, 70, 8, dtype=torch.float64)
    x, z = module.in_proj(hidden)[0].chunk(2, dim=1)
    convolved = torch.nn.functional.silu(_convolved(x, scene.weights.taps) + module.conv1d.bias)
    parts = module.x_proj(convolved).split((3, 5, 5), dim=1)
    if shape != "Mamba":
        norms = (module.dt_layernorm, module.b_layernorm, module.c_layernorm)
        parts = tuple(norm(part) for norm, part in zip(norms, parts, strict=True))
    steps = parts[0] @ module.dt_proj.weight.T
    scene.rows[0].x = torch.cat((x, steps, *parts[1:], z), dim=1)
    (found,) = scene.whole(WholeMamba1())
    torch.testing.assert_close(module.out_proj(found), module(hidden)[0], rtol=1e-9, atol=1e-9)
