"""Exact tokens with a draft model: the tokens of the same requests without speculation, in float64."""

from __future__ import annotations

import threading
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import transformers

from tests.e0 import rig
from tests.e0.rig import Answer, make_engine, replaying, run
from tests.e0.test_eagle import arrivals
from tests.support.checkpoints import VOCAB, make_checkpoint
from tests.support.expert_groups import Leading, run_layout
from tests.support.ranks import on_ranks
from tests.support.slow import mostly_slow
from tests.support.slowness import deadline
from weft.common.errors import ConfigError
from weft.config.sections.all import Config, SpeculationSection
from weft.config.sizing.draft import draft_part, with_draft
from weft.config.spec import ModelSpec
from weft.engine.build import capturer
from weft.engine.core import EngineCore
from weft.engine.start import alone
from weft.models.drafted import DraftedModel
from weft.models.loader import load_model
from weft.ops import cpu
from weft.parallel.mesh import Mesh
from weft.runner.graphs.graphs import MOST_KEPT
from weft.runner.graphs.programs import capture_calls
from weft.types.layout import Layout

BATCH = 4
LONG = deadline(30.0)
DRAFTS = SpeculationSection(
    speculative_method="draft", num_speculative_tokens=3, speculative_adaptive=False, speculative_model="d"
)


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("drafts")


@cache
def small(root: Path) -> Path:
    """Return the folder of a small draft model."""
    torch.manual_seed(5)
    config = transformers.LlamaConfig(
        vocab_size=VOCAB,
        hidden_size=16,
        intermediate_size=24,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=2,
        initializer_range=0.3,
        max_position_embeddings=256,
    )
    transformers.LlamaForCausalLM(config).to(torch.float64).save_pretrained(root / "small")
    return root / "small"


@cache
def target(root: Path, shape: str) -> Path:
    return make_checkpoint(root, shape)


def spec_with(folder: Path, draft: Path) -> ModelSpec:
    return with_draft(rig.spec_of(folder), Config(), str(folder), str(draft))


def drafted(folder: Path, draft: Path, mesh: Mesh | None = None) -> Any:
    """Return the model of ``folder`` with the draft model of ``draft``."""
    spec = spec_with(folder, draft)
    both = [
        load_model(str(path), own, torch.float64, rig.CPU, progress=False, mesh=mesh)
        for path, own in ((folder, spec), (draft, draft_part(spec)))
    ]
    return DraftedModel(*both)


@cache
def plain(root: Path, shape: str) -> dict[int, list[int]]:
    """Return the tokens of ``arrivals`` without speculation."""
    engine, _ = make_engine(target(root, shape), max_num_seqs=1)
    answers = run(engine, arrivals())
    engine.close()
    return {number: answer.tokens for number, answer in answers.items()}


def check(root: Path, shape: str, answers: dict[int, Answer], first: int = 0) -> int:
    """Check the tokens. Return the number of accepted drafts."""
    for number, tokens in plain(root, shape).items():
        assert answers[first + number].tokens == tokens, number
    return sum(answer.accepted for answer in answers.values())


@mostly_slow(("depth", "chunk", "replayed"), [(1, 0, False), (2, 7, False), (2, 7, True)], [(2, 7, True)])
@mostly_slow(
    "shape", ["llama", "qwen2_windowed", "qwen3_moe", "deepseek_v3", "qwen3_next"], ["qwen2_windowed"]
)
def test_tokens_do_not_change(root: Path, shape: str, depth: int, chunk: int, replayed: bool) -> None:
    """In two rounds; the second round has cached prefixes."""
    engine, runner = make_engine(
        target(root, shape),
        model=drafted(target(root, shape), small(root)),
        speculation=DRAFTS,
        depth=depth,
        chunk=chunk,
        graphs=replaying(3) if replayed else None,
    )
    for first in (0, 1000):
        answers = run(engine, arrivals(first))
        check(root, shape, answers, first)
    assert any(answer.num_cached for answer in answers.values())
    assert sum(engine.stats().drafts)
    assert runner.deepest == depth
    assert (runner.drafter.captured is not None) == replayed
    assert not replayed or runner.drafter.captured.replayed > 0
    engine.close()


def test_an_equal_draft_model_is_always_right(root: Path) -> None:
    folder = target(root, "llama")
    engine, _ = make_engine(folder, model=drafted(folder, folder), speculation=DRAFTS, chunk=7)
    for first in (0, 1000):  # the second time behind cached prefixes
        greedy = [[one for one in turn if one.params.temperature == 0.0] for turn in arrivals(first)]
        answers = run(engine, greedy)
        for number, answer in answers.items():
            assert answer.tokens == plain(root, "llama")[number - first]
            # Only drafts behind the end of a sequence are wasted.
            assert (answer.accepted > 0, answer.rejected) == (True, 0)
    assert any(answer.num_cached for answer in answers.values())
    engine.close()


@pytest.mark.skipif(not cpu.load(), reason="the C++ operations are not built")
def test_replayed_calls_draft_what_an_equal_model_says(root: Path) -> None:
    """All inputs of the captured calls are in fixed buffers, also for rows that change. The end of an epoch
    drops the captures."""
    folder = target(root, "llama")
    options = replace(replaying(3), capture=capture_calls, exact=True)
    engine, runner = make_engine(folder, model=drafted(folder, folder), speculation=DRAFTS, graphs=options)
    captured = runner.drafter.captured
    for first in (0, 1000):
        greedy = [[one for one in turn if one.params.temperature == 0.0] for turn in arrivals(first)]
        for number, answer in run(engine, greedy).items():
            assert answer.tokens == plain(root, "llama")[number - first]
            assert (answer.accepted > 0, answer.rejected) == (True, 0)
    assert captured.replayed > 1
    assert captured._capturing.most_kept == MOST_KEPT // 4, "each capture has the calls of four passes"
    runner.reset()
    assert not captured._replays
    engine.close()


@pytest.mark.slow
def test_the_preempted_begin_again(root: Path) -> None:
    folder = target(root, "qwen3_moe")
    model = drafted(folder, small(root))
    engine, _ = make_engine(
        folder, model=model, speculation=DRAFTS, depth=2, chunk=5, blocks=20, max_num_seqs=4
    )
    answers = run(engine, arrivals(filler=True))
    check(root, "qwen3_moe", answers)
    assert engine.stats().preemptions > 0
    engine.close()


@mostly_slow("shape", ["llama", "deepseek_v3"], ["llama"])
def test_over_ranks(root: Path, shape: str) -> None:
    folder = target(root, shape)
    draft = folder if shape == "llama" else small(root)
    whole = plain(root, shape)

    def make(mesh: Mesh) -> tuple[Any, Any]:
        model = drafted(folder, draft, mesh)
        return make_engine(folder, model=model, launcher=mesh.launcher, speculation=DRAFTS, depth=2, chunk=16)

    (replica,) = run_layout(Layout(tensor=2), make, Leading, [arrivals()])
    assert {number: replica.answers[number].tokens for number in whole} == whole
    accepted = sum(answer.accepted for answer in replica.answers.values())
    assert accepted > 0 or shape != "llama"


@pytest.mark.slow
@pytest.mark.skipif(not cpu.load(), reason="the C++ operations are not built")
def test_replayed_calls_over_ranks(root: Path) -> None:
    """Captured drafts name the collectives of one epoch. The next epoch captures drafts again."""
    folder = target(root, "llama")
    formed, store = threading.Barrier(2), dist.HashStore()

    def work(mesh: Mesh) -> tuple[list[int], list[dict[int, list[int]]]]:
        torch.set_num_threads(1)
        model = drafted(folder, folder, mesh)
        options = replace(replaying(3), capture=capturer(model), exact=True)
        engine, runner = make_engine(
            folder, model=model, launcher=mesh.launcher, speculation=DRAFTS, graphs=options
        )
        made = [run(engine, arrivals(first)) for first in (0, 1000, 2000)]
        replayed = [runner.drafter.captured.replayed]
        mesh.abort()
        formed.wait(LONG)
        runner.reset()
        mesh.connect(store, 1, LONG)
        again = EngineCore(engine.config, runner=alone(runner.kv, lambda kv: runner))
        made += [run(again, arrivals(first)) for first in (0, 1000, 2000)]
        replayed.append(runner.drafter.captured.replayed - replayed[0])
        runner.close()
        return replayed, [{n: one.tokens for n, one in answers.items()} for answers in made]

    for replayed, rounds in on_ranks(Layout(tensor=2), work, LONG):
        assert min(replayed) > 1
        for tokens in rounds:
            assert all(tokens[n] == plain(root, "llama")[n % 1000] for n in tokens)


def test_what_cannot_draft(root: Path, tmp_path: Path) -> None:
    folder = target(root, "llama")
    with pytest.raises(ConfigError, match="cache of kind state"):
        spec_with(folder, target(root, "qwen3_next"))
    config = transformers.LlamaConfig(
        vocab_size=VOCAB + 7,
        hidden_size=16,
        intermediate_size=24,
        num_hidden_layers=1,
        num_attention_heads=2,
    )
    transformers.LlamaForCausalLM(config).save_pretrained(tmp_path / "other")
    with pytest.raises(ConfigError, match="'other' has another vocabulary than 'llama'"):
        spec_with(folder, tmp_path / "other")
