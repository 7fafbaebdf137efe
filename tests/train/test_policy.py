"""The policy: gradients of transformers, logprobs of the engine, weights that an engine can load."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from tests.support.checkpoints import VOCAB, make_checkpoint
from tests.support.slow import mostly_slow
from weft.api.settings import read_settings
from weft.config.resolve import resolve
from weft.train.policy import Policy, Scored


def policy_of(folder: Path, **settings: Any) -> Policy:
    config = resolve(read_settings(str(folder), {"dtype": "float64", "threads": 1, **settings}))
    return Policy(config, progress=False)


def some_sequences() -> list[Scored]:
    """Return three sequences of 9, 40 and 23 tokens, longer than blocks and windows."""
    generator = torch.Generator().manual_seed(5)
    lengths = ((9, 4), (40, 11), (23, 1))
    return [
        Scored(torch.randint(VOCAB, (length,), generator=generator).tolist(), first)
        for length, first in lengths
    ]


def weighted(logprobs: list[torch.Tensor]) -> torch.Tensor:
    """Return a sum with another weight for each logprob, so that a mix-up of rows changes the gradients."""
    return sum((one * torch.linspace(-1, 2, len(one), dtype=one.dtype)).sum() for one in logprobs)


def reference_gradients(folder: Path, sequences: list[Scored]) -> dict[str, torch.Tensor]:
    """Return the gradients of ``weighted`` in transformers, float64, by name."""
    import transformers

    extra = {"experts_implementation": "eager"} if "moe" in folder.name else {}
    model = transformers.AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float64, attn_implementation="eager", **extra
    )
    made = []
    for ids, first in sequences:
        logits = model(torch.tensor([ids]), use_cache=False).logits[0]
        tokens = torch.tensor(ids[first:]).unsqueeze(1)
        made.append(logits[first - 1 : -1].double().log_softmax(-1).gather(1, tokens).squeeze(1))
    weighted(made).backward()
    return {name: one.grad for name, one in model.named_parameters() if one.grad is not None}


@mostly_slow("shape", ["qwen3_moe", "llama", "qwen2_windowed", "mistral"], 1)
def test_gradients_equal_those_of_transformers(tmp_path: Path, shape: str) -> None:
    folder = make_checkpoint(tmp_path, shape)
    sequences = some_sequences()
    expected = reference_gradients(folder, sequences)
    policy = policy_of(folder)
    weighted(policy.logprobs(sequences)).backward()
    policy.gather()
    found = _as_reference(dict(policy.gradients()), expected)
    assert found.keys() == expected.keys()
    for name, gradient in expected.items():
        # transformers rounds parts of its float64 models (rotary angles, router) to float32.
        scale = gradient.abs().max().item()
        assert scale > 0, name
        assert (found[name] - gradient).abs().max().item() < 2e-5 * scale, name


def _as_reference(
    found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]
) -> dict[str, torch.Tensor]:
    """Return the gradients with experts stacked as in the modules of transformers."""
    for name in [name for name in expected if name not in found]:
        prefix, _, last = name.rpartition(".")
        count = len(expected[name])
        each = {"gate_up_proj": ("gate_proj", "up_proj"), "down_proj": ("down_proj",)}[last]
        found[name] = torch.stack(
            [
                torch.cat([found.pop(f"{prefix}.{expert}.{part}.weight") for part in each])
                for expert in range(count)
            ]
        )
    return found
