"""TRL's asynchronous GRPO: its rollout worker, its client and its trainer train against a server."""

from __future__ import annotations

import copy
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support.servers import Running, Servers
from tests.support.slowness import deadline
from weft.config.hub import bundled_models

pytestmark = [pytest.mark.clients, pytest.mark.requirement("F67")]
BASE = Path(bundled_models()["spool-text"])
GUIDE = Path(__file__).parents[2] / "docs" / "guides" / "training-loops.md"
PROMPTS = ("Question: Tom has 12 apples and buys 7 more.\nAnswer:", "Question: Ann has 5 pens.\nAnswer:")
TOKENS = 24
LORA = ("--max-loras", "4", "--max-lora-rank", "8", "--allow-lora-updates")


def short(completions: list[Any], **more: Any) -> list[float]:
    """Reward short completions. TRL's process for rollouts imports this function."""
    return [-float(len(str(one))) for one in completions]


@pytest.fixture(scope="module")
def trl() -> Any:
    for package in ("trl", "datasets", "aiohttp", "peft"):
        pytest.importorskip(package, reason=f"{package} is not installed: make test-clients")
    os.environ.setdefault("TRL_EXPERIMENTAL_SILENCE", "1")
    from accelerate import PartialState
    from trl.experimental import async_grpo  # type: ignore[import-not-found]

    PartialState(cpu=True)  # the loggers of TRL need the state
    return async_grpo


@pytest.fixture(autouse=True)
def without_vllm(trl: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """The worker refuses to start where the package vllm is not installed, which it does not use."""
    monkeypatch.setattr("trl.experimental.async_grpo.async_rollout_worker.is_vllm_available", lambda: True)


@pytest.fixture(scope="module")
def server(servers: Servers) -> Running:
    """A server with both keys, as the URL of a trainer names them."""
    return servers.weft(
        *("spool-text", "--api-key", "user", "--admin-key", "admin", "--dtype", "float32", "--threads", "1"),
        *("--served-model-name", str(BASE), "--max-num-seqs", "8", *LORA),
    )


def with_keys(server: Running, keys: str = "user:admin") -> str:
    return server.url.replace("http://", f"http://{keys}@")


def transfer(url: str) -> Any:
    """Return the transfer of the guide."""
    section = GUIDE.read_text().split("## TRL")[1].split("\n## ")[0]
    code = section.split("```python\n")[1].split("```")[0]
    names: dict[str, Any] = {}
    exec(code, names)
    return names["SharedMemoryTransfer"](url)


@contextmanager
def rollouts(server: Running, **more: Any) -> Iterator[Any]:
    """Start TRL's rollout worker, and the process in which TRL generates."""
    from transformers import AutoTokenizer
    from trl.chat_template_utils import qwen3_template  # type: ignore[import-not-found]
    from trl.experimental.async_grpo.async_rollout_worker import (  # type: ignore[import-not-found]
        AsyncRolloutWorker,
    )

    tokenizer = AutoTokenizer.from_pretrained(BASE)
    tokenizer.response_template = qwen3_template  # TRL knows the templates of published models alone
    worker = AsyncRolloutWorker(
        model_name=str(BASE),
        dataset=[{"prompt": [{"role": "user", "content": one}]} for one in PROMPTS],
        reward_funcs=[short],
        processing_class=tokenizer,
        eos_token_ids=[2],
        num_generations=2,
        max_inflight_tasks=4,
        vllm_server_url=with_keys(server),
        max_tokens=TOKENS,
        queue_maxsize=8,
        child_ready_timeout=int(deadline(120)),
        **more,
    )
    try:
        yield worker
    finally:
        worker.stop()


def next_of(worker: Any, version: int) -> Any:
    """Return the next sample that began under a version of the policy."""
    for _ in range(64):
        sample = worker.rollout_buffer.get(timeout=deadline(60))
        worker.check_health(deadline(60))
        if sample.model_version == version:
            return sample
    raise AssertionError(f"no sample of version {version}")


def own_logprobs(model: Any, sample: Any) -> torch.Tensor:
    """Return the logprobs of transformers of the completion."""
    ids = torch.as_tensor(sample.input_ids)
    with torch.no_grad():
        logits = model(ids[None]).logits[0, :-1].double()
    found = torch.log_softmax(logits, -1).gather(1, ids[1:, None])[:, 0]
    return found[torch.as_tensor(sample.completion_mask[1:]).bool()]


def rolled_out(sample: Any) -> torch.Tensor:
    """Return the logprobs of the server of the completion."""
    return torch.as_tensor(sample.old_log_probs)[torch.as_tensor(sample.completion_mask).bool()].double()


def check(model: Any, sample: Any) -> None:
    assert 0 < sample.completion_mask.sum() <= TOKENS
    torch.testing.assert_close(rolled_out(sample), own_logprobs(model, sample), atol=2e-3, rtol=0)


def test_adapters_of_a_trainer(server: Running, tmp_path: Path) -> None:
    """The steps of TRL's synchronization of adapters: TRL's choice of the way, then pause, save, load,
    resume, unload.
    """
    from accelerate import Accelerator
    from peft import LoraConfig, get_peft_model
    from transformers import AutoModelForCausalLM
    from trl.experimental.async_grpo import AsyncGRPOConfig
    from trl.experimental.async_grpo.async_grpo_trainer import (  # type: ignore[import-not-found]
        save_lora_adapter,
        select_adapter_sync,
    )
    from trl.experimental.async_grpo.vllm_client import VLLMClient  # type: ignore[import-not-found]

    client = VLLMClient(with_keys(server))
    plain = AutoModelForCausalLM.from_pretrained(BASE, dtype=torch.float32)
    model = get_peft_model(
        plain, LoraConfig(r=4, target_modules=["q_proj", "v_proj", "o_proj"], init_lora_weights=False)
    )
    settings = AsyncGRPOConfig(output_dir=str(tmp_path / "out"), max_staleness=2, use_cpu=True, bf16=False)
    assert select_adapter_sync(client.get_server_info(), model, settings)
    client.pause()
    folder = tmp_path / "trl-policy-v1"
    save_lora_adapter(model, Accelerator(cpu=True), "default", str(folder))
    client.load_lora_adapter("trl-policy-v1", str(folder))
    client.resume()
    with rollouts(server, lora_name="trl-policy") as worker:
        worker.update_model_version(1)
        worker.start()
        sample = next_of(worker, 1)
    check(model, sample)
    with model.disable_adapter():
        assert (own_logprobs(model, sample) - rolled_out(sample)).abs().max() > 0.05
    client.unload_lora_adapter("trl-policy-v1")
    client.unload_lora_adapter("trl-policy-v0")  # an unknown name is no error for TRL


def test_nccl_is_refused(server: Running) -> None:
    """A server on a CPU names the backends that it has."""
    from trl.experimental.async_grpo.vllm_client import VLLMClient

    address = {"master_address": "127.0.0.1", "master_port": 1, "rank_offset": 1, "world_size": 2}
    with pytest.raises(Exception, match="nccl needs another device than cpu: use gloo, shm or file"):
        VLLMClient(with_keys(server)).init_weight_transfer_engine(
            {**address, "packed": True, "backend": "nccl"}
        )
    for keys in ("user:wrong", "admin:user", "user:"):
        with pytest.raises(Exception, match="401"):
            VLLMClient(with_keys(server, keys)).pause()


def test_rollouts_follow_new_weights(server: Running) -> None:
    """Samples have the logprobs of the trainer's model, before and after an update amid requests."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(BASE, dtype=torch.float32)
    sync = transfer(with_keys(server))
    sync.init_weight_transfer()
    assert sync.server.get_dtype() == "torch.float32"
    assert sync.server.get_world_size() == 1
    assert sync.server.get_max_model_len() == 2048
    with rollouts(server) as worker:
        worker.start()
        check(model, next_of(worker, 0))
        sync.pause()
        old = copy.deepcopy(model)
        change(model)
        sync.send_weights(iter(model.named_parameters()))
        sync.resume()
        worker.update_model_version(1)
        sample = next_of(worker, 1)
    check(model, sample)
    assert (own_logprobs(old, sample) - rolled_out(sample)).abs().max() > 0.05
    sync.destroy()


def change(model: Any) -> None:
    """Add noise to all weights."""
    random = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for weight in model.parameters():
            weight += 0.2 * weight.std() * torch.randn(weight.shape, generator=random)
