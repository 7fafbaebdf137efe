"""Exact tokens of the generic backend over layouts and under adapters, through whole engines in float64.

The reference is transformers, or the package peft, for each sequence alone.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.e0.rig import make_engine, submit
from tests.e0.rig import run as run_alone
from tests.e0.test_loras import load as load_adapter
from tests.support.expert_groups import Leading, Replica, run_layout
from tests.support.generic_models import full_name, greedy, tiny_model
from tests.support.loras import make_adapter, merge
from tests.support.slow import mostly_slow
from weft.config.adapters import read_adapter
from weft.config.sections.all import SpeculationSection
from weft.config.sections.lora_section import LoraSection
from weft.layers.build import AdapterOptions
from weft.models.generic import recognition
from weft.models.generic.load import load
from weft.models.generic.probe import probe_folder
from weft.parallel.mesh import Mesh
from weft.types.layout import Layout
from weft.types.messages import Submit
from weft.types.sampling import TokenParams

GREEDY = TokenParams(temperature=0.0, max_tokens=7)
PROMPTS = [[5 + 3 * i % 60 for i in range(length)] for length in (19, 26, 7, 4)]
LINEAR = r"(self_attn\.\w+|layers\.\d+\.mlp\.\w+_proj|shared_experts?\.\w+_proj)$"


def run(
    layout: Layout,
    folder: Path,
    name: str,
    arrivals: list[list[list[Submit]]],
    adapters: Sequence[Path] = (),
    overlap: str = "off",
    **options: Any,
) -> list[Replica]:
    """Run the class ``name`` of ``folder`` on ``layout``, with one place for adapters if there are any."""

    def make(mesh: Mesh) -> tuple[Any, Any]:
        spec = probe_folder(str(folder), full_name(name))
        places = AdapterOptions(places=1, rank=4) if adapters else None
        cpu = torch.device("cpu")
        model = load(str(folder), spec, torch.float64, cpu, progress=False, mesh=mesh, adapters=places)
        more = {**options, "lora": LoraSection(max_loras=1)} if adapters else options
        engine, runner = make_engine(folder, model=model, launcher=mesh.launcher, chunk=8, **more)  # type: ignore[arg-type]
        for one in adapters if not layout.place(mesh.rank) else []:
            load_adapter(engine, one, read_adapter(one).digest)
        return engine, runner

    return run_layout(layout, make, Leading, arrivals, overlap=overlap)


def submits(digest: str = "", first: int = 0, prompts: range = range(len(PROMPTS))) -> list[Submit]:
    return [submit(first + i, PROMPTS[i], GREEDY, request=first + i, adapter=digest) for i in prompts]


def due(reference: Any) -> list[list[int]]:
    return [greedy(reference, prompt, GREEDY.max_tokens)[len(prompt) :] for prompt in PROMPTS]


@mostly_slow("name", ["Qwen3Moe", "MiniMaxM2", "Glm4Moe", "Mixtral"], ["Qwen3Moe"])
def test_replicas_share_experts(name: str, tmp_path: Path) -> None:
    """One replica has most prompts; the other replica joins late and idles first."""
    reference = tiny_model(name)
    reference.save_pretrained(tmp_path)
    arrivals = [[submits(prompts=range(3))], [[], [], [], submits(prompts=range(3, 4))]]
    drafts = SpeculationSection(speculative_method="ngram", num_speculative_tokens=2)
    made = run(Layout(data=2, expert=True), tmp_path, name, arrivals, overlap="all", speculation=drafts)
    answers = {**made[0].answers, **made[1].answers}
    assert [answers[i].tokens for i in range(len(PROMPTS))] == due(reference)
    assert made[0].overlapped


@mostly_slow("name", ["Bloom", "GPT2LMHeadModel", "OPT", "Mpt", "GPTNeo", "Gemma2"], ["Bloom"])
def test_prefix_hits_preemption_and_drafts(name: str, tmp_path: Path) -> None:
    """Chunks begin inside of the prompts, and the small cache makes sequences start again."""
    reference = tiny_model(name)
    reference.save_pretrained(tmp_path)
    spec = probe_folder(str(tmp_path), full_name(name))
    model = load(str(tmp_path), spec, torch.float64, torch.device("cpu"), progress=False)
    drafts = SpeculationSection(speculative_method="ngram", num_speculative_tokens=2)
    more = {"chunk": 5, "blocks": 8, "max_len": 48, "window_blocks": 64, "depth": 2, "speculation": drafts}
    engine, _ = make_engine(tmp_path, model=model, **more)  # type: ignore[arg-type]
    for _ in range(2):
        answers = run_alone(engine, [submits()])
        assert [answers[i].tokens for i in range(len(PROMPTS))] == due(reference)
    assert engine.stats().preemptions
    assert engine.stats().prefix_hits
    assert sum(one.accepted + one.rejected for one in answers.values())


def with_adapter(name: str, folder: Path, targets: str = LINEAR) -> tuple[Path, Any]:
    """Save a tiny model and a random adapter. Return the adapter and transformers' merged model."""
    import transformers

    tiny_model(name).save_pretrained(folder / "base")
    adapter = make_adapter(folder / "adapter", folder / "base", targets)
    merged = merge(folder / "merged", folder / "base", adapter)
    cls = getattr(transformers, full_name(name))
    how = {"attn_implementation": "eager", "experts_implementation": "eager"}
    return adapter, cls.from_pretrained(merged, dtype=torch.float64, **how).eval()


def check_adapter(
    layout: Layout, name: str, base: Path, adapter: Path, expected: list[list[int]], overlap: str = "off"
) -> None:
    """Check the tokens of rows with and without the adapter in one batch."""
    digest = read_adapter(adapter).digest
    both = submits(digest) + submits(first=10)
    answers = run(layout, base, name, [[both]], [adapter], overlap)[0].answers
    assert [answers[i].tokens for i in range(len(PROMPTS))] == expected
    assert [answers[10 + i].tokens for i in range(len(PROMPTS))] == due(tiny_model(name))
    assert [answers[10 + i].tokens for i in range(len(PROMPTS))] != expected


@mostly_slow(
    ("name", "ranks"),
    [
        (name, ranks)
        for name in ("Llama", "Gemma3", "Glm4Moe", "Cwm", "Phi3", "Persimmon", "DeepseekV3", "Olmo2")
        for ranks in (1, 2)
    ],
    [("Glm4Moe", 2)],
)
def test_tokens_of_merged_weights(name: str, ranks: int, tmp_path: Path) -> None:
    adapter, merged = with_adapter(name, tmp_path)
    check_adapter(Layout(tensor=ranks), name, tmp_path / "base", adapter, due(merged))


@pytest.mark.slow
@pytest.mark.parametrize("overlap", ["off", "all"])
def test_a_head_that_is_a_linear_layer(overlap: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Beside an unknown embedding. The head has other rows than the layers: those with logits."""
    monkeypatch.setattr(recognition, "scale_of", lambda _: None)
    adapter, merged = with_adapter("Llama", tmp_path, LINEAR.replace("$", "|lm_head$"))
    assert "lm_head" in {one.module for one in read_adapter(adapter).modules}
    check_adapter(Layout(), "Llama", tmp_path / "base", adapter, due(merged), overlap)


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("name", ["Llama", "Gemma3", "Glm4Moe", "Cwm"])
def test_tokens_of_peft(name: str, ranks: int, tmp_path: Path) -> None:
    peft = pytest.importorskip("peft", reason="the package peft is not installed")
    model = tiny_model(name)
    model.save_pretrained(tmp_path / "base")
    torch.manual_seed(3)
    layers = [key for key, part in model.named_modules() if isinstance(part, torch.nn.Linear)]
    # The package would adapt experts, too, for names of feed-forward layers beside experts.
    matched = r"self_attn" if name == "Glm4Moe" else LINEAR
    names = [key for key in layers if re.search(matched, key)]
    config = peft.LoraConfig(target_modules=names, init_lora_weights=False, r=4, lora_alpha=9)
    adapted = peft.get_peft_model(model, config).eval()
    adapted.save_pretrained(tmp_path / "adapter")
    expected = due(adapted)
    check_adapter(Layout(tensor=ranks), name, tmp_path / "base", tmp_path / "adapter", expected)


def test_an_adapter_of_experts_or_of_a_router_is_refused(tmp_path: Path) -> None:
    adapter, _ = with_adapter("Qwen2Moe", tmp_path)
    other = make_adapter(tmp_path / "other", tmp_path / "base", r"mlp\.gate$")
    assert json.loads((other / "adapter_config.json").read_text())["target_modules"] == ["gate"]
    with pytest.raises(AssertionError, match="does not fit the model; modules that take no adap"):
        run(Layout(), tmp_path / "base", "Qwen2Moe", [[[]]], [adapter, other])
