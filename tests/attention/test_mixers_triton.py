"""Triton kernels of Mamba2, Mamba 1 and short convolutions in the interpreter: against the definition in
float64, and equal bits.
"""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tests.attention.state_copies import check_written
from tests.attention.test_mixers import (
    BARE,
    CONV,
    MAMBA,
    MAMBA1,
    NO_NORM,
    ONE_GROUP,
    SHORT_CONV,
    Scene,
    Whole,
    expected,
)
from tests.support.allocated import most_allocated
from tests.support.slow import mostly_slow
from tests.support.specs import model_spec
from weft.attention.conv.conv_triton import TritonConv
from weft.attention.mamba.mamba_torch import TorchMamba
from weft.attention.mamba.mamba_triton import TritonInvariantMamba, TritonMamba
from weft.attention.mamba1.mamba1_triton import TritonMamba1
from weft.attention.registry import choose
from weft.common.errors import ConfigError
from weft.config.families.mixers.state_caches import conv_cache, mamba1_cache, mamba_cache
from weft.config.parts.mixers import ConvSpec, Mamba1Spec, MambaSpec
from weft.config.sizing.layer_elements import mamba_elements
from weft.ops import triton as kernels

Tensor = torch.Tensor

pytestmark = pytest.mark.skipif(not kernels.interpreting(), reason="needs TRITON_INTERPRET=1")

#: The essential parts in few operations, because the interpreter is slow.
SMALL = MambaSpec(layers=(0,), heads=2, dim=3, groups=1, state=5, conv=2)
TWO_GROUPS = MambaSpec(layers=(0,), heads=4, dim=3, groups=2, state=5, conv=2, norm_groups=2)
SMALL_NO_NORM = MambaSpec(layers=(0,), heads=1, dim=3, groups=1, state=2, conv=2, norm="none")
#: Rows of a state in several programs, the last one in part; norm groups that are no power of two.
WIDE = MambaSpec(layers=(0,), heads=2, dim=44, groups=1, state=20, conv=4, norm_groups=2)
ONE_TAP = MambaSpec(
    layers=(0,), heads=8, dim=4, groups=4, state=3, conv=2, conv_bias=False, low=0.1, high=0.8
)
WIDE_CONV = ConvSpec(layers=(0,), heads=2, dim=300, taps=5, bias=True)
MANY_TAPS = ConvSpec(layers=(0,), heads=2, dim=3, taps=20)
#: Channels of a head in several programs, the last one in part; a state that is no power of two.
WIDE_MAMBA1 = Mamba1Spec(layers=(0,), heads=2, dim=40, state=12, rank=2, conv=5)
Spec = ConvSpec | MambaSpec | Mamba1Spec
SPECS: dict[str, Spec] = {
    "small": SMALL,
    "two groups": TWO_GROUPS,
    "mamba": MAMBA,
    "one group, norm before the gate": ONE_GROUP,
    "no norm": NO_NORM,
    "wide heads": WIDE,
    "one tap before": ONE_TAP,
    "conv": CONV,
    "conv of 2 taps": SHORT_CONV,
    "wide conv": WIDE_CONV,
    "conv of 20 taps": MANY_TAPS,
    "mamba1": MAMBA1,
    "bare mamba1": BARE,
    "wide mamba1": WIDE_MAMBA1,
}
LIMITS = {torch.float32: 1e-5, torch.float16: 3e-3, torch.bfloat16: 2e-2}
"""Maximum distance from float64, relative to the largest output."""


class WholeMamba1(Whole, TritonMamba1):
    """Both parts by kernels."""


def backends_of(spec: Spec) -> list[Any]:
    if isinstance(spec, Mamba1Spec):
        return [WholeMamba1()]
    return [TritonConv()] if isinstance(spec, ConvSpec) else [TritonMamba(), TritonInvariantMamba()]


def invariant_of(spec: Spec) -> Any:
    return backends_of(spec)[-1]


def check_outputs(scene: Scene, dtype: torch.dtype) -> None:
    """Compare all outputs of the scene with the definition."""
    for row, made in zip(scene.rows, scene.outputs(), strict=True):
        wanted = expected(scene, row)[: row.done]
        assert made.dtype == dtype
        assert (made.double() - wanted).abs().max() <= LIMITS[dtype] * wanted.abs().max()


@mostly_slow(
    ("name", "dtype"),
    [(name, dtype) for name in SPECS for dtype in LIMITS],
    [("conv", torch.bfloat16), ("bare mamba1", torch.bfloat16)],
)
def test_kernels_are_close_to_float64(name: str, dtype: torch.dtype) -> None:
    """Rows of several lengths: prompts in pieces, then decode rows of up to three tokens."""
    scene = Scene(SPECS[name], dtype, lengths=[8, 1, 4])
    backend = invariant_of(scene.spec)
    for size, each in ((2, False), (3, True), (1, True), (2, False)):
        rows = [row for row in scene.rows if row.done < len(row.x)]
        parts = [(row, min(size, len(row.x) - row.done)) for row in rows]
        if parts:
            scene.step(backend, parts, each=each)
    check_outputs(scene, dtype)


@pytest.mark.slow
@pytest.mark.parametrize("name", SPECS)
def test_long_rows(name: str) -> None:
    """Short convolutions and Mamba 1 by the kernels; longer rows of Mamba2 by torch, between segments of the
    kernels.
    """
    scene = Scene(SPECS[name], torch.float32, lengths=[100, 66])
    backend = backends_of(scene.spec)[0]
    for counts in ((3, 64), (70, 1), (25, 1)):
        scene.step(backend, list(zip(scene.rows, counts, strict=True)))
    scene.step(backend, [(scene.rows[0], 2)], each=True)
    check_outputs(scene, torch.float32)


@mostly_slow("name", list(SPECS), ["small", "bare mamba1"])
def test_bits_depend_on_neither_company_nor_chunks_nor_drafts(name: str) -> None:
    """Drafts that are cut back leave the bits of one token after another, in outputs and states."""
    backend = invariant_of(SPECS[name])
    whole, drafted = (Scene(SPECS[name], torch.float32, lengths=[6, 2]) for _ in range(2))
    right = whole.whole(backend)
    check_outputs(whole, torch.float32)
    first, second = drafted.rows
    drafted.step(backend, [(first, 2)])
    # (tokens of a verify row, rejected tokens)
    for count, drop in ((3, 2), (3, 0)):
        drafted.step(backend, [(first, count), (second, 1)], each=True)
        first.done, first.live = first.done - drop, first.live - drop
        del first.out[len(first.out) - drop :]
    for made, one in zip(drafted.outputs(), right, strict=True):
        assert torch.equal(made, one)
    for part, other in zip(drafted.state, whole.state, strict=True):
        for row in drafted.rows:
            assert torch.equal(part[row.slot, row.live], other[row.slot, 0])


@mostly_slow(
    ("name", "each"),
    [(name, each) for name in SPECS for each in (False, True)],
    [("small", True), ("conv", False), ("bare mamba1", True)],
)
def test_only_the_rows_own_copies_are_written(name: str, each: bool) -> None:
    scene = Scene(SPECS[name], torch.float32, lengths=[8, 5])
    scene.step(invariant_of(scene.spec), [(scene.rows[0], 2), (scene.rows[1], 3)], each=each)
    check_written(scene, (2, 3), each)


@mostly_slow("name", list(SPECS), ["conv"])
def test_a_new_sequence_starts_from_zeros(name: str) -> None:
    scene = Scene(SPECS[name], torch.float32, lengths=[3])
    (row,), backend = scene.rows, invariant_of(scene.spec)
    first = scene.whole(backend)
    for part in scene.state:
        part.fill_(float("inf"))
    row.done, row.live, row.out = 0, 3, []
    assert torch.equal(scene.whole(backend)[0], first[0])


@pytest.mark.slow
@pytest.mark.parametrize("name", SPECS)
def test_a_broken_row_spoils_itself_alone(name: str) -> None:
    """NaN in the time step of a head, an input of a convolution, or a gate."""
    clean, broken = (Scene(SPECS[name], torch.float32, lengths=[6, 6, 6]) for _ in range(2))
    backend = invariant_of(clean.spec)
    right = clean.whole(backend)
    broken.rows[1].x[2, -1] = float("nan")
    for number, (made, one) in enumerate(zip(broken.whole(backend), right, strict=True)):
        since = 2 if number == 1 else len(one)
        assert torch.equal(made[:since], one[:since])
        assert made[since:].isnan().any() == (since < len(one))


@pytest.mark.slow
def test_outputs_without_norm_stay_wide() -> None:
    """With a norm over several ranks the layer computes gate and norm, from float32."""
    scene, plain = (Scene(SMALL_NO_NORM, torch.bfloat16, lengths=[2]) for _ in range(2))
    scene.weights = replace(scene.weights, finish="later")
    segment, x = scene.stage([(scene.rows[0], 2)])
    out = torch.full((2, scene.columns), float("nan"))
    backend = TritonMamba()
    backend.run(x, out, scene.given(backend, segment, False))
    (gated,) = plain.whole(TorchMamba())
    made = out * torch.nn.functional.silu(x[:, : scene.columns].float())
    torch.testing.assert_close(made.bfloat16(), gated, rtol=1e-2, atol=1e-3)


@pytest.mark.slow
def test_the_plan_covers_tensors_beside_the_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    """Outputs before the norm are float32. The kernels themselves do not run here."""
    from weft.ops.triton import mamba

    class Nothing:
        def __getitem__(self, grid: object) -> Any:
            return lambda *_, **__: None

    monkeypatch.setattr(mamba, "_mamba_states", Nothing())
    monkeypatch.setattr(mamba, "_mamba_outputs", Nothing())
    scene = Scene(WIDE, torch.bfloat16, lengths=[3] * 40)
    segment, x = scene.stage([(row, 3) for row in scene.rows])
    out = torch.empty(len(x), scene.columns, dtype=x.dtype)
    given = scene.given(TritonMamba(), segment, True)
    spec: Any = SimpleNamespace(mamba=WIDE)
    used = most_allocated(lambda: TritonMamba().run(x, out, given))
    assert 4 * out.numel() <= used <= 4 * mamba_elements(spec, len(x), len(scene.rows))


@pytest.mark.parametrize(
    ("spec", "invariant", "chosen"),
    [
        (MAMBA, False, TritonMamba),
        (MAMBA, True, TritonInvariantMamba),
        (CONV, True, TritonConv),
        (MAMBA1, True, TritonMamba1),
    ],
)
def test_kernels_are_chosen_on_gpus(spec: Any, invariant: bool, chosen: type) -> None:
    make: Any = {ConvSpec: conv_cache, MambaSpec: mamba_cache, Mamba1Spec: mamba1_cache}[type(spec)]
    cache = make(spec)
    form = cache.form
    model = model_spec(layers=1, caches=(cache,), **{form: spec})
    device = torch.device("cuda")
    made = choose("auto", model, torch.bfloat16, device, 16, invariant=invariant)
    assert type(made[form]) is chosen
    # float64 stays on torch.
    other = choose("auto", model, torch.float64, device, 16, invariant=invariant)[form]
    assert not isinstance(other, chosen)
    with pytest.raises(ConfigError, match="float64"):
        choose("triton", model, torch.float64, device, 16)


def test_states_beyond_the_kernel_are_refused_by_name() -> None:
    spec = Mamba1Spec(layers=(0,), heads=2, dim=4, state=257, rank=2, conv=4)
    model = model_spec(layers=1, caches=(mamba1_cache(spec),), mamba1=spec)
    with pytest.raises(ConfigError, match="states of 257 elements: at most 256"):
        choose("triton", model, torch.bfloat16, torch.device("cuda"), 16)


@pytest.mark.parametrize(("state", "conv"), [(257, 4), (128, 9)])
def test_what_the_kernels_lack_is_refused_by_name(state: int, conv: int) -> None:
    spec = MambaSpec(layers=(0,), heads=2, dim=4, groups=1, state=state, conv=conv)
    model = model_spec(layers=1, caches=(mamba_cache(spec),), mamba=spec)
    with pytest.raises(ConfigError, match="at most 256 columns and 8 taps"):
        choose("triton", model, torch.bfloat16, torch.device("cuda"), 16)
