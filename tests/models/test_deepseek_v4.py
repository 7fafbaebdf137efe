"""DeepSeek V4: coverage of the cases in tests/support/sparse_models.py, and special features.

Parity with transformers is in test_parity.py.
"""

from __future__ import annotations

import json
import random
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.support.slow import mostly_slow
from tests.support.sparse_models import watch_cuts
from weft.attention.sparse import compress, sparse_torch
from weft.common.errors import ConfigError
from weft.config.families import load_spec
from weft.config.spec import ModelSpec
from weft.models.loader import load_model

CPU = torch.device("cpu")
VOCAB = 131
EXACT = {"rtol": 1e-12, "atol": 1e-12}


def _ids(count: int, seed: int) -> list[int]:
    made = random.Random(seed)
    return [made.randrange(VOCAB) for _ in range(count)]


def _spec(name: str, checkpoints: Any) -> ModelSpec:
    return load_spec(checkpoints(name).folder, None)


def _run(harness: Any, ids: list[int], chunks: list[int]) -> torch.Tensor:
    """Logits of all positions: chunks of the prompt, then tokens one at a time."""
    sequence = harness.sequence(ids)
    for chunk in chunks:
        harness.step([(sequence, chunk)])
    while sequence.computed < len(ids):
        harness.step([], [(sequence, 1)])
    return torch.stack(sequence.logits)


def _chunks(total: int, size: int) -> list[int]:
    return [min(size, total - at) for at in range(0, total, size)]


def test_what_the_cases_cover(checkpoints: Any) -> None:
    whole = _spec("deepseek-v4", checkpoints)
    assert whole.sparse is not None
    assert whole.hyper is not None
    assert whole.moe is not None
    assert whole.sparse.types == ("window", "chosen", "all", "chosen")
    assert whole.moe.hash_layers == (0, 1)
    assert (whole.moe.scoring, whole.moe.shared, whole.moe.limit) == ("sqrtsoftplus", 24, 0.5)
    kinds = [(c.kind, c.layers, c.window, c.width, c.ratio, c.form) for c in whole.caches]
    assert kinds == [
        ("latent", (0, 1, 2, 3), 9, 16, 1, "sparse"),
        ("latent", (1, 3), 8, 4 * (16 + 12), 1, ""),
        ("compressed", (1, 3), 0, 16 + 12, 4, "sparse"),
        ("latent", (2,), 16, 2 * 16, 1, ""),
        ("compressed", (2,), 0, 16, 16, "sparse"),
    ]
    assert (whole.rope.dim, whole.rope.theta) == (8, 10000.0)
    assert whole.sparse.group_rope.theta == 160000.0
    yarn = _spec("deepseek-v4-chosen", checkpoints)
    assert yarn.sparse is not None
    assert (yarn.rope.kind, yarn.sparse.group_rope.kind) == ("default", "yarn")
    assert yarn.sparse.group_rope.attention_factor == 1.0
    assert _spec("deepseek-v4-window", checkpoints).tied
    odd = _spec("deepseek-v4-odd", checkpoints)
    assert odd.moe is not None
    assert odd.moe.scoring == "sigmoid"
    assert odd.hyper is not None
    assert (odd.hyper.streams, odd.hyper.iterations) == (4, 3)


@pytest.mark.requirement("B15")
def test_published_ratios_over_hundreds_of_positions(
    checkpoints: Any, paged: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Groups of 128 close, and far more groups of 4 are there than a token chooses."""
    checkpoint = checkpoints("deepseek-v4-long")
    ids = _ids(330, 1)
    margins = watch_cuts(monkeypatch)
    whole = _run(paged(checkpoint.load(), block_size=16), ids, [330])
    assert len(margins) > 200
    assert min(margins) > 1e-5, "a choice near a tie: choose another seed"
    expected = checkpoint.expected(ids)
    assert (whole - expected).abs().max() / expected.abs().max() < 1e-4
    exact = checkpoint.load(torch.float64)
    one = _run(paged(exact, block_size=16), ids, [330])
    for chunks in (_chunks(330, 100), [127, 1, 2, 120], [256]):
        assert torch.allclose(_run(paged(exact, block_size=16, seed=1), ids, chunks), one, **EXACT)


@pytest.mark.requirement("B15")
@mostly_slow("name", ["deepseek-v4", "deepseek-v4-odd"], ["deepseek-v4-odd"])
def test_chunks_of_any_size_equal_one_piece(
    name: str, checkpoints: Any, paged: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = checkpoints(name).load(torch.float64)
    ids = _ids(97, 2)
    margins = watch_cuts(monkeypatch)
    whole = _run(paged(model), ids, [97])
    assert min(margins) > 1e-6, "a choice near a tie: choose another seed"
    for size in (1, 7, 16, 64):
        assert torch.allclose(_run(paged(model, seed=size), ids, _chunks(97, size)), whole, **EXACT)
    decoded = _run(paged(model, block_size=5), ids, [1])
    assert torch.allclose(decoded, whole, **EXACT)


@pytest.mark.requirement("B16")
@pytest.mark.parametrize("name", ["deepseek-v4", "deepseek-v4-odd"])
def test_rejected_drafts_leave_nothing_behind(name: str, checkpoints: Any, paged: Any) -> None:
    """Wrong drafts that complete groups of every form, beside a prefill, have no effect after rejection."""
    model = checkpoints(name).load(torch.float64)
    ids = _ids(60, 3)
    plain = _run(paged(model), ids, [21])
    harness = paged(model, seed=7)
    sequence, other = harness.sequence(ids), harness.sequence(_ids(200, 4))
    harness.step([(sequence, 21)])
    rng = random.Random(5)
    while sequence.computed < len(ids):
        drafts = min(5, len(ids) - sequence.computed - 1)
        right = rng.randint(0, drafts)
        at = sequence.computed + 1 + right
        wrong = drafts - right
        sequence.ids[at : at + wrong] = [(t + 1) % VOCAB for t in ids[at : at + wrong]]
        harness.step([(other, 3)], [(sequence, 1 + drafts)])
        harness.reject(sequence, wrong)
        sequence.ids[:] = ids
    assert torch.allclose(torch.stack(sequence.logits), plain, **EXACT)


@pytest.mark.requirement("B16")
@pytest.mark.parametrize("name", ["deepseek-v4", "deepseek-v4-odd"])
def test_a_sequence_goes_on_from_anothers_blocks(name: str, checkpoints: Any, paged: Any) -> None:
    """On a prefix hit only entries within reach of windows remain, sources of groups included."""
    model = checkpoints(name).load(torch.float64)
    harness = paged(model, block_size=4)
    hit = 4 * max(harness.sizes) if name == "deepseek-v4" else 60
    assert all(hit % size == 0 for size in harness.sizes)
    first, second = _ids(hit + 30, 6), _ids(30, 7)
    donor = harness.sequence(first)
    harness.step([(donor, hit)])
    harness.slide(donor)
    heir = harness.sequence(first[:hit] + second)
    heir.computed = hit
    heir.logits = list(donor.logits)
    heir.first = list(donor.first)
    heir.tables = [
        [0] * begin + table[begin:] for table, begin in zip(donor.tables, donor.first, strict=True)
    ]
    assert any(begin > 0 for begin in heir.first)
    while heir.computed < len(heir.ids):
        harness.step([(heir, min(7, len(heir.ids) - heir.computed))])
    alone = _run(paged(model), heir.ids, [len(heir.ids)])
    assert torch.allclose(torch.stack(heir.logits), alone, **EXACT)


def test_small_tiles_give_the_same(checkpoints: Any, paged: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    model = checkpoints("deepseek-v4").load(torch.float64)
    ids = _ids(90, 8)
    whole = _run(paged(model), ids, [80])
    for module, name, value in (
        (sparse_torch, "TILE", 5),
        (sparse_torch, "SCORES", 64),
        (sparse_torch, "GATHER", 64),
        (compress, "GATHER", 1),
    ):
        monkeypatch.setattr(module, name, value)
        assert torch.allclose(_run(paged(model), ids, [80]), whole, **EXACT)


@pytest.mark.slow
def test_groups_that_may_not_be_complete_go_to_the_null_block(
    checkpoints: Any, paged: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a GPU the host does not know the complete groups of a step, so incomplete groups go to the null
    block.
    """
    model = checkpoints("deepseek-v4").load(torch.float64)
    ids = _ids(70, 10)
    whole = _run(paged(model), ids, [70])
    monkeypatch.setattr(compress, "_asking_is_free", lambda device: False)
    for chunks in ([70], [1], _chunks(70, 7)):
        assert torch.allclose(_run(paged(model), ids, chunks), whole, **EXACT)
    harness = paged(model)
    sequence = harness.sequence(ids)
    harness.step([(sequence, 30)], bound=6)
    while sequence.computed < len(ids):
        harness.step([], [(sequence, 1)], bound=6)
    assert torch.allclose(torch.stack(sequence.logits), whole, **EXACT)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_is_close(dtype: torch.dtype, checkpoints: Any, paged: Any) -> None:
    checkpoint = checkpoints("deepseek-v4-all")  # the router has the only choice that could flip
    ids = _ids(40, 9)
    ours = _run(paged(checkpoint.load(dtype)), ids, [30]).float()
    theirs = checkpoint.expected(ids)
    assert (ours - theirs).abs().mean() / theirs.abs().mean() < 0.1


# --- names and configuration ---


def _renamed(source: str, folder: Path, names: Any, **extra: torch.Tensor) -> str:
    shutil.copytree(source, folder, dirs_exist_ok=True)
    saved = load_file(folder / "model.safetensors")
    made = {names(name): tensor.contiguous() for name, tensor in saved.items()}
    save_file({**made, **extra}, folder / "model.safetensors")
    return str(folder)


def _published(name: str) -> str:
    """Return DeepSeek's published name of a tensor that transformers saves."""
    name = name.removeprefix("model.")
    name = re.sub(r"\.attn\.norm\.", ".attn.kv_norm.", name)
    return name.replace("embed_tokens.", "embed.").replace("hc_head.hc_", "hc_head_")


def test_all_three_namings_load_alike(checkpoints: Any, tmp_path: Path) -> None:
    checkpoint = checkpoints("deepseek-v4")
    expected = dict(checkpoint.read().named_parameters())
    more = {"mtp.0.attn.wkv.weight": torch.zeros(2)}
    published = _renamed(checkpoint.folder, tmp_path / "published", _published, **more)
    memory = Path(shutil.copytree(checkpoint.folder, tmp_path / "memory"))
    state = {name: tensor.contiguous() for name, tensor in checkpoint.reference.state_dict().items()}
    assert not set(state) & set(load_file(memory / "model.safetensors")) - {
        "model.embed_tokens.weight",
        "model.norm.weight",
        "model.hc_head.hc_fn",
        "model.hc_head.hc_base",
        "model.hc_head.hc_scale",
    }
    save_file(state, memory / "model.safetensors")
    for folder in (published, str(memory)):
        spec = load_spec(folder, None)
        model = load_model(folder, spec, torch.float32, CPU, progress=False, pack=False)
        found = dict(model.named_parameters())
        assert found.keys() == expected.keys()
        assert all(torch.equal(found[name], expected[name]) for name in expected)
    spec = load_spec(published, 2)
    assert [cache.layers for cache in spec.caches] == [(0, 1), (1,), (1,)]
    load_model(published, spec, torch.float32, CPU, progress=False)


def test_a_missing_weight_is_named(checkpoints: Any, tmp_path: Path) -> None:
    def without(name: str) -> str:
        return name.replace("layers.1.attn.wkv", "layers.1.attn.lost")

    folder = _renamed(checkpoints("deepseek-v4").folder, tmp_path, without)
    with pytest.raises(ConfigError, match=r"missing: layers\.1\.attn\.wkv.*unexpected: .*lost"):
        load_model(folder, load_spec(folder, None), torch.float32, CPU, progress=False)


def _configured(folder: str, target: Path, **changes: Any) -> str:
    """Copy a checkpoint with changed fields of config.json; None removes a field. Return the folder."""
    shutil.copytree(folder, target, dirs_exist_ok=True)
    path = target / "config.json"
    config = {**json.loads(path.read_text()), **changes}
    path.write_text(json.dumps({k: v for k, v in config.items() if v is not None}))
    return str(target)


def test_the_published_form_of_the_configuration(checkpoints: Any, tmp_path: Path) -> None:
    checkpoint = checkpoints("deepseek-v4-long")
    published = _configured(
        checkpoint.folder,
        tmp_path,
        layer_types=None,
        mlp_layer_types=None,
        compress_rates=None,
        rope_parameters=None,
        partial_rotary_factor=None,
        compress_ratios=[128, 4, 4],
        num_hash_layers=1,
        qk_rope_head_dim=8,
        rope_theta=10000,
        compress_rope_theta=160000,
        rope_scaling={"type": "yarn", "factor": 16, "original_max_position_embeddings": 64},
    )
    spec, same = load_spec(published, None), load_spec(checkpoint.folder, None)
    assert (spec.caches, spec.moe, spec.hyper, spec.rope) == (same.caches, same.moe, same.hyper, same.rope)
    assert spec.sparse is not None
    assert spec.sparse.types == ("all", "chosen")
    rope = spec.sparse.group_rope
    assert (rope.kind, rope.theta, rope.factor, rope.attention_factor) == ("yarn", 160000.0, 16.0, 1.0)
    assert spec.max_position == 1024


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("num_key_value_heads", 2),
        ("n_shared_experts", 2),
        ("norm_topk_prob", False),
        ("mlp_bias", True),
        ("scoring_func", "relu"),
        ("num_experts_per_tok", 7),
        ("o_groups", 3),
        ("index_head_dim", 4),
        ("layer_types", ["full_attention"] * 4),
        ("layer_types", ["sliding_attention"]),
        ("mlp_layer_types", ["dense"] * 4),
        ("swiglu_limit", -1),
        ("hc_eps", "none"),
    ],
)
def test_what_would_be_served_wrongly_is_refused(
    field: str, value: Any, checkpoints: Any, tmp_path: Path
) -> None:
    folder = _configured(checkpoints("deepseek-v4").folder, tmp_path, **{field: value})
    with pytest.raises(ConfigError, match=field):
        load_spec(folder, None)


def test_a_missing_list_of_types_is_the_published_models(checkpoints: Any, tmp_path: Path) -> None:
    folder = _configured(checkpoints("deepseek-v4").folder, tmp_path, layer_types=None, mlp_layer_types=None)
    spec = load_spec(folder, None)
    assert spec.sparse is not None
    assert spec.sparse.types == ("all", "all", "all", "chosen")
    assert spec.moe is not None
    assert spec.moe.hash_layers == (0, 1, 2)
