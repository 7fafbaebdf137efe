"""Mamba2 and Mamba 1 of the CPU extension: against the definition in float64, and equal bits however work is
divided.
"""

from __future__ import annotations

import dataclasses
import random
from typing import Any

import pytest
import torch

from tests.attention.state_copies import check_written
from tests.attention.test_mixers import BARE, MAMBA, MAMBA1, NAN, ONE_GROUP, Scene, Whole, expected
from tests.support.slow import mostly_slow
from tests.support.specs import model_spec
from weft.attention.mamba.mamba_cpu import CpuMamba
from weft.attention.mamba.mamba_torch import InvariantMamba, TorchMamba
from weft.attention.mamba1.mamba1_cpu import CpuMamba1
from weft.attention.mamba1.mamba1_torch import TorchMamba1
from weft.attention.registry import choose
from weft.common.errors import ConfigError
from weft.config.families.mixers.state_caches import mamba1_cache, mamba_cache
from weft.config.parts.mixers import Mamba1Spec, MambaSpec

Tensor = torch.Tensor

pytestmark = [pytest.mark.usefixtures("extension"), pytest.mark.usefixtures("kept_threads")]


def spec(heads: int, dim: int, groups: int, state: int, conv: int = 4, **more: Any) -> MambaSpec:
    return MambaSpec(layers=(0,), heads=heads, dim=dim, groups=groups, state=state, conv=conv, **more)


def mamba1(heads: int, dim: int, state: int, conv: int = 4, **more: Any) -> Mamba1Spec:
    return Mamba1Spec(layers=(0,), heads=heads, dim=dim, state=state, rank=2, conv=conv, **more)


#: Mamba2: blocks of every width, parts of vectors, groups in several places, every norm and number of taps.
#: Mamba 1: lines in fours and fewer, parts of vectors, several blocks of channels.
SHAPES: dict[str, MambaSpec | Mamba1Spec] = {
    "odd": spec(4, 12, 2, 10, 3, norm="normed", norm_groups=1, low=0.05, high=0.6),
    "published": spec(16, 64, 2, 128, norm_groups=2),
    "narrow": spec(6, 20, 1, 100, 2, norm="none", conv_bias=False),
    "wide": spec(3, 40, 3, 272, norm_groups=3),
    "places": spec(16, 8, 1, 24, norm_groups=4),
    "mamba": MAMBA,
    "one-group": ONE_GROUP,
    "mamba1": MAMBA1,
    "mamba1-bare": BARE,
    "mamba1-odd": mamba1(2, 37, 7, 3),
    "mamba1-wide": mamba1(3, 150, 16),
}
DTYPES = [torch.float32, torch.bfloat16]


class WholeMamba1(Whole, CpuMamba1):
    """Both parts in C++."""


def backend_of(scene: Scene) -> Any:
    return WholeMamba1() if isinstance(scene.spec, Mamba1Spec) else CpuMamba()


def bits(x: Tensor) -> Tensor:
    return x.view({4: torch.int32, 2: torch.int16}[x.element_size()])


def states(scene: Scene) -> list[Tensor]:
    """Return the current state of each row, all parts."""
    return [part[row.slot, row.live] for row in scene.rows for part in scene.state]


def same(made: list[Tensor], right: list[Tensor]) -> bool:
    return all(torch.equal(bits(a), bits(b)) for a, b in zip(made, right, strict=True))


def in_chunks(scene: Scene, size: int, *, each: bool = False) -> None:
    """Run all rows side by side, ``size`` tokens in a step, to the end."""
    while parts := [(r, min(size, len(r.x) - r.done)) for r in scene.rows if r.done < len(r.x)]:
        scene.step(backend_of(scene), parts, each=each)


@mostly_slow(
    ("name", "dtype"),
    [(name, dtype) for name in SHAPES for dtype in DTYPES],
    [
        ("odd", torch.float32),
        ("published", torch.bfloat16),
        ("narrow", torch.bfloat16),
        ("mamba1-odd", torch.float32),
        ("mamba1-wide", torch.bfloat16),
    ],
)
def test_close_to_float64(name: str, dtype: torch.dtype) -> None:
    """In bf16 the reference has the same inputs, so only the rounding of outputs remains."""
    scene = Scene(SHAPES[name], dtype, lengths=[37, 1, 7])
    for row, made in zip(scene.rows, scene.whole(backend_of(scene)), strict=True):
        right = expected(scene, row)
        limit = 1e-5 if dtype == torch.float32 else 4e-3
        assert (made.double() - right).abs().max() <= limit * right.abs().max()


@pytest.mark.slow
@pytest.mark.parametrize("name", list(SHAPES))
def test_long_rows_are_close_to_float64(name: str) -> None:
    scene = Scene(SHAPES[name], torch.float32, lengths=[300, 64, 129])
    for row, made in zip(scene.rows, scene.whole(backend_of(scene)), strict=True):
        right = expected(scene, row)
        assert (made.double() - right).abs().max() <= 1e-5 * right.abs().max()


@mostly_slow(
    ("name", "dtype"),
    [(name, dtype) for name in SHAPES for dtype in DTYPES],
    [
        ("odd", torch.bfloat16),
        ("published", torch.float32),
        ("narrow", torch.bfloat16),
        ("mamba1-odd", torch.bfloat16),
        ("mamba1-wide", torch.float32),
    ],
)
def test_bits_do_not_depend_on_chunks_company_or_threads(name: str, dtype: torch.dtype) -> None:
    lengths = [70, 1, 33]
    torch.set_num_threads(1)
    right = Scene(SHAPES[name], dtype, lengths)
    whole = right.whole(backend_of(right))
    torch.set_num_threads(2)
    for size in (1, 3, 7, 16, 50):
        cut = Scene(SHAPES[name], dtype, lengths)
        in_chunks(cut, size)
        assert same(cut.outputs(), whole), size
        assert same(states(cut), states(right)), size
    alone = Scene(SHAPES[name], dtype, lengths)
    for row in reversed(alone.rows):
        alone.step(backend_of(alone), [(row, len(row.x))])
    assert same(alone.outputs(), whole)
    decoded = Scene(SHAPES[name], dtype, lengths)
    in_chunks(decoded, 1, each=True)
    assert same(decoded.outputs(), whole)
    assert same(states(decoded), states(right))


@mostly_slow("name", list(SHAPES), ["odd", "mamba1-odd"])
def test_drafts_leave_a_state_for_each_token(name: str) -> None:
    """Verify rows of different counts, cut back at random, end in the state of one prompt."""
    lengths = [30, 24, 9, 28]
    whole, drafted = (Scene(SHAPES[name], torch.float32, lengths) for _ in range(2))
    right = whole.whole(backend_of(whole))
    rng = random.Random(1)
    drafted.step(backend_of(drafted), list(zip(drafted.rows, [12, 3, 1, 20], strict=True)))
    kinds = set()
    while rows := [row for row in drafted.rows if row.done < len(row.x)]:
        parts = [(row, rng.randint(1, min(4, len(row.x) - row.done))) for row in rows]
        drafted.step(backend_of(drafted), parts, each=True)
        for row, count in parts:
            drop = rng.randint(0, count - 1)
            kinds.add((count, drop))
            row.done, row.live = row.done - drop, row.live - drop
            del row.out[len(row.out) - drop :]
    assert len(kinds) > 6
    assert same(drafted.outputs(), right)
    assert same(states(drafted), states(whole))


@pytest.mark.parametrize("each", [False, True])
@pytest.mark.parametrize("name", ["places", "mamba1-wide"])
def test_only_the_rows_own_copies_are_written(name: str, each: bool) -> None:
    scene = Scene(SHAPES[name], torch.float32, [8, 5])
    scene.step(backend_of(scene), [(scene.rows[0], 2), (scene.rows[1], 3)], each=each)
    check_written(scene, (2, 3), each)


@pytest.mark.parametrize("name", ["odd", "mamba1-odd"])
def test_a_new_sequence_starts_from_zeros(name: str) -> None:
    scene = Scene(SHAPES[name], torch.float32, [20])
    first = scene.whole(backend_of(scene))
    row = scene.rows[0]
    for part in scene.state:
        part.fill_(float("inf"))
    row.done, row.live, row.out = 0, 3, []
    assert same(scene.whole(backend_of(scene)), first)


@pytest.mark.parametrize(("name", "x", "step"), [("odd", 51, -1), ("mamba1-odd", 3, 77)])
def test_a_broken_row_spoils_itself_alone(name: str, x: int, step: int) -> None:
    """A NaN in x, and a NaN in a time step (of Mamba2: with bounds). x, step: columns of the inputs."""
    clean, broken = (Scene(SHAPES[name], torch.float32, [20, 20, 30, 40]) for _ in range(2))
    right = clean.whole(backend_of(clean))
    broken.rows[1].x[7, x] = NAN
    broken.rows[3].x[25, step] = NAN
    for number, (a, b) in enumerate(zip(broken.whole(backend_of(broken)), right, strict=True)):
        since = {1: 7, 3: 25}.get(number, len(a))
        assert same([a[:since]], [b[:since]])
        assert a[since:].isnan().any() == (since < len(a))


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_norm_of_several_ranks_gets_the_output_before_the_norm(dtype: torch.dtype) -> None:
    """Inputs with the strides of a wider matrix; outputs in float32, without gate and norm."""
    scene = Scene(SHAPES["odd"], dtype, [9])
    scene.weights = dataclasses.replace(scene.weights, finish="later", norm=None)
    segment, x = scene.stage([(scene.rows[0], 9)])
    wide = torch.nn.functional.pad(x, (0, 5), value=NAN)
    made = torch.full((9, scene.columns + 3), NAN)
    backend = CpuMamba()
    backend.run(wide[:, :-5], made[:, :-3], scene.given(backend, segment, False))
    assert made[:, -3:].isnan().all()
    due = torch.empty(9, scene.columns)
    TorchMamba().run(x, due, scene.given(TorchMamba(), segment, False))
    assert (made[:, :-3] - due).abs().max() <= 1e-5 * due.abs().max()
    column = made[:, :-3].square()
    assert torch.equal(backend.sum(column, 1), InvariantMamba().sum(column, 1))


# --- what is served ---


@pytest.mark.parametrize(
    ("shape", "dtype", "device", "lacking"),
    [
        (spec(2, 4, 1, 1040), torch.float32, "cpu", "heads of 4 x 1040"),
        (spec(2, 4, 1, 8, 5), torch.float32, "cpu", "5 taps"),
        (MAMBA, torch.float64, "cpu", "float64"),
        (MAMBA, torch.float32, "cuda", "cuda"),
    ],
)
def test_what_the_cpu_form_of_mamba2_lacks(
    shape: MambaSpec, dtype: torch.dtype, device: str, lacking: str
) -> None:
    model = model_spec(layers=1, mamba=shape, caches=(mamba_cache(shape),))
    with pytest.raises(ConfigError, match=lacking):
        CpuMamba().check(model.caches[0], model, 64, dtype, torch.device(device))


@pytest.mark.parametrize(
    ("shape", "dtype", "device", "lacking"),
    [
        (mamba1(2, 4, 8, 5), torch.float32, "cpu", "5 taps"),
        (MAMBA1, torch.float64, "cpu", "float64"),
        (MAMBA1, torch.float32, "cuda", "cuda"),
    ],
)
def test_what_the_cpu_form_of_mamba1_lacks(
    shape: Mamba1Spec, dtype: torch.dtype, device: str, lacking: str
) -> None:
    model = model_spec(layers=1, mamba1=shape, caches=(mamba1_cache(shape),))
    with pytest.raises(ConfigError, match=lacking):
        CpuMamba1().check(model.caches[0], model, 64, dtype, torch.device(device))


@pytest.mark.parametrize(
    ("shape", "dtype", "invariant", "chosen"),
    [
        (MAMBA, torch.bfloat16, False, CpuMamba),
        (MAMBA, torch.float32, True, CpuMamba),
        (MAMBA, torch.float64, False, TorchMamba),
        (MAMBA, torch.float64, True, InvariantMamba),
        (spec(2, 4, 1, 8, 5), torch.bfloat16, False, TorchMamba),
        (MAMBA1, torch.bfloat16, True, CpuMamba1),
        (MAMBA1, torch.float64, True, TorchMamba1),
        (mamba1(2, 4, 8, 5), torch.float32, False, TorchMamba1),
    ],
)
def test_what_is_chosen(
    shape: MambaSpec | Mamba1Spec, dtype: torch.dtype, invariant: bool, chosen: type
) -> None:
    if isinstance(shape, Mamba1Spec):
        model = model_spec(layers=1, mamba1=shape, caches=(mamba1_cache(shape),))
    else:
        model = model_spec(layers=1, mamba=shape, caches=(mamba_cache(shape),))
    made = choose("auto", model, dtype, torch.device("cpu"), 64, invariant=invariant)
    assert type(made[model.caches[0].form]) is chosen


@pytest.mark.parametrize("shape", [MAMBA, MAMBA1])
def test_rows_that_do_not_fit_are_refused(shape: MambaSpec | Mamba1Spec) -> None:
    scene = Scene(shape, torch.float32, [9])
    with pytest.raises(RuntimeError, match="5 tokens and 4 copies"):
        scene.step(backend_of(scene), [(scene.rows[0], 5)], each=True)
    scene.rows[0].slot = 99
    with pytest.raises(RuntimeError, match="slot 99"):
        scene.step(backend_of(scene), [(scene.rows[0], 2)])
