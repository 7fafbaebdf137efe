"""Captured calls do the work of the captured function."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.e0.rig import run, submit
from tests.e1.rig import make_checkpoint, make_engine, requests_of_lengths
from tests.support.slow import mostly_slow
from weft.ops import cpu
from weft.runner.graphs.programs import CannotCapture, capture_calls
from weft.types.sampling import TokenParams

pytestmark = pytest.mark.skipif(not cpu.load(), reason="the C++ operations are not built")

FAMILIES = [
    *("qwen2_mixed", "qwen3_moe", "gpt_oss", "deepseek_v3", "deepseek_v32", "deepseek_v4"),
    *(pytest.param(shape, marks=pytest.mark.slow) for shape in ("bamba", "glm_dsa")),
]


def test_every_kind_of_argument_and_result() -> None:
    """Views, lists with None, numbers as tensors, several results, dtypes, and writes in place."""
    x, table, out = torch.arange(12.0).view(3, 4), torch.randn(9, 2), torch.zeros(3, 6)
    index = torch.tensor([0, 4, 8])

    def run() -> None:
        half, rest = x.max(dim=1)
        chosen = table[index]
        wide = torch.cat([chosen, x[:, 1:3] * 2 + 1, half.unsqueeze(1), rest.float().view(3, 1)], dim=1)
        wide.add_(torch.full_like(wide, 0.5))
        block = torch.div(index, 4, rounding_mode="floor").to(torch.int64)
        out.copy_(torch.where(block.unsqueeze(1) > 0, wide.permute(0, 1), -wide))
        out[:, 0] = table[index, torch.zeros(3, dtype=torch.int64)]

    with torch.inference_mode():
        again = capture_calls(run)
        for seed in range(3):
            x.copy_(torch.randn(3, 4, generator=torch.Generator().manual_seed(seed)))
            index.copy_(torch.tensor([seed, 7 - seed, 3]))
            run()
            expected = out.clone()
            out.fill_(float("nan"))
            again()
            assert torch.equal(out, expected)


def test_memory_of_what_nobody_reads_is_given_back() -> None:
    """A result that is read again later stays equal. The last value of a register is not kept."""
    x, out = torch.ones(4), torch.zeros(4)
    made: list[Any] = []

    def run() -> None:
        first = x + 1
        second = first * 3
        out.copy_(second + first)

    again = capture_calls(run)
    x.fill_(5)
    again()
    assert out.tolist() == [24.0] * 4
    assert not made


def test_a_call_that_fails_leaves_a_program_that_runs() -> None:
    ids, table, out = torch.tensor([1]), torch.randn(3, 2), torch.zeros(1, 2)

    def run() -> None:
        out.copy_(torch.nn.functional.embedding(ids, table) + 1)

    again = capture_calls(run)
    ids.fill_(77)
    with pytest.raises(IndexError):
        again()
    ids.fill_(2)
    again()
    assert torch.equal(out[0], table[2] + 1)


def test_uncapturable_calls_are_refused() -> None:
    x = torch.ones(4)
    with pytest.raises(CannotCapture):
        capture_calls(lambda: x.sum().item())


def test_lists_of_tensors() -> None:
    """Operators that split, unbind or compute with lists; some tensors of the lists are never read."""
    x, out = torch.zeros(3, 6), torch.zeros(3, 4)

    def run() -> None:
        first, _, last = x.split((2, 3, 1), dim=1)
        left, right = x.chunk(2, dim=1)
        wide = torch.stack((left, right)).unbind(0)[1] + torch._foreach_add([left, right], 2.0)[0]
        out.copy_(torch.cat((wide[:, :1] * last, first, wide[:, 2:]), dim=1))

    with torch.inference_mode():
        again = capture_calls(run)
        for seed in range(3):
            x.copy_(torch.randn(3, 6, generator=torch.Generator().manual_seed(seed)))
            run()
            expected = out.clone()
            out.fill_(float("nan"))
            again()
            assert torch.equal(out, expected)


def test_a_list_of_another_length_is_refused() -> None:
    x, out = torch.tensor([1.0, 0.0, 2.0]), torch.zeros(1)
    again = capture_calls(lambda: out.copy_(x.nonzero().split(1)[0].view(1)))
    x.fill_(1.0)
    with pytest.raises(RuntimeError, match=r"split made 3 tensors, and 2 when it was captured"):
        again()
    x[1] = 0.0
    again()
    assert out.tolist() == [0.0]


@pytest.fixture(scope="module", params=FAMILIES)
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("programs"), request.param)


def _answers(
    folder: Path, *, replay: bool, dtype: str = "bfloat16", broken: bool = False, kv_cache_dtype: Any = "auto"
) -> Any:
    """Return (logits by seed and position, replayed steps) of five sequences of different lengths."""
    engine, runner = make_engine(
        folder, dtype, "cpp", max_num_seqs=4, replay=replay, kv_cache_dtype=kv_cache_dtype
    )
    if broken:
        assert runner.graphs is not None
        runner.graphs._options = replace(runner.graphs._options, capture=_refuse)
    asked = requests_of_lengths(5)
    run(engine, [asked])
    engine.close()
    return runner.bits, runner.graphs.replayed if runner.graphs is not None else 0


def test_steps_are_cold_until_they_are_replayed(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Captured decode steps took longer than later steps will. The cost model does not learn from these
    steps."""
    engine, runner = make_engine(folder, "float32", "cpp", max_num_seqs=4, replay=True)
    seen: list[tuple[int, bool]] = []
    before = [0]

    def observe(plan: Any, seconds: float, uncaptured: bool) -> None:
        replayed = runner.graphs.replayed - before[0]
        before[0] = runner.graphs.replayed
        if not plan.prefill.rows:
            assert uncaptured == (replayed == 0)
        seen.append((plan.prefill.rows, uncaptured))

    monkeypatch.setattr(engine.scheduler, "observe", observe)
    run(engine, [[submit(1, [1, 2, 3], TokenParams(temperature=0.0, max_tokens=8), request=1)]])
    engine.close()
    assert [uncaptured for rows, uncaptured in seen if rows] == [False]
    assert [uncaptured for rows, uncaptured in seen if not rows] == [True] + [False] * (len(seen) - 2)


def _refuse(run: Any) -> Any:
    run()
    raise CannotCapture("it must not be")


def _assert_same(made: Any, expected: Any) -> None:
    assert made.keys() == expected.keys()
    assert all(torch.equal(made[key][0], rows[0]) for key, rows in expected.items())


@mostly_slow("dtype", ["bfloat16", "float32"], ["bfloat16"])
def test_an_engine_gives_the_same_bits(folder: Path, dtype: str) -> None:
    made, replayed = _answers(folder, replay=True, dtype=dtype)
    expected, none = _answers(folder, replay=False, dtype=dtype)
    _assert_same(made, expected)
    assert replayed > 10
    assert none == 0


@pytest.mark.slow
@pytest.mark.parametrize("shape", ["deepseek_v32", "deepseek_v4", "glm_dsa"])
def test_caches_in_8_bits_give_the_same_bits(shape: str, tmp_path: Path) -> None:
    folder = make_checkpoint(tmp_path, shape)
    made, replayed = _answers(folder, replay=True, kv_cache_dtype="fp8")
    _assert_same(made, _answers(folder, replay=False, kv_cache_dtype="fp8")[0])
    plain, _ = _answers(folder, replay=False)
    assert any(not torch.equal(rows[0], made[key][0]) for key, rows in plain.items() if key in made)
    assert replayed > 10


def test_an_engine_goes_on_without_what_cannot_be_captured(folder: Path) -> None:
    made, replayed = _answers(folder, replay=True, broken=True)
    _assert_same(made, _answers(folder, replay=False)[0])
    assert replayed == 0


def test_uncapturable_calls_run_once() -> None:
    """Calls behind the uncapturable call run once as well, and states are not moved twice."""
    x, seen = torch.zeros(4), []

    def run() -> None:
        x.add_(1)
        seen.append(x.sum().item())
        x.add_(1)

    with pytest.raises(CannotCapture):
        capture_calls(run)
    assert x.tolist() == [2.0] * 4
    assert seen == [4.0]


def test_facts_of_types_are_no_calls() -> None:
    x, out = torch.ones(4), torch.zeros(4, dtype=torch.float64)

    def run() -> None:
        out.copy_(x.to(torch.promote_types(x.dtype, torch.float64)) * 2)

    again = capture_calls(run)
    x.fill_(3)
    again()
    assert out.tolist() == [6.0] * 4
