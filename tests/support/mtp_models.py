"""Make small DeepSeek-V3 checkpoints with a module that predicts one token further."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from tests.support.checkpoints import VOCAB
from tests.support.latent_models import CASES

_SIZES: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 48,
    "intermediate_size": 64,
    "num_attention_heads": 4,
    "num_hidden_layers": 1,
    "first_k_dense_replace": 0,
    "max_position_embeddings": 128,
    "initializer_range": 0.3,
    "num_nextn_predict_layers": 1,
    "tie_word_embeddings": False,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
}


def make_mtp_checkpoint(folder: Path, *, skilled: bool, seed: int = 0, **changes: Any) -> Path:
    """Save a random checkpoint in float64. Return its folder.

    With ``skilled`` the module repeats the model's single layer on the next token, so drafts are often right.
    Otherwise the module's weights are random too.
    """
    import transformers

    _, settings = CASES["deepseek-v3"]
    torch.manual_seed(seed)
    config = transformers.DeepseekV3Config(**{**settings, **_SIZES, **changes})
    model = transformers.DeepseekV3ForCausalLM(config).to(torch.float64)
    hidden, layer = config.hidden_size, config.num_hidden_layers
    with torch.no_grad():
        for name, value in [*model.named_parameters(), *model.named_buffers()]:
            if "correction" in name or ("norm" in name and not skilled):
                value += 0.3 * torch.randn_like(value)
        embedding = model.model.embed_tokens.weight
        if skilled:  # normalization then changes nothing
            embedding /= embedding.pow(2).mean(1, keepdim=True).sqrt()
    model.save_pretrained(folder)
    weights = load_file(folder / "model.safetensors")
    last, ours = f"model.layers.{layer - 1}.", f"model.layers.{layer}."
    block = {name.replace(last, ours): value.clone() for name, value in weights.items() if last in name}
    own = {
        f"{ours}enorm.weight": torch.ones(hidden),
        f"{ours}hnorm.weight": torch.ones(hidden),
        f"{ours}eh_proj.weight": torch.cat([torch.eye(hidden), torch.zeros(hidden, hidden)], dim=1),
        f"{ours}shared_head.norm.weight": weights["model.norm.weight"].clone(),
        f"{ours}embed_tokens.weight": weights["model.embed_tokens.weight"].clone(),
        f"{ours}shared_head.head.weight": weights["lm_head.weight"].clone(),
    }
    if not skilled:
        for name in ("enorm", "hnorm", "shared_head.norm"):
            own[f"{ours}{name}.weight"] = torch.rand(hidden) + 0.5
        own[f"{ours}eh_proj.weight"] = 0.3 * torch.randn(hidden, 2 * hidden)
        block = {n: v + 0.2 * torch.randn_like(v) if v.ndim > 1 else v for n, v in block.items()}
    made = {name: value.to(torch.float64) for name, value in {**weights, **block, **own}.items()}
    save_file(made, str(folder / "model.safetensors"), {"format": "pt"})
    return folder
