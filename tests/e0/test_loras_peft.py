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


def due_tokens(base: Path, folder: Path, settings: dict[str, Any]) -> list[list[int]]:
    """Save an adapter made by peft to ``folder``. Return the tokens of transformers with the adapter."""
    peft = pytest.importorskip("peft", reason="the package peft is not installed")
    import transformers

    model = transformers.AutoModelForCausalLM.from_pretrained(base, dtype=torch.float64)
    torch.manual_seed(3)
    config = peft.LoraConfig(target_modules="all-linear", init_lora_weights=False, **settings)
    adapted = peft.get_peft_model(model, config).eval()
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
    base = make_checkpoint(tmp_path, shape)
    due = due_tokens(base, tmp_path / "adapter", CASES[case])
    digest = read_adapter(tmp_path / "adapter").digest
    engine, _ = make_engine(base, model=adapted_model(base, 1), lora=LoraSection(max_loras=1), chunk=8)
    load(engine, tmp_path / "adapter", digest)
    submits = [submit(i, prompt, GREEDY, request=i, adapter=digest) for i, prompt in enumerate(PROMPTS)]
    plain = [submit(i + 10, prompt, GREEDY, request=i + 10) for i, prompt in enumerate(PROMPTS)]
    answers = run(engine, [submits + plain])
    engine.close()
    assert [answers[i].tokens for i in range(len(PROMPTS))] == due
    assert [answers[i + 10].tokens for i in range(len(PROMPTS))] != due
