"""Calls of a server that takes new weights, and a trainer that broadcasts weights to the server.

The trainer is rank 0 of a gloo group, in the test's process or its own.
"""

from __future__ import annotations

import multiprocessing
import os
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from multiprocessing.context import SpawnProcess
from pathlib import Path
from typing import Any

import httpx

from tests.support.new_weights import Tensors, read_tensors
from tests.support.servers import Running
from tests.support.slowness import deadline
from weft.models.weight_group import WeightGroup, announce, send, update_info
from weft.types.weights import TrainerGroup

ADMIN = {"Authorization": "Bearer admin"}
ARGUMENTS = (
    "spool-text",
    "--admin-key",
    "admin",
    "--dtype",
    "bfloat16",
    "--threads",
    "1",
    "--max-num-seqs",
    "4",
)
PROMPT = "Question: Tom has 12 apples and buys 7 more.\nAnswer:"


def free_port() -> int:
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        port: int = one.getsockname()[1]
        return port


def post(server: Running, path: str, body: Any = None) -> httpx.Response:
    return httpx.post(server.url + path, json=body, headers=ADMIN, timeout=deadline(120))


def complete(server: Running, **more: Any) -> dict[str, Any]:
    """Return the choice of a completion of ``PROMPT``, with token ids and logprobs."""
    body = {"prompt": PROMPT, "temperature": 0, "max_tokens": 12, "return_token_ids": True, "logprobs": 0}
    answer = httpx.post(
        server.url + "/v1/completions", json=body | {"ignore_eos": True} | more, timeout=deadline(60)
    )
    assert answer.status_code == 200, answer.text
    choice: dict[str, Any] = answer.json()["choices"][0]
    return choice


@contextmanager
def beside(call: Callable[[], httpx.Response]) -> Iterator[list[httpx.Response]]:
    """Run ``call`` in a thread. The list has the answer after the block."""
    answers: list[httpx.Response] = []
    thread = threading.Thread(target=lambda: answers.append(call()))
    thread.start()
    yield answers
    thread.join(deadline(130))
    assert answers


def group_info(port: int, ranks: int, **more: Any) -> dict[str, Any]:
    address = {"master_address": "127.0.0.1", "master_port": port, "rank_offset": 1, "world_size": 1 + ranks}
    return address | {"timeout": deadline(20)} | more


def trainer_group(info: dict[str, Any]) -> TrainerGroup:
    return TrainerGroup(
        backend="gloo",
        address=info["master_address"],
        port=info["master_port"],
        world_size=info["world_size"],
        seconds=info["timeout"],
    )


class Trainer:
    """Rank 0, in this process."""

    def __init__(self, server: Running, **more: Any) -> None:
        """Form the group with all ranks of ``server``."""
        self.server = server
        ranks = httpx.get(server.url + "/get_world_size", headers=ADMIN).json()["world_size"]
        info = group_info(free_port(), ranks, **more)
        with beside(lambda: post(server, "/init_weight_transfer_engine", {"init_info": info})) as answers:
            self.group = WeightGroup(trainer_group(info), 0)
        assert answers[0].status_code == 200, answers[0].text

    def send(
        self, tensors: Tensors, packed: bool = False, partial: bool = False, **more: Any
    ) -> httpx.Response:
        """Send one source of an update, and return the answer. ``more``: other fields of ``update_info``."""
        pairs = list(tensors.items())
        announced = announce(pairs, packed, buffer_bytes=1 << 16)
        body = {"update_info": {**update_info(announced), "partial": partial, **more}}
        with beside(lambda: post(self.server, "/update_weights", body)) as answers:
            send(self.group, pairs, announced)
        return answers[0]

    def update(self, tensors: Tensors, label: str | None = None, **more: Any) -> httpx.Response:
        """Change the weights of the server."""
        assert post(self.server, "/start_weight_update").status_code == 200
        if (answer := self.send(tensors, **more)).status_code != 200:
            return answer
        return post(self.server, "/finish_weight_update", {"weight_version": label})


def _train(info: dict[str, Any], folder: str, count: int) -> None:
    """Send ``count`` tensors, and die without a word."""
    group = WeightGroup(trainer_group(info), 0)
    pairs = list(read_tensors(Path(folder)).items())
    send(group, pairs[:count], announce(pairs[:count]))
    os._exit(9)


def dying_trainer(info: dict[str, Any], folder: Path, count: int) -> SpawnProcess:
    """Start a trainer in a process of its own that dies after ``count`` tensors."""
    made = multiprocessing.get_context("spawn").Process(target=_train, args=(info, str(folder), count))
    made.start()
    return made
