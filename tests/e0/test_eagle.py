"""EAGLE-3 heads: exact tokens, and the drafts of a direct computation in float64."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
import torch.nn.functional as F
import transformers
from safetensors.torch import save_file

from tests.e0 import rig
from tests.e0.rig import Answer, make_engine, replaying, run, submit
from tests.e0.test_grid import FILLER, PROMPTS, SAMPLING
from tests.support.checkpoints import VOCAB
from tests.support.expert_groups import Leading, run_layout
from tests.support.slow import mostly_slow
from weft.common.errors import ConfigError
from weft.config.sections.all import Config, SpeculationSection
from weft.config.sizing.draft import draft_part, eagle_spec, with_draft
from weft.config.spec import HyperSpec
from weft.layers.build import Build, ExpertOptions
from weft.models.eagle import EagleModel, load_eagle
from weft.models.generic.probe import probe_folder
from weft.models.loader import load_model
from weft.parallel.mesh import Mesh
from weft.speculation.base import Sampled
from weft.types.layout import Layout
from weft.types.messages import Submit
from weft.types.sampling import TokenParams

H, LAYERS, SMALL, BATCH = 32, 6, 40, 4
DRAFTS = SpeculationSection(
    speculative_method="eagle3", num_speculative_tokens=3, speculative_adaptive=False, speculative_model="d"
)
SIZES: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": H,
    "intermediate_size": 48,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 256,
    "rms_norm_eps": 1e-6,
}


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("eagle")


@cache
def target(root: Path) -> tuple[Path, Any]:
    torch.manual_seed(3)
    config = transformers.LlamaConfig(**SIZES, num_hidden_layers=LAYERS, initializer_range=0.3)
    model = transformers.LlamaForCausalLM(config).to(torch.float64).eval()
    model.save_pretrained(root / "target")
    return root / "target", model


@cache
def head(root: Path, before: bool = False, embeds: bool = False) -> tuple[Path, dict[str, torch.Tensor]]:
    """Save a random head with 40 of the tokens. Return (folder, tensors)."""
    folder = root / f"head-{before}-{embeds}"
    folder.mkdir(exist_ok=True)
    made = torch.Generator().manual_seed(4)

    def matrix(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=made, dtype=torch.float64) * shape[-1] ** -0.5

    tensors = {
        "fc.weight": matrix(H, 3 * H),
        "midlayer.self_attn.q_proj.weight": matrix(H, 2 * H),
        "midlayer.self_attn.k_proj.weight": matrix(16, 2 * H),
        "midlayer.self_attn.v_proj.weight": matrix(16, 2 * H),
        "midlayer.self_attn.o_proj.weight": matrix(H, H),
        "midlayer.mlp.gate_proj.weight": matrix(48, H),
        "midlayer.mlp.up_proj.weight": matrix(48, H),
        "midlayer.mlp.down_proj.weight": matrix(H, 48),
        "lm_head.weight": matrix(SMALL, H),
        **{
            f"{name}.weight": 1 + matrix(H)
            for name in (
                "norm",
                "midlayer.input_layernorm",
                "midlayer.hidden_norm",
                "midlayer.post_attention_layernorm",
            )
        },
    }
    if embeds:
        tensors["embed_tokens.weight"] = matrix(VOCAB, H)
    chosen = torch.randperm(VOCAB, generator=made)[:SMALL].sort().values
    tensors["d2t"] = chosen - torch.arange(SMALL)
    tensors["t2d"] = torch.zeros(VOCAB, dtype=torch.bool).index_fill(0, chosen, True)
    save_file(tensors, folder / "model.safetensors")
    config = {
        **SIZES,
        "architectures": ["LlamaForCausalLMEagle3"],
        "num_hidden_layers": 1,
        "draft_vocab_size": SMALL,
        "norm_before_residual": before,
    }
    (folder / "config.json").write_text(json.dumps(config))
    return folder, tensors


def model_of(root: Path, draft: Path, mesh: Mesh | None = None, generic: bool = False) -> Any:
    folder, _ = target(root)
    own = probe_folder(str(folder), "LlamaForCausalLM") if generic else rig.spec_of(folder)
    spec = with_draft(own, Config(speculation=DRAFTS), str(folder), str(draft))
    model = load_model(str(folder), spec, torch.float64, rig.CPU, progress=False, mesh=mesh)
    build = Build(dtype=torch.float64, device=rig.CPU, mesh=mesh or Mesh(), experts=ExpertOptions())
    return EagleModel(model, load_eagle(str(draft), draft_part(spec), build, "auto", 0, False))


def norm(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return x * (x.pow(2).mean(-1, keepdim=True) + 1e-6).rsqrt() * weight


def turned(x: torch.Tensor) -> torch.Tensor:
    """Return x [tokens, heads, 8] rotated by the positions."""
    angles = torch.arange(len(x), dtype=torch.float64)[:, None] / 10000.0 ** (torch.arange(0, 8, 2) / 8)
    cos, sin = angles.cos()[:, None].repeat(1, 1, 2), angles.sin()[:, None].repeat(1, 1, 2)
    return x * cos + torch.cat([-x[..., 4:], x[..., :4]], -1) * sin


@torch.no_grad()
def drafts_of(root: Path, ids: list[int], count: int, before: bool, embeds: bool) -> list[int]:
    """Return the drafts behind ``ids`` by the equations of the publication, without a cache."""
    model = target(root)[1]
    t = {name.removesuffix(".weight"): value for name, value in head(root, before, embeds)[1].items()}
    table = t["embed_tokens"] if embeds else model.model.embed_tokens.weight
    states = model.model(torch.tensor([ids[:-1]]), output_hidden_states=True).hidden_states
    # hidden_states[n] is the input of layer n
    streams = torch.cat([states[n][0] for n in (2, LAYERS // 2, LAYERS - 3)], -1) @ t["fc"].T
    tokens, drafts = list(ids), []
    for _ in range(count):
        embedded = norm(table[torch.tensor(tokens[1:])], t["midlayer.input_layernorm"])
        normed = norm(streams, t["midlayer.hidden_norm"])
        x = torch.cat([embedded, normed], -1)
        q, k, v = (
            (x @ t[f"midlayer.self_attn.{name}_proj"].T).unflatten(1, (-1, 8)) for name in ("q", "k", "v")
        )
        k, v = (one.repeat_interleave(2, 1).transpose(0, 1) for one in (turned(k), v))
        made = F.scaled_dot_product_attention(turned(q).transpose(0, 1), k, v, is_causal=True)
        out = made.transpose(0, 1).flatten(1) @ t["midlayer.self_attn.o_proj"].T
        out = (normed if before else streams) + out
        inner = norm(out, t["midlayer.post_attention_layernorm"])
        gate = F.silu(inner @ t["midlayer.mlp.gate_proj"].T) * (inner @ t["midlayer.mlp.up_proj"].T)
        out = out + gate @ t["midlayer.mlp.down_proj"].T
        best = int((norm(out[-1], t["norm"]) @ t["lm_head"].T).argmax())
        drafts.append(best + int(t["d2t"][best]))
        tokens.append(drafts[-1])
        streams = torch.cat([streams, out[-1:]])
    return drafts


@mostly_slow(
    ("before", "embeds", "generic"),
    [(False, False, False), (True, True, False), (False, False, True)],
    [(True, True, False)],
)
def test_the_drafts_are_those_of_the_publication(
    root: Path, before: bool, embeds: bool, generic: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = target(root)[0]
    model = model_of(root, head(root, before, embeds)[0], generic=generic)
    engine, runner = make_engine(folder, model=model, speculation=DRAFTS, chunk=7, max_num_seqs=1)
    drafter, made = runner.drafter, list[list[int]]()
    assert drafter is not None
    propose = drafter.propose

    def recorded(step: Sampled) -> torch.Tensor | None:
        drafts = propose(step)
        if drafts is not None:
            made.append(drafts[0].tolist())
        return drafts

    monkeypatch.setattr(drafter, "propose", recorded)
    for number, prompt in enumerate(PROMPTS[:BATCH]):
        made.clear()
        greedy = TokenParams(temperature=0.0, max_tokens=8)
        answer = run(engine, [[submit(number, prompt, greedy, request=number)]])[number]
        assert made[0] == drafts_of(root, [*prompt, answer.tokens[0]], 3, before, embeds)
    engine.close()


def arrivals(first: int = 0, filler: bool = False) -> list[list[Submit]]:
    turns = [
        [
            submit(first + 10 * n + at, PROMPTS[n], params, request=10 * n + at)
            for at, params in enumerate((SAMPLING["greedy"], SAMPLING["seeded"]))
        ]
        for n in range(BATCH)
    ]
    if filler:
        long = TokenParams(temperature=0.0, max_tokens=60)
        turns[0].append(submit(999, FILLER, long, request=999, priority=-1))
    return turns


@cache
def plain(root: Path) -> dict[int, list[int]]:
    engine, _ = make_engine(target(root)[0], max_num_seqs=1)
    answers = run(engine, arrivals())
    engine.close()
    return {number: answer.tokens for number, answer in answers.items()}


def check(root: Path, answers: dict[int, Answer], first: int = 0) -> None:
    for number, tokens in plain(root).items():
        assert answers[first + number].tokens == tokens, number


@mostly_slow(("depth", "chunk", "replayed"), [(1, 0, False), (2, 7, True)], [(2, 7, True)])
def test_tokens_do_not_change(root: Path, depth: int, chunk: int, replayed: bool) -> None:
    """In two rounds; the second round has cached prefixes."""
    engine, _ = make_engine(
        target(root)[0],
        model=model_of(root, head(root)[0]),
        speculation=DRAFTS,
        depth=depth,
        chunk=chunk,
        graphs=replaying(3) if replayed else None,
    )
    for first in (0, 1000):
        answers = run(engine, arrivals(first))
        check(root, answers, first)
    assert any(answer.num_cached for answer in answers.values())
    assert sum(engine.stats().drafts)
    engine.close()


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [1, 2])
def test_tokens_do_not_change_with_the_code_of_transformers(root: Path, ranks: int) -> None:
    def make(mesh: Mesh) -> tuple[Any, Any]:
        model = model_of(root, head(root)[0], mesh, generic=True)
        options = {"speculation": DRAFTS, "depth": 2, "chunk": 7}
        return make_engine(target(root)[0], model=model, launcher=mesh.launcher, **options)

    (replica,) = run_layout(Layout(tensor=ranks), make, Leading, [arrivals()])
    check(root, replica.answers)
    assert sum(replica.stats.drafts)


@pytest.mark.slow
def test_the_preempted_begin_again(root: Path) -> None:
    model = model_of(root, head(root)[0])
    engine, _ = make_engine(
        target(root)[0], model=model, speculation=DRAFTS, depth=2, chunk=5, blocks=20, max_num_seqs=4
    )
    check(root, run(engine, arrivals(filler=True)))
    assert engine.stats().preemptions > 0
    engine.close()


def test_over_ranks_and_beside_embeddings(root: Path) -> None:
    def make(mesh: Mesh) -> tuple[Any, Any]:
        model = model_of(root, head(root, True, True)[0], mesh)
        return make_engine(
            target(root)[0], model=model, launcher=mesh.launcher, speculation=DRAFTS, depth=2, chunk=16
        )

    turns = arrivals()
    turns[0].append(submit(777, PROMPTS[0], TokenParams(max_tokens=1), request=777, pooling="mean"))
    (replica,) = run_layout(Layout(tensor=2), make, Leading, [turns])
    check(root, replica.answers)
    assert len(replica.answers[777].embedding) == 4 * H


def test_heads_that_are_refused(root: Path, tmp_path: Path) -> None:
    folder, config = target(root)[0], json.loads((head(root)[0] / "config.json").read_text())
    for field, value, said in (
        ("num_hidden_layers", 2, "2 layers"),
        ("hidden_size", 64, "hidden size other than 32"),
        ("vocab_size", 7, "vocabulary of 7"),
        ("architectures", ["LlamaForCausalLM"], "no EAGLE-3 head"),
        ("eagle_aux_hidden_state_layer_ids", [1, 2, 9], "reads the layers"),
    ):
        (tmp_path / "config.json").write_text(json.dumps({**config, field: value}))
        with pytest.raises(ConfigError, match=said):
            with_draft(rig.spec_of(folder), Config(speculation=DRAFTS), str(folder), str(tmp_path))
    spec = rig.spec_of(folder)
    several = HyperSpec(streams=2, iterations=1, eps=1e-6)
    with pytest.raises(ConfigError, match="needs a model with one residual stream"):
        eagle_spec(msgspec.structs.replace(spec, hyper=several), head(root)[0])
