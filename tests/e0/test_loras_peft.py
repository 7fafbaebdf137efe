"""Tokens under LoRA adapters equal the tokens of the package peft, which is the reference."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.e0.rig import make_engine, run, submit
from tests.e0.test_loras import GREEDY, PROMPTS, adapted_model, load
from tests.support.checkpoints import make_checkpoint
from weft.config.adapters import read_adapter
from weft.config.sections.lora_section import LoraSection

pytestmark = pytest.mark.slow

CASES: dict[str, dict[str, Any]] = {
    "plain": {"r": 4, "lora_alpha": 7},
    "rank-stabilized": {"r": 3, "lora_alpha": 5, "use_rslora": True},
    "patterns": {
        "r": 2,
        "lora_alpha": 4,
        "rank_pattern": {"q_proj": 4, r"layers\.1\..*down_proj": 1},
        "alpha_pattern": {"v_proj": 9},
    },
}


GPT_OSS: dict[str, Any] = {
    "num_local_experts": 6,
    "num_experts_per_tok": 2,
    "head_dim": 16,
    "sliding_window": 21,
    "vocab_size": 67,
    "hidden_size": 48,
    "intermediate_size": 36,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "initializer_range": 0.3,
    "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
}
STACKS = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]
#: Settings that concern some models only.
MORE: dict[tuple[str, str], dict[str, Any]] = {
    ("qwen3_moe", "stacked experts"): {
        "r": 2,
        "lora_alpha": 3,
        "target_modules": ["q_proj"],
        "target_parameters": STACKS,
    },
    ("qwen3_moe", "one stack"): {
        "r": 4,
        "lora_alpha": 3,
        "target_modules": [],
        "target_parameters": STACKS[1:],
        "use_rslora": True,
    },
    ("qwen3_moe", "names of experts"): {
        "r": 2,
        "lora_alpha": 3,
        "target_modules": ["q_proj", "gate_proj", "up_proj", "down_proj"],
    },
    ("qwen3_next", "stacked experts"): {
        "r": 3,
        "lora_alpha": 3,
        "target_modules": ["in_proj_qkvz", "out_proj"],
        "target_parameters": STACKS,
    },
    ("llama", "dora"): {"r": 3, "lora_alpha": 5, "use_dora": True},
    ("qwen2_windowed", "dora"): {"r": 2, "lora_alpha": 5, "use_dora": True, "use_rslora": True},
    ("llama", "tables"): {"r": 3, "lora_alpha": 2, "target_modules": ["q_proj", "embed_tokens", "lm_head"]},
    ("llama", "whole tables"): {
        "r": 2,
        "lora_alpha": 3,
        "target_modules": ["v_proj"],
        "modules_to_save": ["embed_tokens", "lm_head"],
    },
    ("llama", "dora head"): {
        "r": 3,
        "lora_alpha": 2,
        "target_modules": ["q_proj", "lm_head"],
        "use_dora": True,
    },
    ("tied", "tables"): {"r": 3, "lora_alpha": 2, "target_modules": ["q_proj", "embed_tokens"]},
    ("tied", "head"): {"r": 3, "lora_alpha": 2, "target_modules": ["q_proj", "lm_head"]},
    ("tied", "whole embedding"): {
        "r": 2,
        "lora_alpha": 3,
        "target_modules": ["v_proj"],
        "modules_to_save": ["embed_tokens"],
    },
    ("tied", "tied tables"): {
        "r": 3,
        "lora_alpha": 2,
        "target_modules": ["q_proj", "embed_tokens"],
        "ensure_weight_tying": True,
    },
    ("tied", "tied whole tables"): {
        "r": 2,
        "lora_alpha": 3,
        "target_modules": ["v_proj"],
        "modules_to_save": ["embed_tokens"],
        "ensure_weight_tying": True,
    },
    ("gpt_oss", "stacked experts"): {
        "r": 2,
        "lora_alpha": 3,
        "target_modules": ["v_proj"],
        "target_parameters": STACKS,
    },
}


def due_tokens(base: Path, folder: Path, settings: dict[str, Any]) -> list[list[int]]:
    """Save an adapter made by peft to ``folder``. Return the tokens of transformers with the adapter."""
    peft = pytest.importorskip("peft", reason="the package peft is not installed")
    import transformers

    model = transformers.AutoModelForCausalLM.from_pretrained(
        base, dtype=torch.float64, experts_implementation="eager"
    )
    torch.manual_seed(3)
    settings = {"target_modules": "all-linear", **settings}
    config = peft.LoraConfig(init_lora_weights=False, **settings)
    adapted = peft.get_peft_model(model, config).eval()
    for name, parameter in adapted.named_parameters():
        # peft begins with the lengths of the rows, and with copies of matrices, which change nothing.
        if "magnitude" in name:
            parameter.data *= 1 + torch.rand_like(parameter)
        elif "modules_to_save" in name:
            parameter.data += torch.randn_like(parameter) * 0.1
        elif "lora_embedding" in name:
            parameter.data *= 0.3
    adapted.save_pretrained(folder)
    made = []
    for prompt in PROMPTS:
        ids = torch.tensor([prompt])
        out = adapted.generate(
            input_ids=ids, attention_mask=torch.ones_like(ids), max_new_tokens=9, do_sample=False
        )
        made.append(out[0, len(prompt) :].tolist())
    return made


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("shape", ["llama", "qwen2_windowed"])
def test_tokens_of_peft(shape: str, case: str, tmp_path: Path) -> None:
    check(make_checkpoint(tmp_path, shape), tmp_path, CASES[case])


@pytest.mark.parametrize(("shape", "case"), MORE)
def test_more_tokens_of_peft(shape: str, case: str, tmp_path: Path) -> None:
    make = {"gpt_oss": make_gpt_oss, "tied": make_tied}.get(shape, make_checkpoint)
    check(make(tmp_path, shape), tmp_path, MORE[shape, case])


def test_peft_makes_no_dora_of_stacked_experts(tmp_path: Path) -> None:
    """Weft refuses such adapters, too: no definition exists to compare with."""
    with pytest.raises(ValueError, match="ParamWrapper does not work with use_dora=True"):
        due_tokens(
            make_checkpoint(tmp_path, "qwen3_moe"),
            tmp_path / "adapter",
            {**MORE["qwen3_moe", "one stack"], "use_dora": True},
        )


def make_gpt_oss(folder: Path, shape: str) -> Path:
    import transformers

    torch.manual_seed(0)
    config = transformers.GptOssConfig(**GPT_OSS)
    base = folder / shape
    transformers.GptOssForCausalLM(config).float().save_pretrained(base)
    return base


def make_tied(folder: Path, shape: str) -> Path:
    import transformers

    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=67,
        hidden_size=48,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        max_position_embeddings=128,
        initializer_range=0.3,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=None,
        pad_token_id=None,
    )
    base = folder / shape
    transformers.LlamaForCausalLM(config).float().save_pretrained(base)
    return base


def check(base: Path, tmp_path: Path, settings: dict[str, Any]) -> None:
    """Compare the tokens of an engine and of peft, with an adapter and without."""
    due = due_tokens(base, tmp_path / "adapter", settings)
    digest = read_adapter(tmp_path / "adapter").digest
    engine, _ = make_engine(base, model=adapted_model(base, 1), lora=LoraSection(max_loras=1), chunk=8)
    load(engine, tmp_path / "adapter", digest)
    submits = [submit(i, prompt, GREEDY, request=i, adapter=digest) for i, prompt in enumerate(PROMPTS)]
    plain = [submit(i + 10, prompt, GREEDY, request=i + 10) for i, prompt in enumerate(PROMPTS)]
    answers = run(engine, [submits + plain])
    engine.close()
    assert [answers[i].tokens for i in range(len(PROMPTS))] == due
    assert [answers[i + 10].tokens for i in range(len(PROMPTS))] != due
