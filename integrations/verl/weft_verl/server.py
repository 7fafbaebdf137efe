"""A Weft server: the process, and the routes that a training loop needs."""

from __future__ import annotations

import asyncio
import os
import re
import sys
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

import httpx

from weft.models.weight_source import write_shared
from weft.store.new_weights import SHARED
from weft.store.shared_files import new_token, shared_name

if TYPE_CHECKING:
    import torch

_READY = re.compile(r"weft is ready: (https?://\S+) ")
START_S = 600.0
CALL_S = 1200.0
"""Maximum seconds of one request. Requests wait while the server is paused."""
_TIED = """import ctypes, os, signal, sys
ctypes.CDLL(None).prctl(1, signal.SIGTERM)
os.getppid() == int(sys.argv[1]) and os.execv(sys.argv[2], sys.argv[2:])"""
"""Program that becomes a command, which ends with the parent process: Ray kills actors without a word."""
_KNOWN = {
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "repetition_penalty",
    "presence_penalty",
    "frequency_penalty",
    "seed",
    "stop",
    "stop_token_ids",
    "ignore_eos",
    "min_tokens",
    "include_stop_str_in_output",
}
"""Sampling parameters with the same name in verl and in Weft."""


class Generated(NamedTuple):
    """One output."""

    token_ids: list[int]
    log_probs: list[float] | None
    stop_reason: str
    """"completed" or "aborted"."""


class Server:
    """A running server, by its URL and its admin key."""

    def __init__(self, url: str, admin_key: str) -> None:
        self.url, self.admin_key = url, admin_key
        self._http: httpx.AsyncClient | None = None

    def _client(self) -> httpx.AsyncClient:
        if self._http is None:
            limits = httpx.Limits(max_connections=None)
            keys = {"Authorization": f"Bearer {self.admin_key}"}
            self._http = httpx.AsyncClient(base_url=self.url, timeout=CALL_S, limits=limits, headers=keys)
        return self._http

    async def _post(self, path: str, body: Any = None) -> Any:
        """Return the answer. Raises RuntimeError with the server's message."""
        answer = await self._client().post(path, json=body)
        if answer.status_code != 200:
            raise RuntimeError(f"Weft answered {answer.status_code} to {path}: {answer.text[:500]}")
        return answer.json()

    async def generate(
        self, prompt_ids: list[int], sampling: Mapping[str, Any], max_tokens: int
    ) -> Generated:
        """Return one output of at most ``max_tokens`` tokens. ``sampling``: parameters with verl's names.

        Raises ValueError for a parameter without a meaning here, and RuntimeError.
        """
        params, logprobs = dict(sampling), False
        for name in ("max_tokens", "max_new_tokens"):
            max_tokens = min(max_tokens, params.pop(name, None) or max_tokens)
        logprobs = params.pop("logprobs", False) not in (False, None)
        params.pop("n", None)
        if unknown := sorted(params.keys() - _KNOWN):
            raise ValueError(f"Weft has no sampling parameter {unknown[0]} of verl")
        params["max_tokens"] = max_tokens
        if logprobs:
            params["logprobs"] = 0
        body = {"token_ids": prompt_ids, "sampling_params": params}
        choice = (await self._post("/inference/v1/generate", body))["choices"][0]
        found = None
        if logprobs:
            found = [one["logprob"] for one in (choice["logprobs"] or {"content": []})["content"]]
        aborted = choice["finish_reason"] == "abort"
        return Generated(choice["token_ids"], found, "aborted" if aborted else "completed")

    async def pause(self) -> None:
        """End all requests with the tokens so far. New requests wait for ``resume``."""
        await self._post("/pause?mode=abort")

    async def resume(self) -> None:
        """Let requests run."""
        await self._post("/resume")

    async def clear(self) -> None:
        """Empty the prefix cache."""
        await self._post("/reset_prefix_cache")

    async def sleep(self, level: int) -> None:
        """Give the memory of the KV caches, and at level 2 of the weights, back."""
        await self._post(f"/sleep?level={level}&mode=keep")

    async def wake_up(self, tags: Iterable[str] = ()) -> None:
        """End a sleep; with ``tags`` of one part."""
        query = "&".join(f"tags={one}" for one in tags)
        await self._post("/wake_up" + (f"?{query}" if query else ""))

    async def update(self, tensors: Iterable[tuple[str, torch.Tensor]], version: str) -> None:
        """Replace all weights. The server must run on this host, as this user.

        The memory of a second copy in /dev/shm stays until the next update: a rank that starts again reads
        the copy. The server deletes the copy.
        """
        name = shared_name(os.getpid(), new_token())
        try:
            await asyncio.to_thread(write_shared, name, tensors)
            await self._post("/start_weight_update")
            await self._post("/update_weights", {"update_info": {"name": name}})
            await self._post("/finish_weight_update", {"weight_version": version})
        except BaseException:
            (SHARED / name).unlink(missing_ok=True)
            raise

    async def close(self) -> None:
        """Close the connections."""
        if self._http is not None:
            await self._http.aclose()


def arguments(model: str, config: Any) -> list[str]:
    """Return the arguments of ``weft serve`` for verl's rollout ``config``.

    ``config.engine_kwargs["weft"]`` adds flags: {"max_num_seqs": 64} is ``--max-num-seqs 64``.
    """
    words = {
        "port": 0,
        "dtype": config.dtype,
        "tensor-parallel-size": config.tensor_model_parallel_size,
        "data-parallel-size": config.data_parallel_size,
        "max-model-len": config.max_model_len or config.prompt_length + config.response_length,
        "max-num-seqs": config.max_num_seqs,
        "logprobs-mode": config.logprobs_mode or "processed_logprobs",
    }
    more = dict((config.engine_kwargs or {}).get("weft") or {})
    words |= {name.replace("_", "-"): value for name, value in more.items()}
    flags = [word for name, value in words.items() for word in (f"--{name}", str(value))]
    return [sys.executable, "-m", "weft", "serve", model, *flags]


class Process:
    """The process of a server. Ends with the process that started the server, or by ``close``."""

    def __init__(self) -> None:
        self._process: asyncio.subprocess.Process | None = None
        self._reader: asyncio.Task[None] | None = None

    async def start(self, command: list[str], admin_key: str) -> str:
        """Start the server, and return its URL. Raises RuntimeError if the server does not become ready, and
        TimeoutError after ``START_S``; no process runs then."""
        environment = os.environ | {"WEFT_ADMIN_KEY": admin_key}  # all users of the host can read arguments
        words = [sys.executable, "-c", _TIED, str(os.getpid()), *command]
        self._process = await asyncio.create_subprocess_exec(
            *words, stdout=asyncio.subprocess.PIPE, env=environment
        )
        stdout = self._process.stdout
        assert stdout is not None
        try:
            async with asyncio.timeout(START_S):
                while line := (await stdout.readline()).decode():
                    if found := _READY.search(line + " "):
                        self._reader = asyncio.create_task(_drain(stdout))
                        return found[1]
            raise RuntimeError(f"weft serve ended with status {await self._process.wait()}")
        except BaseException:
            await self.close()
            raise

    async def close(self) -> None:
        """End the server."""
        if self._process is not None and self._process.returncode is None:
            self._process.terminate()
            await self._process.wait()


async def _drain(stream: asyncio.StreamReader) -> None:
    while await stream.readline():
        pass
