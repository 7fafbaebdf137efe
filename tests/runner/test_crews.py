"""Threads run through the loops of a captured step together: equal bits, and fewer barriers."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.attention.test_mamba_cpu import SHAPES
from tests.attention.test_mixers import Scene
from tests.e0.rig import run
from tests.e1.rig import make_checkpoint, make_engine, requests_of_lengths
from tests.support.allocated import most_allocated
from tests.support.ggml_blocks import drawn
from tests.support.slow import mostly_slow
from weft.attention.mamba.mamba_cpu import CpuMamba
from weft.ops import coded, cpu
from weft.ops.cpu import linear
from weft.runner.graphs.programs import capture_calls

pytestmark = pytest.mark.skipif(not cpu.load(), reason="the C++ operations are not built")

Tensor = torch.Tensor
CUT = 0
"""Bytes of a product for one thread, so small that every product is split."""


@pytest.fixture(autouse=True)
def _as_before() -> Iterator[None]:
    threads = torch.get_num_threads()
    yield
    torch.set_num_threads(threads)
    torch.ops.weft_cpu.set_crews.default(True)


@pytest.fixture(
    scope="module",
    params=[
        *("qwen2_mixed", "qwen3_moe", "gpt_oss", "deepseek_v3", "qwen3_next", "deepseek_v4", "bamba"),
        "falcon_mamba",
    ],
)
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("crews"), request.param)


def _bits(folder: Path, threads: int) -> dict[Any, Any]:
    torch.set_num_threads(threads)
    engine, runner = make_engine(folder, "bfloat16", "cpp", max_num_seqs=4, replay=True)
    run(engine, [requests_of_lengths(5)])
    engine.close()
    return runner.bits


@mostly_slow("threads", [2, 3], [2])
def test_an_engine_gives_the_same_bits_with_any_number_of_threads(folder: Path, threads: int) -> None:
    alone = _bits(folder, 1)
    torch.ops.weft_cpu.set_crews.default(True, CUT)
    together = _bits(folder, threads)
    assert together.keys() == alone.keys()
    assert all(torch.equal(together[key][0], rows[0]) for key, rows in alone.items())


class _Chain:
    """Products, norms and a routed sum, each on the previous result. ``rows``: number of rows of x."""

    def __init__(self, rows: int) -> None:
        made = torch.Generator().manual_seed(rows)
        weight = torch.randn(768, 768, generator=made).bfloat16() / 28
        blocks = {kind: torch.from_numpy(drawn(kind, 384, 768)) for kind in ("Q4_K", "Q6_K")}
        mixed = coded.MixedCodes(parts=tuple(coded.of_blocks(kind, raw) for kind, raw in blocks.items()))
        self.x = torch.randn(rows, 768, generator=made).bfloat16()
        self.out = torch.zeros(rows, 768).bfloat16()
        self.matrices = [linear.pack(weight), linear.pack_int8(weight), linear.pack_int4(weight)]
        self.matrices.append(linear.pack_codes(mixed))
        self.ups = linear.pack_gated(torch.randn(1536, 768, generator=made).bfloat16() / 28)
        self.norm = torch.ones(768).bfloat16()

    def run(self) -> None:
        ops = torch.ops.weft_cpu
        stream = self.x.clone()
        rows = ops.rms_norm.default(stream, self.norm, 1e-6)
        for matrix in self.matrices:
            rows = linear.gated_linear(linear.linear(rows, matrix), self.ups, None, "silu")
            rows = ops.add_rms_norm_.default(stream, rows, self.norm, 1e-6)
        half = rows[:, 384:].contiguous()  # read at once: deferred work must end first
        rows = torch.cat([half, rows[:, :384]], dim=1)
        self.out.copy_(linear.linear(rows, self.matrices[0]))


@pytest.mark.parametrize("threads", [2, 5])
@pytest.mark.parametrize("rows", [1, 4, 40])
def test_every_replay_gives_the_same_bits(rows: int, threads: int) -> None:
    """Threads may come late or never run, on a machine with fewer cores."""
    chain = _Chain(rows)
    with torch.inference_mode():
        torch.set_num_threads(1)
        chain.run()
        expected = chain.out.clone()
        torch.set_num_threads(threads)
        again = capture_calls(chain.run)
        for _ in range(60):
            chain.out.fill_(float("nan"))
            again()
            assert torch.equal(chain.out, expected)


def _meetings(again: Callable[[], None]) -> int:
    torch.ops.weft_cpu.take_waits.default()
    again()
    meetings, waited = torch.ops.weft_cpu.take_waits.default()
    assert waited >= 0
    return int(meetings)


def test_threads_meet_once_a_loop() -> None:
    """A step has a barrier at the start, at the end, and after each product; norms have no barrier.

    Without a crew each product has a barrier at the start and at the end.
    """
    chain = _Chain(1)
    torch.set_num_threads(2)
    with torch.inference_mode():
        again = capture_calls(chain.run)
        assert _meetings(again) == 2 + 1 + 2 * len(chain.matrices) + 1  # the first norm has no job before it
        torch.ops.weft_cpu.set_crews.default(False)
        assert _meetings(again) == 2 * (2 * len(chain.matrices) + 1 + 1)  # the mixed matrix counts as two


def test_a_call_that_fails_leaves_a_program_that_runs() -> None:
    """Deferred work before the failure ends, and nothing is left for the next run."""
    chain = _Chain(2)
    ids, table = torch.tensor([1]), linear.pack(torch.randn(64, 768).bfloat16())

    def calls() -> None:
        chain.run()
        chain.out.add_(linear.embedding(ids, table))

    torch.set_num_threads(2)
    with torch.inference_mode():
        again = capture_calls(calls)
        expected = chain.out.clone()
        for _ in range(3):
            ids.fill_(77)
            with pytest.raises(IndexError, match="id 77"):
                again()
            ids.fill_(1)
            again()
            assert torch.equal(chain.out, expected)


def test_attention_over_many_positions() -> None:
    """The pieces of an attention call are divided over threads, and joined."""
    made = torch.Generator().manual_seed(1)
    cache = torch.randn(300, 2, 2, 16, 64, generator=made).bfloat16()
    q = torch.randn(2, 8, 64, generator=made).bfloat16()
    out, offsets = torch.empty_like(q), torch.arange(3, dtype=torch.int32)
    starts, table = torch.tensor([4700, 3001]), torch.arange(300).repeat(2, 1)
    sinks = torch.randn(8, generator=made).bfloat16()

    def attend() -> None:
        torch.ops.weft_cpu.attend.default(q, out, cache, offsets, starts, table, 0, 0.125, 0, sinks)

    with torch.inference_mode():
        torch.set_num_threads(1)
        attend()
        expected = out.clone()
        for threads in (2, 4):
            torch.set_num_threads(threads)
            again = capture_calls(attend)
            for _ in range(20):
                out.fill_(float("nan"))
                again()
                assert torch.equal(out, expected)
        assert _meetings(again) == 2 + 2


def test_memory_of_a_recurrence_is_released_during_the_step() -> None:
    """Scratch of 40 layers is 40 MiB, and a step may retain 1 MiB for pending loops."""
    scene, backend = Scene(SHAPES["published"], torch.bfloat16, [1] * 256), CpuMamba()
    segment, x = scene.stage([(row, 1) for row in scene.rows])
    given, out = scene.given(backend, segment, True), torch.empty(256, scene.columns).bfloat16()
    torch.set_num_threads(2)
    with torch.inference_mode():
        again = capture_calls(lambda: [backend.run(x, out, given) for _ in range(40)])
        assert most_allocated(again) < 8 << 20
