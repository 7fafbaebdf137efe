"""The policy: gradients of transformers, logprobs of the engine, weights that an engine can load."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from tests.models.conftest import CPU, Checkpoint, make_checkpoint
from tests.support.slow import mostly_slow
from weft.api.settings import read_settings
from weft.common.errors import ConfigError, EngineDead
from weft.config.families import load_spec
from weft.config.resolve import resolve
from weft.models.loader import load_model, load_plain
from weft.train.checkpoints import write_model
from weft.train.masters import Masters, Published
from weft.train.policy import Policy, Scored
from weft.train.recorded import RecordingBuild

#: Traits: experts, window, sinks, norms at other places, capped scores, weights in another order, biases.
CASES = (
    *("qwen3-moe", "gpt-oss", "gemma2", "gemma3", "phi3-partial-window", "olmo3", "glm4-moe", "hunyuan"),
    *("cohere2", "ernie-moe", "minimax-m2", "starcoder2", "qwen2-moe", "apertus", "mixtral", "llama"),
)


def policy_of(folder: str, **settings: Any) -> Policy:
    """Return the policy of a checkpoint, in float64 by default."""
    given = {"dtype": "float64", "threads": 1, "max_model_len": 128, **settings}
    return Policy(resolve(read_settings(folder, given)), progress=False)


def some_sequences() -> list[Scored]:
    """Return three sequences of 9, 40 and 23 tokens, longer than blocks and windows."""
    generator = torch.Generator().manual_seed(5)
    lengths = ((9, 4), (40, 11), (23, 1))
    return [
        Scored(torch.randint(3, 97, (length,), generator=generator).tolist(), first)
        for length, first in lengths
    ]


def weighted(logprobs: list[torch.Tensor]) -> torch.Tensor:
    """Return a sum with another weight for each logprob, so that a mix-up of rows changes the gradients."""
    return torch.stack(
        [(one * torch.linspace(-1, 2, len(one), dtype=one.dtype)).sum() for one in logprobs]
    ).sum()


def reference_gradients(made: Checkpoint, sequences: list[Scored], folder: Path) -> dict[str, torch.Tensor]:
    """Return the gradients of ``weighted`` in transformers, float64, by published name."""
    model = made.reference_in_float64()
    logprobs = []
    for ids, first in sequences:
        logits = model(torch.tensor([ids]), use_cache=False).logits[0]
        tokens = torch.tensor(ids[first:]).unsqueeze(1)
        logprobs.append(logits[first - 1 : -1].double().log_softmax(-1).gather(1, tokens).squeeze(1))
    weighted(logprobs).backward()
    for one in model.parameters():
        one.data = torch.zeros_like(one) if one.grad is None else one.grad
    # transformers saves the gradients as weights: under the published names, and in their layout.
    model.save_pretrained(folder)
    return load_file(folder / "model.safetensors")


@mostly_slow("name", CASES, 1)
def test_gradients_equal_those_of_transformers(tmp_path: Path, name: str) -> None:
    made = make_checkpoint(name, tmp_path / "model")
    sequences = some_sequences()
    expected = reference_gradients(made, sequences, tmp_path / "gradients")
    policy = policy_of(made.folder)
    weighted(policy.logprobs(sequences)).backward()
    policy.gather()
    found = policy.gradients()
    for tensor, gradient in found.items():
        # transformers rounds parts of its float64 models (rotary angles, routers) to float32.
        scale = expected[tensor].abs().max().item()
        assert (gradient - expected[tensor]).abs().max().item() <= 2e-5 * scale, tensor
    # An expert without tokens has no gradient.
    assert sum(bool(gradient.any()) for gradient in found.values()) > 0.9 * len(found)


@mostly_slow("name", (*CASES, "granite-moe-shared", "phi3-long", "gemma4-inputs"), 1)
def test_gradients_are_the_slope_of_the_forward_pass(tmp_path: Path, name: str) -> None:
    made = make_checkpoint(name, tmp_path / "model")
    made.reference_in_float64().save_pretrained(tmp_path / "exact")
    policy = policy_of(str(tmp_path / "exact"))
    sequences = some_sequences()
    weighted(policy.logprobs(sequences)).backward()
    policy.gather()
    generator = torch.Generator().manual_seed(3)
    expected = 0.0
    step = 1e-6
    directions = {}
    for key, one in policy.parameters.items():
        directions[key] = (
            torch.randn(one.shape, dtype=one.dtype, generator=generator) * one.detach().abs().mean()
        )
        expected += (one.grad * directions[key]).sum().item()
    values = []
    for sign in (1, -2):
        with torch.no_grad():
            for key, one in policy.parameters.items():
                one.add_(directions[key], alpha=sign * step)
            policy.settle()
            values.append(weighted(policy.logprobs(sequences)).item())
    assert abs((values[0] - values[1]) / (2 * step) - expected) < 1e-6 * abs(expected)


@pytest.mark.parametrize("op", ["moe", "moe_fp8"])
def test_blocks_with_gradients_have_no_terms(op: str) -> None:
    """Terms would pass by the gradients, or by the error of an op without gradients."""
    build = RecordingBuild(dtype=torch.bfloat16, device=torch.device("cuda"), masters=Masters())
    assert build.op(op).terms is None


@mostly_slow("name", ("gemma3", "gpt-oss", "starcoder2", "olmoe", "phi"), 1)
def test_a_loader_of_the_published_tensors_gets_the_weights_of_the_policy(tmp_path: Path, name: str) -> None:
    made = make_checkpoint(name, tmp_path / "model")
    masters = Masters()
    spec = load_spec(made.folder, None)
    build = RecordingBuild(dtype=torch.bfloat16, device=CPU, masters=masters)
    model, weights, files = load_plain(made.folder, spec, build, progress=False)
    masters.add(model.named_parameters())
    published = Published(masters, weights, files)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for master in masters:
            master.value.add_(torch.randn(master.value.shape, generator=generator))
    published.apply()
    write_model(tmp_path / "changed", Path(made.folder), published.tensors())
    loaded = load_model(str(tmp_path / "changed"), spec, torch.bfloat16, CPU, progress=False, pack=False)
    own = dict(loaded.named_parameters())
    assert own.keys() == {master.name for master in masters}
    for master in masters:
        assert torch.equal(own[master.name], master.plain), master.name
        assert (master.plain.float() - master.value).abs().max() < 0.05


@mostly_slow("name, gate", [("glm4-moe", ".router."), ("qwen2-moe", ".shared.gate")], 1)
def test_scores_that_underflow_have_finite_gradients(tmp_path: Path, name: str, gate: str) -> None:
    policy = policy_of(make_checkpoint(name, tmp_path / "model").folder, dtype="float32")
    changed = [one for key, one in policy.parameters.items() if gate in key]
    assert changed, list(policy.parameters)
    with torch.no_grad():
        for one in changed:
            one.mul_(1e4)  # exp(-logit) of many experts is infinite
    policy.settle()
    weighted(policy.logprobs(some_sequences())).backward()
    policy.gather()
    for key, one in policy.parameters.items():
        assert one.grad is not None
        assert one.grad.isfinite().all(), key


def test_a_parameter_without_gradient_is_named(tmp_path: Path) -> None:
    policy = policy_of(make_checkpoint("llama", tmp_path / "model").folder)
    with pytest.raises(EngineDead, match=r"no gradient reached embedding\.weight"):
        policy.gather()


@pytest.mark.parametrize(
    ("name", "settings", "message"),
    [
        ("deepseek-v3", {}, "a cache of the kind 'latent' has no gradient"),
        ("qwen3-moe", {"quantization": "int8", "dtype": "float32"}, "leave out --quantization"),
        ("qwen3-moe", {"tensor_parallel_size": 2}, "leave out --tensor-parallel-size"),
    ],
)
def test_models_that_cannot_be_trained_are_refused(
    tmp_path: Path, name: str, settings: dict[str, Any], message: str
) -> None:
    folder = make_checkpoint(name, tmp_path / "model").folder
    with pytest.raises(ConfigError, match=message):
        policy_of(folder, **settings)
