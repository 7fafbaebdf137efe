"""Videos whose frame groups share rope positions, or whose frames are averaged, with all features, also
between groups, in float64."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import pytest

from tests.composition import seeing
from tests.composition.references import tokens_are_those_alone
from tests.composition.rig import MAX_LEN, VOCAB
from tests.composition.test_declared import EVERYTHING, OTHERS, Case
from tests.composition.test_whole_images import _moves
from tests.support.seen import Seen
from tests.support.vision_models import Clip, make_prompt
from weft.bench.bench_tokenizer import write_tokenizer
from weft.config.families import load_spec

NAMES = ["qwen2-5-vl", "qwen2-vl", "kimi-k25"]


def _prompts(folder: Path) -> list[dict[str, Any]]:
    """Return prompts of text, videos, and images beside videos.

    Some show the same frames at another rate, or the same first frames. The last three share their first
    blocks.
    """
    spec = load_spec(str(folder))

    def seen(parts: list[Any], seed: int) -> Seen:
        return Seen(make_prompt(parts, spec, seed))

    first = seen([21, Clip(4, 2, 3), 14], 1)
    turn = seen([9, Clip(6, 2, 2, fps=1.0), 4, (1, 5), 3], 2)
    second = turn.then([7, 8, 9], seen([2, Clip(3, 2, 3), 3], 1))
    shown = [
        first,
        first.with_images_of(seen([21, Clip(4, 2, 3), 14], 11)),
        seen([21, Clip(4, 2, 3, fps=0.3), 14], 1),
        seen([21, Clip(8, 2, 3), 5], 1),
        seen([(2, 3), Clip(5, 3, 2, fps=8.0), 1, Clip(2, 1, 4), 12], 3),
        turn,
        second,
        second.then([1, 2], seen([2, (3, 2), 2], 8)),
    ]
    assert all(len(one.ids) <= 96 for one in shown), [len(one.ids) for one in shown]
    text: list[dict[str, Any]] = [{"prompt_token_ids": [4, 4, 8] * 7}]
    return text + [{"prompt_token_ids": one.ids, "media": list(one.media)} for one in shown]


@pytest.fixture
def folder(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return a checkpoint of ``name``, whose prompts are those of this module."""
    monkeypatch.setitem(seeing.FAMILIES, name, (name, {}))
    seeing.make_seeing(tmp_path, name)
    write_tokenizer(tmp_path, VOCAB, MAX_LEN, vision=True)
    monkeypatch.setattr(seeing, "prompts", cache(_prompts))
    return tmp_path


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("case", [EVERYTHING, {**OTHERS, "kv": "auto"}], ids=["everything", "others"])
def test_tokens_are_those_of_each_sequence_alone(name: str, case: Case, folder: Path) -> None:
    assert tokens_are_those_alone(folder, case).stats.image_hits > 0


@pytest.mark.slow
@pytest.mark.parametrize("encoders", [0, 2])
@pytest.mark.parametrize("name", NAMES)
def test_prefill_decode_and_encode_groups(name: str, encoders: int, folder: Path) -> None:
    """Two encode groups share the frame groups of one video."""
    case = {**EVERYTHING, "blocks": "larger", "ranks": (1, 1), "overlap": False, "encoders": encoders}
    _moves(folder, case)


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES[:1])
def test_two_ranks_take_embeddings(name: str, folder: Path) -> None:
    case = {**EVERYTHING, "blocks": "smaller", "ranks": (2, 1), "overlap": True, "encoders": 2, "chunk": 0}
    _moves(folder, case)
