"""An EAGLE-3 head beside the served model, where prefill and decode are apart."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from weft.config.hub import BUNDLED

PROMPTS = ["Tom has 3 pens and buys", "one two three one two three", "Ann"]


def save_head(folder: Path) -> None:
    """Save a random head for spool-text."""
    facts = json.loads((BUNDLED / "spool-text" / "config.json").read_text())
    hidden, vocab = facts["hidden_size"], facts["vocab_size"]
    q, kv = (facts[name] * facts["head_dim"] for name in ("num_attention_heads", "num_key_value_heads"))
    sizes = {
        "fc": (hidden, 3 * hidden),
        "lm_head": (vocab, hidden),
        "midlayer.self_attn.q_proj": (q, 2 * hidden),
        "midlayer.self_attn.k_proj": (kv, 2 * hidden),
        "midlayer.self_attn.v_proj": (kv, 2 * hidden),
        "midlayer.self_attn.o_proj": (hidden, q),
        "midlayer.mlp.gate_proj": (64, hidden),
        "midlayer.mlp.up_proj": (64, hidden),
        "midlayer.mlp.down_proj": (hidden, 64),
        "norm": (hidden,),
        "midlayer.input_layernorm": (hidden,),
        "midlayer.hidden_norm": (hidden,),
        "midlayer.post_attention_layernorm": (hidden,),
    }
    torch.manual_seed(0)
    tensors = {f"{name}.weight": torch.randn(size) * hidden**-0.5 for name, size in sizes.items()}
    save_file(tensors, folder / "model.safetensors")
    kept = ("hidden_size", "vocab_size", "num_attention_heads", "num_key_value_heads", "head_dim")
    config = {name: facts[name] for name in kept}
    config |= {"architectures": ["LlamaForCausalLMEagle3"], "num_hidden_layers": 1, "intermediate_size": 64}
    (folder / "config.json").write_text(json.dumps({**config, "max_position_embeddings": 2048}))


@pytest.mark.slow
def test_prefill_and_decode_apart_give_the_same_tokens(start_weft: Any, tmp_path: Path) -> None:
    save_head(tmp_path)

    def texts(server: Any) -> list[str]:
        found = []
        for heat in (0, 0.8):
            for prompt in PROMPTS:
                answer = server.complete(prompt, max_tokens=24, seed=7, temperature=heat)
                assert answer.status_code == 200, answer.text
                found.append(answer.json()["choices"][0]["text"])
        return found

    apart = ("--prefill", "1", "--decode", "1")
    flags = ("--speculative-method", "eagle3", "--speculative-model", str(tmp_path))
    server = start_weft(*apart, *flags, "--no-speculative-adaptive")
    assert texts(server) == texts(start_weft(*apart))
    assert server.metric("spec_decode_num_draft_tokens_total") > 0
