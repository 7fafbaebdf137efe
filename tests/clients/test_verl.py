"""verl's rollout interface (integrations/verl) against a server."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.support.new_weights import changed, read_tensors
from tests.support.slowness import deadline
from weft.config.hub import bundled_models
from weft.store.new_weights import SHARED
from weft.store.shared_files import shared_name

pytestmark = pytest.mark.clients
ROOT = Path(__file__).parents[2]
BASE = Path(bundled_models()["spool-text"])
PROMPT = [5, 17, 9, 4, 33, 8]
SAMPLING = {"temperature": 0.0, "top_p": 1.0, "top_k": -1, "repetition_penalty": 1.0, "logprobs": True}
MORE = {"threads": 1, "kv_cache_memory": "16M", "max_num_seqs": 4}


def ours() -> list[Path]:
    """Return the files of this process in shared memory."""
    return list(SHARED.glob(shared_name(os.getpid(), "*")))


@pytest.fixture(autouse=True)
def adapter(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(ROOT / "integrations" / "verl")


def settings(**more: Any) -> Any:
    return SimpleNamespace(
        dtype="bfloat16",
        tensor_model_parallel_size=1,
        data_parallel_size=1,
        max_model_len=256,
        max_num_seqs=8,
        prompt_length=128,
        response_length=128,
        logprobs_mode="processed_logprobs",
        free_cache_engine=True,
        engine_kwargs={"weft": MORE},
        **more,
    )


def test_a_server_generates_updates_aborts_and_sleeps() -> None:
    """Without verl: the routes, and the process of a server."""
    from weft_verl.server import Process, Server, arguments  # type: ignore[import-not-found]

    old = read_tensors(BASE)

    async def run() -> None:
        process = Process()
        try:
            server = Server(await process.start(arguments(str(BASE), settings()), "key"), "key")
            first = await server.generate(PROMPT, SAMPLING, 16)
            assert len(first.token_ids) == len(first.log_probs) <= 16
            assert first.stop_reason == "completed"
            await server.update(changed(old, 1).items(), "1")
            second = await server.generate(PROMPT, SAMPLING, 16)
            assert second.token_ids != first.token_ids
            await server.sleep(1)
            await server.update(old.items(), "2")
            await server.wake_up(["weights"])
            await server.wake_up(["kv_cache"])
            assert await server.generate(PROMPT, SAMPLING, 16) == first
            with pytest.raises(ValueError, match="best_of"):
                await server.generate(PROMPT, {"best_of": 2}, 4)
            begun = asyncio.create_task(server.generate(PROMPT, SAMPLING | {"ignore_eos": True}, 200))
            await asyncio.sleep(0.1)
            await server.pause()
            cut = await begun
            assert cut.stop_reason == "aborted"
            assert len(cut.log_probs) == len(cut.token_ids) < 200
            waiting = asyncio.create_task(server.generate(PROMPT, SAMPLING, 16))
            await server.clear()
            await asyncio.sleep(0.2)
            assert not waiting.done()
            await server.resume()
            assert await waiting == first
            await server.close()
            assert ours()
        finally:
            await process.close()
        assert not ours()

    asyncio.run(run())


def test_a_server_ends_with_the_process_that_started_it() -> None:
    """Ray kills an actor without a word."""
    script = """import asyncio, os, signal
from weft_verl.server import Process
async def run():
    process = Process()
    sleep = ["/bin/sh", "-c", "echo weft is ready: http://$$ now; exec sleep 60"]
    print(await process.start(sleep, "key"), flush=True)
    os.kill(os.getpid(), signal.SIGKILL)
asyncio.run(run())"""
    path = f"{ROOT / 'integrations' / 'verl'}:{ROOT}"
    command = [sys.executable, "-c", script]
    found = subprocess.run(
        command, env=os.environ | {"PYTHONPATH": path}, stdout=subprocess.PIPE, check=False
    )
    pid = int(found.stdout.decode().strip().removeprefix("http://"))
    until = time.monotonic() + deadline(10)
    while Path(f"/proc/{pid}").exists():
        assert time.monotonic() < until
        time.sleep(0.02)


@pytest.fixture
def verl(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    pytest.importorskip("verl", reason="verl is not installed")
    ray = pytest.importorskip("ray")
    path = f"{ROOT / 'integrations' / 'verl'}:{ROOT}:" + ":".join(one for one in sys.path if "site" in one)
    monkeypatch.setenv("PYTHONPATH", path)
    monkeypatch.setenv("RAY_AUTH_MODE", "disabled")  # no token in the home directory
    ray.init(num_cpus=4, include_dashboard=False, log_to_driver=True)
    yield ray
    ray.shutdown()


def test_a_replica_of_verl(verl: Any) -> None:
    """verl's registries find the classes. A replica starts a server, and gets weights from the trainer."""
    import weft_verl.plugin  # type: ignore[import-not-found] # noqa: F401
    from verl.workers.config import HFModelConfig, RolloutConfig  # type: ignore[import-not-found]
    from verl.workers.rollout.base import get_rollout_class  # type: ignore[import-not-found]
    from verl.workers.rollout.replica import (  # type: ignore[import-not-found]
        RolloutMode,
        get_rollout_replica_class,
    )

    config = RolloutConfig(
        name="weft",
        dtype="bfloat16",
        tensor_model_parallel_size=1,
        prompt_length=128,
        response_length=128,
        engine_kwargs={"weft": MORE},
    )
    model = HFModelConfig(path=str(BASE), use_shm=False)

    @verl.remote
    class Worker:
        """Stands for a worker of the trainer: the replica asks for its node only."""

        def ready(self) -> bool:
            return True

    async def run() -> None:
        replica = get_rollout_replica_class("weft")(0, config, model, gpus_per_node=1)
        replica.rollout_mode = RolloutMode.HYBRID
        replica.workers = [Worker.remote()]
        await replica.launch_servers()
        assert replica.server_address.startswith("127.0.0.1:")
        handle = replica.server_handle
        await handle.set_global_steps.remote(7)
        first = await handle.generate.remote(PROMPT, SAMPLING, "a")
        assert len(first.token_ids) == len(first.log_probs) > 0
        assert (first.stop_reason, first.extra_fields) == ("completed", {"global_steps": 7})
        rollout = get_rollout_class("weft")(config, model, None, replica_rank=0)
        old = read_tensors(BASE)
        await rollout.release()
        await rollout.resume(["weights"])
        await rollout.update_weights(iter(changed(old, 1).items()), global_steps=8)
        await rollout.resume(["kv_cache"])
        assert (await handle.generate.remote(PROMPT, SAMPLING, "b")).token_ids != first.token_ids
        await replica.sleep()
        await replica.wake_up()
        await replica.release_kv_cache()
        await replica.resume_kv_cache()
        await replica.abort_all_requests(reject_request=True)
        assert (await handle.generate.remote(PROMPT, SAMPLING, "c")).stop_reason == "aborted"
        await replica.resume_generation()
        await replica.clear_kv_cache()
        await rollout.update_weights(iter(old.items()))
        assert (await handle.generate.remote(PROMPT, SAMPLING, "d")).token_ids == first.token_ids

    asyncio.run(run())
