"""A small engine with random weights in the form of the bundled model, with the real tokenizer."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from weft import LLM

SETTINGS: dict[str, Any] = {
    "model": "spool-text",
    "load_format": "dummy",
    "num_hidden_layers_override": 1,
    "dtype": "float32",
    "kv_cache_memory": "16M",
    "block_size": 8,
    "max_num_seqs": 8,
    "max_model_len": 256,
    "device": "cpu",
    "seed": 1,
}


@pytest.fixture(scope="session", autouse=True)
def _one_thread() -> None:
    torch.set_num_threads(1)


@pytest.fixture(scope="session")
def settings() -> dict[str, Any]:
    return SETTINGS


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    with LLM(**SETTINGS) as made:
        yield made
