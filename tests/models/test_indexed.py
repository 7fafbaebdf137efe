"""DeepSeek V3.2 and GLM-5: coverage of the cases in tests/support/sparse_models.py, and special features.

Parity with transformers is in test_parity.py.
"""

from __future__ import annotations

import json
import random
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support.slow import mostly_slow
from tests.support.sparse_models import watch_cuts
from weft.attention.sparse import sparse_torch
from weft.common.errors import ConfigError
from weft.config.families import load_spec

EXACT = {"rtol": 1e-12, "atol": 1e-12}
NAMES = ["deepseek-v32", "glm-dsa"]
VOCAB = 131


def _ids(count: int, seed: int) -> list[int]:
    made = random.Random(seed)
    return [made.randrange(VOCAB) for _ in range(count)]


def _run(harness: Any, ids: list[int], chunk: int, prompt: int) -> torch.Tensor:
    sequence = harness.sequence(ids)
    while sequence.computed < prompt:
        harness.step([(sequence, min(chunk, prompt - sequence.computed))])
    while sequence.computed < len(ids):
        harness.step([], [(sequence, 1)])
    return torch.stack(sequence.logits)


def test_what_the_cases_cover(checkpoints: Any) -> None:
    own = load_spec(checkpoints("deepseek-v32").folder, None)
    assert own.index is not None
    assert (own.index.layers, own.index.top, own.index.interleaved) == ((0, 1, 2), 7, False)
    assert [(cache.layers, cache.width) for cache in own.caches] == [((0, 1, 2), 24 + 8 + 12)]
    shared = load_spec(checkpoints("glm-dsa").folder, None)
    assert shared.index is not None
    assert shared.index.interleaved
    assert [(c.layers, c.width) for c in shared.caches] == [((0, 2), 24 + 8 + 12), ((1, 3), 24 + 8)]
    assert shared.moe is not None
    assert shared.moe.groups == 1


@mostly_slow("name", NAMES, NAMES[:1])
def test_chunks_tiles_and_drafts_do_not_show(
    name: str, checkpoints: Any, paged: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = checkpoints(name).load(torch.float64)
    ids = _ids(60, 1)
    margins = watch_cuts(monkeypatch)
    whole = _run(paged(model), ids, 60, 60)
    assert min(margins) > 1e-6, "a choice near a tie: choose another seed"
    for chunk, prompt in ((1, 60), (7, 60), (16, 40), (60, 3)):
        assert torch.allclose(_run(paged(model, seed=chunk), ids, chunk, prompt), whole, **EXACT)
    harness, rng = paged(model, seed=9), random.Random(2)
    sequence, other = harness.sequence(ids), harness.sequence(_ids(200, 3))
    harness.step([(sequence, 11)])
    while sequence.computed < len(ids):
        drafts = min(4, len(ids) - sequence.computed - 1)
        wrong = rng.randint(0, drafts)
        at = sequence.computed + 1 + drafts - wrong
        sequence.ids[at : at + wrong] = [(t + 1) % VOCAB for t in ids[at : at + wrong]]
        harness.step([(other, 5)], [(sequence, 1 + drafts)])
        harness.reject(sequence, wrong)
        sequence.ids[:] = ids
    assert torch.allclose(torch.stack(sequence.logits), whole, **EXACT)
    for limit, value in (("TILE", 5), ("SCORES", 64), ("GATHER", 64)):
        monkeypatch.setattr(sparse_torch, limit, value)
        assert torch.allclose(_run(paged(model), ids, 50, 50), whole, **EXACT)


def test_who_has_an_indexer(checkpoints: Any, tmp_path: Path) -> None:
    def layers(**changes: Any) -> tuple[int, ...]:
        index = load_spec(_configured(checkpoints("glm-dsa").folder, tmp_path, **changes), None).index
        assert index is not None
        return index.layers

    assert layers(indexer_types=None, index_topk_pattern="FSSF") == (0, 3)
    assert layers(indexer_types=None, index_topk_freq=2, index_skip_topk_offset=1) == (0, 2)
    assert layers(indexer_types=None) == (0, 1, 2, 3)


def _configured(folder: str, target: Path, **changes: Any) -> str:
    """Copy a checkpoint with changed fields of config.json; None removes a field. Return the folder."""
    shutil.copytree(folder, target, dirs_exist_ok=True)
    path = target / "config.json"
    config = {**json.loads((Path(folder) / "config.json").read_text()), **changes}
    path.write_text(json.dumps({k: v for k, v in config.items() if v is not None}))
    return str(target)


@pytest.mark.parametrize(
    ("name", "field", "value"),
    [
        ("deepseek-v32", "layer_types", ["full_attention"] * 3),
        ("deepseek-v32", "mlp_layer_types", ["sparse"] * 3),
        ("deepseek-v32", "index_head_dim", 4),
        ("glm-dsa", "indexer_types", ["shared", "full", "full", "full"]),
        ("glm-dsa", "indexer_types", ["full"]),
        ("glm-dsa", "n_group", None),
    ],
)
def test_what_would_be_served_wrongly_is_refused(
    name: str, field: str, value: Any, checkpoints: Any, tmp_path: Path
) -> None:
    folder = _configured(checkpoints(name).folder, tmp_path, **{field: value})
    with pytest.raises(ConfigError, match=field):
        load_spec(folder, None)
