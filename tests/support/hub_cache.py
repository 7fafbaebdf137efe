"""A cache of the hub client with a tiny model under a published name: commands of the docs run offline."""

from __future__ import annotations

from pathlib import Path

COMMIT = "0123456789abcdef0123456789abcdef01234567"


def make_hub_cache(home: Path, name: str) -> Path:
    """Write a cache for ``HF_HOME=home`` that has the repository ``name``. Return the model's folder.

    The model is a random Qwen3 of two layers in bfloat16, with a byte-level tokenizer and a chat template.
    """
    import torch
    from transformers import Qwen3Config, Qwen3ForCausalLM

    from tests.cli.conftest import save_tokenizer

    repository = home / "hub" / f"models--{name.replace('/', '--')}"
    folder = repository / "snapshots" / COMMIT
    folder.mkdir(parents=True)
    (repository / "refs").mkdir()
    (repository / "refs" / "main").write_text(COMMIT)
    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=save_tokenizer(folder),
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        max_position_embeddings=512,
        initializer_range=0.3,
        bos_token_id=None,
        eos_token_id=257,
        pad_token_id=257,
    )
    Qwen3ForCausalLM(config).to(torch.bfloat16).save_pretrained(folder)
    return folder
