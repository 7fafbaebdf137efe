"""The core of the gated delta net: every backend against the definition in float64, and equal bits."""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from tests.attention.state_copies import check_written
from tests.support.slow import mostly_slow
from tests.support.specs import model_spec
from weft.attention import recurrent
from weft.attention.base import SegmentInput
from weft.attention.delta import delta_torch
from weft.attention.delta.delta_backend import DeltaBackend, DeltaInput, DeltaInputs, DeltaWeights
from weft.attention.delta.delta_cpu import CpuDelta
from weft.attention.delta.delta_torch import InvariantDelta, TorchDelta
from weft.attention.delta.delta_triton import TritonDelta, TritonInvariantDelta
from weft.attention.registry import choose
from weft.common.errors import ConfigError
from weft.config.families.qwen3_next import state_cache
from weft.config.sizing.layer_elements import recurrent_pass
from weft.config.spec import DeltaSpec, ModelSpec
from weft.ops import triton as kernels
from weft.ops.torch_ops import wide

Tensor = torch.Tensor
State = tuple[Tensor, ...]

NAN = float("nan")
COPIES = 4
#: (key heads, value heads, key dims, value dims, taps), and a rank for a decay of every key channel
SHAPES = ((2, 4, 16, 32, 4), (3, 3, 8, 12, 3), (1, 3, 24, 5, 2))
KIMI = ((3, 3, 12, 12, 3, 12), (1, 2, 24, 5, 2, 4))
#: Shapes for the C++ operations: strips of every width, several strips, remainders.
CPU_SHAPES = (
    (4, 8, 64, 64, 4),
    (2, 4, 128, 128, 4),
    (1, 3, 16, 48, 3),
    (1, 1, 256, 16, 2),
    (2, 2, 32, 112, 4),
)
CPU_KIMI = ((2, 2, 128, 128, 4, 128), (1, 2, 16, 48, 3, 16), (2, 4, 32, 112, 2, 8))
LENGTHS = [1, 70, 5, 130, 17, 64, 33]


triton_runs = pytest.mark.skipif(not kernels.interpreting(), reason="needs TRITON_INTERPRET=1")


pytestmark = pytest.mark.usefixtures("kept_threads")


def make_spec(shape: tuple[int, ...]) -> DeltaSpec:
    k_heads, v_heads, k_dim, v_dim, conv, *rank = shape
    sizes = {"k_heads": k_heads, "v_heads": v_heads, "k_dim": k_dim, "v_dim": v_dim, "conv": conv}
    return DeltaSpec(layers=(0,), **sizes, gate_rank=sum(rank))


@dataclass
class Row:
    """A sequence: its inputs, the number of computed tokens, and the place of its state."""

    qkvz: Tensor
    """[T, q heads | k heads | v heads | z heads]."""
    gates: Tensor
    """[T, b | a]."""
    slot: int
    done: int = 0
    live: int = 0
    out: list[Tensor] = field(default_factory=list)


class Scene:
    """Sequences with random inputs, and states with NaN in all unwritten entries."""

    def __init__(
        self,
        shape: tuple[int, ...],
        dtype: torch.dtype = torch.float64,
        lengths: list[int] = LENGTHS,
        wild: bool = False,
        **bounds: float,
    ) -> None:
        """``bounds``: ``reach`` and ``floor`` of the weights."""
        self.spec = make_spec(shape)
        k_heads, v_heads, k_dim, v_dim, conv, *_ = shape
        key, value, decays = k_heads * k_dim, v_heads * v_dim, self.spec.decays
        generator = torch.Generator().manual_seed(0)

        def noise(*size: int) -> Tensor:
            return torch.randn(size, generator=generator, dtype=torch.float64)

        exact = wide(dtype)
        self.weights = DeltaWeights(
            taps=noise(conv, 2 * key + value).to(exact),
            rate=noise(v_heads).exp().to(exact),
            bias=noise(*((v_heads, k_dim) if self.spec.gate_rank else (v_heads,))).to(exact),
            norm=(1 + 0.3 * noise(v_dim)).to(exact),
            eps=1e-6,
            sigmoid=self.spec.gate_rank > 0,
            **bounds,
        )
        slots = random.Random(0).sample(range(len(lengths) + 2), len(lengths))
        gate_scale = 40.0 if wild else 2.0
        self.rows = [
            Row(
                noise(n, 2 * (key + value)).to(dtype),
                (gate_scale * noise(n, v_heads + decays)).to(dtype),
                slot,
            )
            for n, slot in zip(lengths, slots, strict=True)
        ]
        self.state: State = tuple(
            torch.full((len(lengths) + 3, COPIES, *part.shape), NAN, dtype=exact if part.wide else dtype)
            for part in state_cache(self.spec).parts
        )

    def stage(self, parts: list[tuple[Row, int]]) -> tuple[SegmentInput, Tensor, Tensor]:
        """Return the next ``count`` tokens of each row as a segment, and their inputs."""
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
        none = self.rows[0]
        qkvz = torch.cat([none.qkvz[:0], *(row.qkvz[row.done : row.done + n] for row, n in parts)])
        gates = torch.cat([none.gates[:0], *(row.gates[row.done : row.done + n] for row, n in parts)])
        return segment, qkvz, gates

    def step(self, backend: DeltaBackend, parts: list[tuple[Row, int]], *, each: bool = False) -> None:
        """Run ``count`` more tokens of each row, as one segment inside other rows."""
        segment, qkvz, gates = self.stage(parts)
        prepared = backend.prepare(segment, 0, state_cache(self.spec), 64, qkvz.dtype)
        qkvz, gates = self._amid(qkvz), self._amid(gates)
        out = torch.full_like(qkvz, NAN)[:, : self.spec.v_heads * self.spec.v_dim]
        backend.run(
            self.inputs(qkvz[3:-2], gates[3:-2]),
            out[3:-2],
            DeltaInput(segment, self.state, self.weights, each, prepared),
        )
        assert out[:3].isnan().all()
        assert out[-2:].isnan().all()
        made = out[3:-2].split([count for _, count in parts])
        for (row, count), values in zip(parts, made, strict=True):
            row.out += list(values)
            row.done += count
            row.live = count - 1 if each else 0

    def inputs(self, qkvz: Tensor, gates: Tensor) -> DeltaInputs:
        """Return the parts of the inputs, with the strides of ``qkvz`` and ``gates``."""
        value, heads = self.spec.v_heads * self.spec.v_dim, self.spec.v_heads
        return DeltaInputs(qkvz[:, :-value], qkvz[:, -value:], gates[:, :heads], gates[:, heads:])

    @staticmethod
    def _amid(rows: Tensor) -> Tensor:
        """Return the rows with three other rows before and two after."""
        return torch.nn.functional.pad(rows, (0, 0, 3, 2), value=NAN)

    def whole(self, backend: DeltaBackend) -> list[Tensor]:
        """Run every row in one piece, in one segment. Return the outputs."""
        self.step(backend, [(row, len(row.qkvz)) for row in self.rows])
        return self.outputs()

    def outputs(self) -> list[Tensor]:
        return [torch.stack(row.out) for row in self.rows]

    def recurrent(self) -> Tensor:
        """Return the current states of the rows."""
        return torch.stack([self.state[3][row.slot, row.live] for row in self.rows])


def expected(scene: Scene, row: Row) -> tuple[Tensor, Tensor]:
    """Return (outputs, state) of a row by the definition in float64: token by token, head by head."""
    spec, weights = scene.spec, scene.weights
    key, value = spec.k_heads * spec.k_dim, spec.v_heads * spec.v_dim
    x, gates = row.qkvz.double(), row.gates.double()
    padded = torch.cat(
        (torch.zeros(spec.conv - 1, 2 * key + value, dtype=torch.float64), x[:, : 2 * key + value])
    )
    taps = weights.taps.double()
    mixed = sum(padded[j : j + len(x)] * taps[j] for j in range(spec.conv))
    assert isinstance(mixed, Tensor)
    mixed = torch.nn.functional.silu(mixed)
    outs = torch.empty(len(x), spec.v_heads, spec.v_dim, dtype=torch.float64)
    states = torch.empty(spec.v_heads, spec.k_dim, spec.v_dim, dtype=torch.float64)
    for head in range(spec.v_heads):
        k_head = head * spec.k_heads // spec.v_heads
        state = torch.zeros(spec.k_dim, spec.v_dim, dtype=torch.float64)
        for t in range(len(x)):
            q = mixed[t, k_head * spec.k_dim : (k_head + 1) * spec.k_dim]
            k = mixed[t, key + k_head * spec.k_dim : key + (k_head + 1) * spec.k_dim]
            v = mixed[t, 2 * key + head * spec.v_dim : 2 * key + (head + 1) * spec.v_dim]
            q = q / (q.square().sum() + 1e-6).sqrt() * spec.k_dim**-0.5
            k = k / (k.square().sum() + 1e-6).sqrt()
            a = gates[t, spec.v_heads :].unflatten(0, (spec.v_heads, -1))[head]
            a, rate = a + weights.bias[head].double(), weights.rate[head].double()
            decay = -rate * torch.nn.functional.softplus(a)
            if weights.floor:
                decay = weights.floor * (rate * a).sigmoid()
            # One decay, or one for each row of the state.
            state = state * decay.exp().unsqueeze(1)
            beta = weights.reach * gates[t, head].sigmoid()
            state = state + torch.outer(k, beta * (v - k @ state))
            o = q @ state
            o = o / (o.square().mean() + weights.eps).sqrt() * weights.norm.double()
            z = x[t, 2 * key + value + head * spec.v_dim : 2 * key + value + (head + 1) * spec.v_dim]
            outs[t, head] = o * (z.sigmoid() if weights.sigmoid else torch.nn.functional.silu(z))
        states[head] = state
    return outs.flatten(1), states


def distance(made: Tensor, right: Tensor) -> float:
    assert made.shape == right.shape
    return float((made.double() - right).abs().max() / right.abs().max())


def bits(x: Tensor) -> Tensor:
    return x.view({8: torch.int64, 4: torch.int32, 2: torch.int16}[x.element_size()])


# --- close to the definition ---


@pytest.mark.parametrize("wild", [False, True])
@pytest.mark.parametrize("backend", [TorchDelta(), InvariantDelta()], ids=["torch", "invariant"])
@mostly_slow("shape", [*SHAPES, KIMI[0]], [SHAPES[0], SHAPES[2], KIMI[0]])
def test_torch_is_exact_in_float64(shape: tuple[int, ...], backend: DeltaBackend, wild: bool) -> None:
    """The gates include complete decay and no decay."""
    scene = Scene(shape, wild=wild)
    outputs = scene.whole(backend)
    for row, made, state in zip(scene.rows, outputs, scene.recurrent(), strict=True):
        right, right_state = expected(scene, row)
        # With little learned, the norm of o magnifies rounding errors.
        assert distance(made, right) < (1e-10 if wild else 1e-12)
        assert distance(state, right_state) < 1e-12


@pytest.mark.usefixtures("extension")
@pytest.mark.parametrize("wild", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@mostly_slow("shape", [*CPU_SHAPES, *CPU_KIMI], [*CPU_SHAPES, *CPU_KIMI[1:]])
def test_cpu_is_close_to_float64(shape: tuple[int, ...], dtype: torch.dtype, wild: bool) -> None:
    """In bf16 the reference has the same inputs, so only the rounding of outputs remains."""
    scene = Scene(shape, dtype, lengths=[40, 1, 7], wild=wild)
    for row, made in zip(scene.rows, scene.whole(CpuDelta()), strict=True):
        right, right_state = expected(scene, row)
        assert distance(made, right) < (1e-5 if dtype == torch.float32 else 4e-3)
        assert distance(scene.state[3][row.slot, 0], right_state) < 1e-5


@pytest.mark.parametrize("shape", [SHAPES[2], KIMI[1]])
@pytest.mark.parametrize("backend", [TorchDelta(), InvariantDelta()], ids=["torch", "invariant"])
def test_bounds_of_beta_and_of_decays(shape: tuple[int, ...], backend: DeltaBackend) -> None:
    scene = Scene(shape, lengths=[70, 5], reach=2.0, floor=-5.0)
    for row, made, state in zip(scene.rows, scene.whole(backend), scene.recurrent(), strict=True):
        right, right_state = expected(scene, row)
        assert distance(made, right) < 1e-11
        assert distance(state, right_state) < 1e-11


@pytest.mark.usefixtures("extension")
@pytest.mark.parametrize("shape", [CPU_SHAPES[2], CPU_KIMI[1]])
def test_bounds_on_cpus(shape: tuple[int, ...]) -> None:
    scene = Scene(shape, torch.float32, lengths=[40, 7], reach=2.0, floor=-5.0)
    for row, made in zip(scene.rows, scene.whole(CpuDelta()), strict=True):
        assert distance(made, expected(scene, row)[0]) < 1e-4


@triton_runs
@pytest.mark.parametrize("shape", [SHAPES[2], KIMI[1]])
def test_bounds_by_triton(shape: tuple[int, ...]) -> None:
    scene = Scene(shape, torch.float32, lengths=[4, 1], reach=2.0, floor=-5.0)
    for row, made in zip(scene.rows, scene.whole(TritonDelta()), strict=True):
        assert distance(made, expected(scene, row)[0]) < 1e-4


@triton_runs
@mostly_slow(
    ("shape", "dtype"),
    [
        (SHAPES[0], torch.float32),
        (SHAPES[1], torch.bfloat16),
        (SHAPES[2], torch.float16),
        (CPU_SHAPES[1], torch.bfloat16),
        (KIMI[0], torch.bfloat16),
        (KIMI[1], torch.float32),
    ],
    [(SHAPES[2], torch.float16)],
)
def test_triton_is_close_to_float64(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    """Rows of several chunks and sizes; one row is too long for the kernel of the fast form."""
    for backend, lengths in ((TritonDelta(), [70, 1]), (TritonInvariantDelta(), [9, 1, 4])):
        scene = Scene(shape, dtype, lengths=lengths)
        in_chunks(scene, backend, 3 if backend.invariant else 66)
        for row, made in zip(scene.rows, scene.outputs(), strict=True):
            right, right_state = expected(scene, row)
            limit = {torch.float32: 1e-5, torch.float16: 2e-3}.get(dtype, 1.6e-2)
            assert distance(made, right) < limit
            assert distance(scene.state[3][row.slot, 0], right_state) < 1e-5


@triton_runs
def test_triton_with_decays_by_channel() -> None:
    """The short form of ``test_triton_is_close_to_float64``."""
    scene = Scene(KIMI[1], torch.float32, lengths=[4, 1])
    for row, made in zip(scene.rows, scene.whole(TritonDelta()), strict=True):
        right, right_state = expected(scene, row)
        assert distance(made, right) < 1e-5
        assert distance(scene.state[3][row.slot, 0], right_state) < 1e-5


@triton_runs
@mostly_slow("shape", [SHAPES[2], KIMI[1]], [SHAPES[2]])
def test_triton_keeps_bits_and_a_state_for_each_token(shape: tuple[int, ...]) -> None:
    """Chunks, company and drafts that are cut back leave the bits of one token after another."""
    backend, lengths = TritonInvariantDelta(), [9, 4]
    whole = Scene(shape, torch.float32, lengths)
    right = whole.whole(backend)
    drafted = Scene(shape, torch.float32, lengths)
    first, second = drafted.rows
    drafted.step(backend, [(first, 2)])
    # (tokens of a verify row, rejected tokens)
    for count, drop in ((3, 2), (2, 0), (4, 1), (1, 0)):
        drafted.step(backend, [(first, count), (second, 1)], each=True)
        first.done, first.live = first.done - drop, first.live - drop
        del first.out[len(first.out) - drop :]
    for made, one in zip(drafted.outputs(), right, strict=True):
        assert torch.equal(bits(made), bits(one))
    assert torch.equal(bits(drafted.recurrent()), bits(whole.recurrent()))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("shape", [SHAPES[0], KIMI[0]])
def test_torch_in_narrower_types(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    scene = Scene(shape, dtype, lengths=[150, 3])
    for row, made in zip(scene.rows, scene.whole(TorchDelta()), strict=True):
        assert distance(made, expected(scene, row)[0]) < {torch.float32: 1e-5, torch.float16: 1e-3}.get(
            dtype, 8e-3
        )


# --- chunks, company, drafts ---


def in_chunks(scene: Scene, backend: DeltaBackend, size: int) -> None:
    """Run all rows side by side, ``size`` tokens in a step, to the end."""
    while parts := [(r, min(size, len(r.qkvz) - r.done)) for r in scene.rows if r.done < len(r.qkvz)]:
        scene.step(backend, parts)


@mostly_slow(
    ("shape", "size"),
    [(shape, size) for shape in (*SHAPES[:2], KIMI[0]) for size in (1, 7, 16, 64, 100)],
    [*((shape, size) for shape in SHAPES[:2] for size in (1, 7, 16, 64, 100)), (KIMI[0], 100)],
)
def test_chunks_do_not_show_in_float64(shape: tuple[int, ...], size: int) -> None:
    whole, cut = Scene(shape), Scene(shape)
    right = whole.whole(TorchDelta())
    in_chunks(cut, TorchDelta(), size)
    for made, one in zip(cut.outputs(), right, strict=True):
        assert distance(made, one) < 1e-12
    assert distance(cut.recurrent(), whole.recurrent()) < 1e-12


def test_memory_with_decays_by_channel_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """A long row and many short rows need the memory of the plan, not memory for each token of the step."""
    scene = Scene((1, 1, 8, 8, 2, 8), lengths=[600, *[70] * 9, *[20] * 9])
    sizes, between = [], delta_torch._between

    def recorded(log_decay: Tensor) -> Tensor:
        made = between(log_decay)
        sizes.append(made.numel())
        return made

    monkeypatch.setattr(delta_torch, "_between", recorded)
    outputs = scene.whole(TorchDelta())
    assert max(sizes) == recurrent_pass(full_spec((1, 1, 8, 8, 2, 8))) // 3
    for number in (0, 5, 15):
        right, state = expected(scene, scene.rows[number])
        assert distance(outputs[number], right) < 1e-12
        assert distance(scene.recurrent()[number], state) < 1e-12


BITWISE: list[Any] = [
    *((InvariantDelta(), shape, dtype) for shape in SHAPES[:2] for dtype in (torch.float64, torch.float32)),
    *(
        (CpuDelta(), shape, dtype)
        for shape in (*CPU_SHAPES, CPU_KIMI[1])
        for dtype in (torch.float32, torch.bfloat16)
    ),
]
SLOW: list[Any] = [
    (InvariantDelta(), KIMI[0], torch.float32),
    *((CpuDelta(), shape, torch.bfloat16) for shape in (CPU_KIMI[0], CPU_KIMI[2])),
]


@pytest.mark.usefixtures("extension")
@mostly_slow(
    ("backend", "shape", "dtype"), [*BITWISE, *SLOW], BITWISE, ids=lambda x: getattr(type(x), "__name__", x)
)
def test_bits_do_not_depend_on_chunks_company_or_threads(
    backend: DeltaBackend, shape: tuple[int, ...], dtype: torch.dtype
) -> None:
    lengths = [70, 1, 33] if isinstance(backend, CpuDelta) else [40, 1, 19]
    torch.set_num_threads(1)
    right = Scene(shape, dtype, lengths)
    whole = right.whole(backend)
    torch.set_num_threads(2)
    for size in (1, 7, 16, 64, 100):
        cut = Scene(shape, dtype, lengths)
        in_chunks(cut, backend, size)
        assert all(torch.equal(bits(a), bits(b)) for a, b in zip(cut.outputs(), whole, strict=True)), size
        assert torch.equal(bits(cut.recurrent()), bits(right.recurrent())), size
    alone = Scene(shape, dtype, lengths)
    for row in reversed(alone.rows):
        alone.step(backend, [(row, len(row.qkvz))])
    assert all(torch.equal(bits(a), bits(b)) for a, b in zip(alone.outputs(), whole, strict=True))


def backends_for(shape: tuple[int, ...]) -> list[DeltaBackend]:
    made: list[DeltaBackend] = [TorchDelta(), InvariantDelta()]
    if kernels.interpreting() and shape in (SHAPES[2], KIMI[1]):
        made += [TritonDelta(), TritonInvariantDelta()]
    return [*made, CpuDelta()] if shape in (*CPU_SHAPES, *CPU_KIMI) else made


@pytest.mark.usefixtures("extension")
@mostly_slow("shape", [SHAPES[1], CPU_SHAPES[0], CPU_SHAPES[2], CPU_KIMI[1], SHAPES[2], KIMI[1]], 3)
def test_drafts_leave_a_state_for_each_token(shape: tuple[int, ...]) -> None:
    """Verify rows of different counts, cut back at random, end in the state of plain decoding."""
    for backend in backends_for(shape):
        lengths, prompts = [30, 24, 9, 28], [12, 3, 1, 20]
        plain, drafted = Scene(shape, torch.float32, lengths), Scene(shape, torch.float32, lengths)
        rng = random.Random(1)
        for scene in (plain, drafted):
            scene.step(backend, list(zip(scene.rows, prompts, strict=True)))
        while any(row.done < len(row.qkvz) for row in plain.rows):
            scene_rows = [row for row in plain.rows if row.done < len(row.qkvz)]
            plain.step(backend, [(row, 1) for row in scene_rows], each=True)
        kinds = set()
        while rows := [row for row in drafted.rows if row.done < len(row.qkvz)]:
            parts = [(row, rng.randint(1, min(COPIES, len(row.qkvz) - row.done))) for row in rows]
            drafted.step(backend, parts, each=True)
            for row, count in parts:
                drop = rng.randint(0, count - 1)
                kinds.add((count, drop))
                row.done, row.live = row.done - drop, row.live - drop
                del row.out[len(row.out) - drop :]
        assert len(kinds) > 6
        tolerance = 0.0 if backend.invariant else 1e-5
        for made, right in zip(drafted.outputs(), plain.outputs(), strict=True):
            assert (made - right).abs().max() <= tolerance * right.abs().max()
        difference = (drafted.recurrent() - plain.recurrent()).abs().max()
        assert difference <= tolerance * plain.recurrent().abs().max()


@pytest.mark.usefixtures("extension")
@mostly_slow("shape", [CPU_SHAPES[0], SHAPES[2], CPU_KIMI[1], KIMI[1]], 1)
@pytest.mark.parametrize("each", [False, True])
def test_only_the_rows_own_copies_are_written(each: bool, shape: tuple[int, ...]) -> None:
    for backend in backends_for(shape):
        scene = Scene(shape, torch.float32, [8, 5])
        scene.step(backend, [(scene.rows[0], 2), (scene.rows[1], 3)], each=each)
        check_written(scene, (2, 3), each)


@pytest.mark.usefixtures("extension")
@mostly_slow("shape", [CPU_SHAPES[0], SHAPES[2], CPU_KIMI[1], KIMI[1]], 1)
def test_a_new_sequence_starts_from_zeros(shape: tuple[int, ...]) -> None:
    for backend in backends_for(shape):
        scene = Scene(shape, torch.float32, [8])
        first = scene.whole(backend)
        row = scene.rows[0]
        for part in scene.state:
            part.fill_(float("inf"))
        row.done, row.live, row.out = 0, 3, []
        assert torch.equal(scene.whole(backend)[0], first[0])


@pytest.mark.usefixtures("extension")
@mostly_slow("shape", [CPU_SHAPES[0], CPU_KIMI[1]], 1)
def test_a_broken_row_spoils_itself_alone(shape: tuple[int, ...]) -> None:
    for backend in backends_for(shape):
        clean, broken = (Scene(shape, torch.float32, [20, 20, 30, 70]) for _ in range(2))
        right = clean.whole(backend)
        broken.rows[1].qkvz[7, 3] = NAN
        broken.rows[3].gates[65] = NAN
        made = broken.whole(backend)
        for number, (a, b) in enumerate(zip(made, right, strict=True)):
            since = {1: 7, 3: 65}.get(number, len(a))
            if backend.invariant:
                assert torch.equal(bits(a[:since]), bits(b[:since]))
            assert a[since:].isnan().any() == (since < len(a))
            assert number in (1, 3) or not a.isnan().any()


@pytest.mark.parametrize("backend", [TorchDelta(), InvariantDelta()], ids=["torch", "invariant"])
@pytest.mark.parametrize("count", [1, 3])
def test_rows_of_equal_counts_ask_the_host_nothing(
    backend: DeltaBackend, count: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The condition of a CUDA graph: no upload, and no read of a value."""

    def refused(array: Any, device: Any) -> Tensor:
        raise AssertionError("a copy from the host")

    class Guard(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            assert not any(word in func.name() for word in ("local_scalar", "nonzero", "unique"))
            return func(*args, **(kwargs or {}))

    monkeypatch.setattr(recurrent, "upload", refused)
    scene = Scene(SHAPES[0], lengths=[6, 6, 6])
    segment, qkvz, gates = scene.stage([(row, count) for row in scene.rows])
    out = torch.empty(len(qkvz), scene.spec.v_heads * scene.spec.v_dim, dtype=qkvz.dtype)
    with Guard():
        prepared = backend.prepare(segment, 0, state_cache(scene.spec), 64, qkvz.dtype)
        backend.run(
            scene.inputs(qkvz, gates), out, DeltaInput(segment, scene.state, scene.weights, True, prepared)
        )
    assert backend.capturable
    assert not out.isnan().any()


def test_segments_of_no_rows() -> None:
    scene = Scene(SHAPES[0], lengths=[2])
    scene.step(TorchDelta(), [])
    assert all(part.isnan().all() for part in scene.state), "no state is written"


# --- what is served ---


def full_spec(shape: tuple[int, ...]) -> ModelSpec:
    delta = make_spec(shape)
    return model_spec(caches=(state_cache(delta),), delta=delta)


@pytest.mark.requirement("B19")
@pytest.mark.parametrize(
    ("shape", "dtype", "device", "lacking"),
    [
        ((2, 4, 24, 64, 4), torch.float32, "cpu", "heads of 24"),
        ((2, 4, 64, 272, 4), torch.float32, "cpu", "heads of 272"),
        ((2, 4, 64, 64, 5), torch.float32, "cpu", "5 taps"),
        ((2, 4, 64, 64, 4), torch.float64, "cpu", "float64"),
        ((2, 4, 64, 64, 4), torch.float32, "cuda", "cuda"),
    ],
)
def test_what_the_cpu_form_lacks(
    shape: tuple[int, ...], dtype: torch.dtype, device: str, lacking: str
) -> None:
    spec = full_spec(shape)
    with pytest.raises(ConfigError, match=lacking):
        CpuDelta().check(spec.caches[0], spec, 64, dtype, torch.device(device))


@pytest.mark.usefixtures("extension")
@pytest.mark.parametrize(
    ("shape", "dtype", "invariant", "chosen"),
    [
        (CPU_SHAPES[0], torch.bfloat16, False, CpuDelta),
        (CPU_SHAPES[0], torch.float32, True, CpuDelta),
        (CPU_SHAPES[0], torch.float64, False, TorchDelta),
        (CPU_SHAPES[0], torch.float64, True, InvariantDelta),
        (SHAPES[1], torch.float32, False, TorchDelta),
        (SHAPES[1], torch.bfloat16, True, InvariantDelta),
    ],
)
def test_what_is_chosen(
    shape: tuple[int, ...], dtype: torch.dtype, invariant: bool, chosen: type[DeltaBackend]
) -> None:
    made = choose("auto", full_spec(shape), dtype, torch.device("cpu"), 64, invariant=invariant)
    assert type(made["delta"]) is chosen


@pytest.mark.usefixtures("extension")
def test_rows_that_do_not_fit_are_refused() -> None:
    scene = Scene(CPU_SHAPES[0], torch.float32, [9])
    with pytest.raises(RuntimeError, match="5 tokens and 4 copies"):
        scene.step(CpuDelta(), [(scene.rows[0], 5)], each=True)
    scene.rows[0].slot = 99
    with pytest.raises(RuntimeError, match="slot 99"):
        scene.step(CpuDelta(), [(scene.rows[0], 2)])
