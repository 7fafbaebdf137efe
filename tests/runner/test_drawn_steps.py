"""Recorded steps that sample: one call replaces sampling, history and lengths."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.e0.rig import run, submit
from tests.e1.rig import make_checkpoint, make_engine
from weft.config.sections.all import SpeculationSection
from weft.ops import cpu
from weft.ops.cpu import sampling
from weft.types.sampling import TokenParams

pytestmark = pytest.mark.skipif(not cpu.load(), reason="the C++ operations are not built")

SLOTS, VOCAB, LENGTH = 7, 1000, 40
GREEDY = TokenParams(temperature=0.0, max_tokens=9)
SAMPLED = TokenParams(temperature=0.8, min_p=0.02, max_tokens=12)


class Table:
    """The slot tensors that a step reads and writes."""

    def __init__(self) -> None:
        drawn = torch.Generator().manual_seed(3)
        self.history = torch.randint(VOCAB, (SLOTS + 1, LENGTH), generator=drawn, dtype=torch.int32)
        self.computed = torch.tensor([5, 0, 38, 11, 7, 20, 3, 0])
        self.live = torch.ones(SLOTS + 1, dtype=torch.int64)
        floats = torch.rand(SLOTS, 6, generator=drawn, dtype=torch.float64) + 0.3
        floats[::2, 0] = 0.0
        floats[:, 2] = torch.tensor([0.0, 0.1, 0.0, 0.0, 0.05, 0.3, 0.0])
        ints = torch.randint(1 << 40, (SLOTS, 6), generator=drawn)
        self.columns = (floats[:, 0], floats[:, 2], ints[:, 4] - (1 << 39), ints[:, 5] % 5)

    def end(self, logits: torch.Tensor, slots: torch.Tensor, moves: bool = True) -> Any:
        live = self.live if moves else None
        return sampling.end_decode(logits, slots, VOCAB, self.columns, self.history, self.computed, live)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_one_call_does_what_several_do(dtype: torch.dtype) -> None:
    """Greedy and sampled rows, one row that is not finite, slots in any order. Other slots stay unchanged."""
    table, before = Table(), Table()
    slots = torch.tensor([3, 0, 5, 1, 6])
    logits = (3 * torch.randn(len(slots), VOCAB + 24, generator=torch.Generator().manual_seed(1))).to(dtype)
    logits[2, 17] = float("nan")
    tokens, error = table.end(logits, slots)
    temperature, min_p, seed, choice = (column[slots] for column in before.columns)
    position = before.computed[slots] + 1
    for row, slot in enumerate(slots.tolist()):
        one = torch.tensor([row])
        if temperature[row] < 1e-5:
            token, wrong = sampling.greedy(logits, one, VOCAB)
        else:
            columns = (column[one] for column in (temperature, min_p, seed, choice, position))
            token, wrong = sampling.sample(logits, one, VOCAB, *columns)
        assert error[row] == wrong[0] == (row == 2)
        expected = 0 if wrong[0] else int(token[0])
        assert tokens[row] == expected
        before.history[slot, position[row]] = expected
        before.computed[slot] += 1
        before.live[slot] = 0
    for one, other in ((table.history, before.history), (table.computed, before.computed)):
        assert torch.equal(one, other)
    assert torch.equal(table.live, before.live)


def test_without_states_none_move() -> None:
    table = Table()
    table.end(torch.randn(1, VOCAB), torch.tensor([4]), moves=False)
    assert table.live.tolist() == [1] * (SLOTS + 1)


@pytest.mark.parametrize(("slot", "words"), [(7, "slot 7"), (-1, "slot -1"), (2, "full")])
def test_nothing_changes_where_a_slot_cannot_be(slot: int, words: str) -> None:
    table, before = Table(), Table()
    table.computed[2] = before.computed[2] = LENGTH - 1
    with pytest.raises(RuntimeError, match=words):
        table.end(torch.randn(2, VOCAB), torch.tensor([0, slot]))
    assert torch.equal(table.history, before.history)
    assert torch.equal(table.computed, before.computed)


@pytest.fixture(scope="module", params=["qwen3_moe", "qwen3_next"])
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("drawn"), request.param)


def answers(
    folder: Path, replay: bool, speculation: SpeculationSection | None = None, **more: Any
) -> tuple[Any, set[bool]]:
    """Return (tokens of four sequences, set of whether steps sampled in the recording)."""
    engine, runner = make_engine(
        folder, "float32", "cpp", max_num_seqs=4, replay=replay, depth=2, speculation=speculation
    )
    asked = [GREEDY, SAMPLED, TokenParams(temperature=0.5, max_tokens=15, **more), GREEDY]
    made = run(engine, [[submit(i, [5 + i, 6, 7], one, request=i) for i, one in enumerate(asked, 1)]])
    drew = set() if runner.graphs is None else {key.ends for key in runner.graphs._replays}
    engine.close()
    return made, drew


def test_steps_draw_where_all_rows_can(folder: Path) -> None:
    """Two steps are in flight. The tokens equal those of eager steps."""
    made, drew = answers(folder, True)
    assert drew == {True}
    assert made == answers(folder, False)[0]


@pytest.mark.parametrize("more", [{"top_k": 5}, {"top_p": 0.7}, {"logprobs": 2}, {"frequency_penalty": 0.4}])
def test_steps_with_rows_that_need_more_are_sampled_as_ever(folder: Path, more: dict[str, Any]) -> None:
    made, drew = answers(folder, True, **more)
    assert False in drew, "while the third sequence runs"
    assert made == answers(folder, False, **more)[0]


def test_steps_draw_beside_a_drafter_that_rests(folder: Path) -> None:
    """Steps sample in the recording where no row has drafts. Other steps use the usual sampler."""
    adaptive = SpeculationSection(speculative_method="ngram", num_speculative_tokens=2)
    made, drew = answers(folder, True, adaptive)
    assert True in drew
    plain = {request: answer.tokens for request, answer in answers(folder, False)[0].items()}
    assert {request: answer.tokens for request, answer in made.items()} == plain
    always = SpeculationSection(
        speculative_method="ngram", num_speculative_tokens=2, speculative_adaptive=False
    )
    drafted, _ = answers(folder, True, always)
    assert {request: answer.tokens for request, answer in drafted.items()} == plain
