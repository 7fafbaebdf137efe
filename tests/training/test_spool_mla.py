"""The bundled checkpoint ``spool-mla``: its files, and its results with ``transformers`` alone."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import PreTrainedTokenizerFast

from training.chat import prompt_ids, solve_ids
from training.mtp import DeepseekV3WithMtp
from training.spool_mla import SpoolMla, acceptance
from weft.config.hub import bundled_models
from weft.eval.gsm_mini import score, test_set

FOLDER = Path(bundled_models()["spool-mla"])
RESULT = Path(__file__).resolve().parents[2] / "training/results/spool-mla/result.json"


def test_its_shape_and_tokenizer() -> None:
    config = json.loads((FOLDER / "config.json").read_text())
    assert config["architectures"] == ["DeepseekV3ForCausalLM"]
    assert config["num_nextn_predict_layers"] == 1
    assert config["first_k_dense_replace"] == 1
    assert (config["n_routed_experts"], config["n_group"], config["topk_group"]) == (8, 2, 1)
    assert config["q_lora_rank"] is not None
    other = Path(bundled_models()["spool-text"])
    assert (FOLDER / "tokenizer.json").read_bytes() == (other / "tokenizer.json").read_bytes()


def test_its_tensors() -> None:
    tensors = load_file(FOLDER / "model.safetensors")
    fresh = SpoolMla().new_model(PreTrainedTokenizerFast.from_pretrained(FOLDER))
    assert 2e6 < sum(p.numel() for p in fresh.parameters()) < 6e6
    copies = {"model.layers.4.embed_tokens.weight", "model.layers.4.shared_head.head.weight"}
    for name in copies:
        assert torch.equal(tensors[name], tensors["model.embed_tokens.weight"])
    biases = {name for name in tensors if name.endswith("e_score_correction_bias")}
    assert len(biases) == 4
    assert all(
        tensors[name].dtype == (torch.float32 if name in biases else torch.bfloat16) for name in tensors
    )
    assert any(tensors[name].abs().max() > 0.01 for name in biases)
    stored = sum(t.numel() for name, t in tensors.items() if name not in biases | copies)
    assert stored == sum(p.numel() for p in fresh.parameters())


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_thirty_problems_and_their_drafts() -> None:
    """A sample of the 500 results in ``result.json``."""
    result = json.loads(RESULT.read_text())
    assert result["problems"] == 500
    assert result["drafts"]["accepted_1"] >= 0.85
    tokenizer = PreTrainedTokenizerFast.from_pretrained(FOLDER)
    model = DeepseekV3WithMtp.from_pretrained(FOLDER, dtype=torch.float32).eval()
    asked = test_set(30)
    prompts = [prompt_ids(tokenizer, problem) for problem in asked]
    replies = solve_ids(model, tokenizer, prompts)
    exact = score(tokenizer.batch_decode(replies, skip_special_tokens=True), asked)
    assert exact / 30 >= result["accuracy"] - 0.1
    rates = acceptance(model, prompts, replies)
    assert rates["accepted_1"] >= 0.85
    for name, rate in rates.items():
        assert rate == pytest.approx(result["drafts"][name], abs=0.06), name
