"""Encode groups as processes: equal answers, floods of requests, and killed encoders."""

from __future__ import annotations

import os
import re
import signal
import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.cli.test_serve import Server, start
from tests.cli.test_up import EXAMPLES, Clients, engines, until
from tests.cli.test_up_roles import ends_in_order, metric
from tests.support.pictures import image_file, image_part
from tests.support.processes import is_alive, with_role
from tests.support.slowness import deadline

__all__ = ["start"]

MODEL = "spool-vision"
LINE = (EXAMPLES / "line.png").read_bytes()
SETTINGS = "dtype: float64\nkv-cache-memory: 64M\nmax-model-len: 1024\nmax-num-seqs: 16\n"


@cache
def picture(number: int) -> bytes:
    """A file; 0 is a line of text, others are noise of several sizes."""
    return LINE if number == 0 else image_file((48 + 16 * (number % 5), 32 + 16 * (number % 3)), seed=number)


def asked(images: Sequence[int], tokens: int = 8, **more: Any) -> dict[str, Any]:
    parts = [image_part(picture(number)) for number in images]
    content = [*parts, {"type": "text", "text": "Read the line."}]
    message = {"role": "user", "content": content}
    return {"model": MODEL, "messages": [message], "max_tokens": tokens, "temperature": 0, **more}


def ask(base: str, images: Sequence[int], **more: Any) -> tuple[str, ...]:
    """The choices of one request."""
    answer = httpx.post(
        f"{base}/v1/chat/completions", json=asked(images, **more), timeout=deadline(120), verify=False
    )
    assert answer.status_code == 200, answer.text
    return tuple(choice["message"]["content"] for choice in answer.json()["choices"])


CASES: list[tuple[tuple[int, ...], dict[str, Any]]] = [
    ((0,), {}),
    ((), {}),
    ((1,), {"temperature": 0.9, "seed": 5, "n": 2}),
    ((2, 0, 3), {}),
    ((2, 0, 3), {"n": 2, "temperature": 0.7, "seed": 1}),  # the images are cached already
    ((4, 5, 6, 7, 8, 9, 10, 4), {}),
]


def answers(base: str) -> list[tuple[str, ...]]:
    """Return the answers in sequence, and assert that concurrent requests get the same answers."""
    said = [ask(base, images, **more) for images, more in CASES]
    with ThreadPoolExecutor(len(CASES)) as pool:
        again = list(pool.map(lambda case: ask(base, case[0], **case[1]), CASES))
    assert again == said
    return said


def of_role(base: str, name: str, role: str) -> dict[str, float]:
    """Return engine -> value of a metric, for engines whose name begins with ``role``."""
    text = httpx.get(f"{base}/metrics", verify=False).text
    found = re.findall(rf'^weft:{name}\{{.*head="({role}\d+)".*\}} (.*)$', text, re.MULTILINE)
    return {engine: float(value) for engine, value in found}


def all_engines(server: Server) -> dict[str, int]:
    """Return the process id of each engine by name."""
    found = {}
    for pid in with_role(server.process.pid, "head"):
        title = Path(f"/proc/{pid}/cmdline").read_bytes().decode().split("\0")[0]
        if named := re.match(r"weft: head (\w+)", title):
            found[named[1]] = pid
    return found


class Askers(Clients):
    """Threads that repeatedly send requests with changing images and compare the answers."""

    ends_s = 150.0

    def __init__(self, base: str, count: int = 4) -> None:
        super().__init__(base, count)
        self._lock = threading.Lock()
        self._next = 0
        self.done = 0
        self.said: dict[int, set[tuple[str, ...]]] = {}

    def _run(self) -> None:
        while not self._over.is_set():
            with self._lock:
                self._next += 1
                number = self._next % 40
            try:
                said = ask(self._base, (number, 40 + number // 2), tokens=6)
            except BaseException as error:
                self.errors.append(error)
                return
            with self._lock:
                self.said.setdefault(number, set()).add(said)
                self.done += 1

    def check(self) -> None:
        """Nothing failed, and equal questions got equal answers."""
        assert not self.errors, self.errors[0]
        assert all(len(said) == 1 for said in self.said.values())


@pytest.fixture(scope="module")
def due(tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[tuple[str, ...]]]:
    """Yield the answers of a unified group."""
    folder = tmp_path_factory.mktemp("alone")
    server = Server(folder, *up(folder, "{}"), command="up")
    try:
        yield answers(server.url())
    finally:
        server.close()


def up(folder: Path, *groups: str, **settings: Any) -> list[str]:
    """Arguments of ``weft up``."""
    more = "".join(f"{name.replace('_', '-')}: {value}\n" for name, value in settings.items())
    file = folder / "topology.yaml"
    file.write_text(f"model: {MODEL}\n{SETTINGS}{more}groups: [{', '.join(groups)}]\n")
    return [str(file), "--port", "0"]


ENCODE, PREFILL, DECODE = "{role: encode}", "{role: prefill}", "{role: decode}"


@pytest.mark.requirement("D24")
def test_the_same_answers_with_one_group_of_each_role(
    start: Any, tmp_path: Path, due: list[tuple[str, ...]]
) -> None:
    server = start(*up(tmp_path, ENCODE, PREFILL, DECODE), command="up")
    base = server.url()
    assert answers(base) == due
    images = {number for numbers, _ in CASES for number in numbers}
    assert of_role(base, "images_encoded_total", "encode") == {"encode0": len(images)}
    assert set(of_role(base, "images_encoded_total", "prefill").values()) == {0}
    assert metric(base, "embedding_transfers_failed_total") == 0
    assert metric(base, "embedding_transfers_done_total") >= 2 * len(images)  # both ends count
    assert metric(base, "transfers_failed_total") == 0
    assert httpx.get(f"{base}/health").json() == {"status": "alive"}
    ends_in_order(server)


@pytest.mark.requirement("D21", "D22", "D23")
@pytest.mark.slow
def test_a_flood_at_the_first_second_and_encoders_that_die(start: Any, tmp_path: Path) -> None:
    """All requests are answered before, during and after the death of an encoder, and by its replacement."""
    server = start(*up(tmp_path, "{role: encode, count: 2}", PREFILL, DECODE), command="up")
    base = server.url()
    with ThreadPoolExecutor(24) as pool:  # nothing is warm
        flood = list(pool.map(lambda number: ask(base, (number, number + 1), tokens=4), range(24)))
    assert len(flood) == 24
    with Askers(base) as askers:
        until(server, lambda: askers.done > 8 or askers.errors)
        os.kill(all_engines(server)["encode0"], signal.SIGKILL)
        until(server, lambda: "engine encode0 is back" in server.log.read_text() or askers.errors)
        until(server, lambda: of_role(base, "images_encoded_total", "encode")["encode0"] > 2 or askers.errors)
    askers.check()
    assert [ask(base, (number, number + 1), tokens=4) for number in range(4)] == flood[:4]
    ends_in_order(server)


@pytest.mark.slow
@pytest.mark.requirement("D18", "D23")
@pytest.mark.parametrize("tower", [pytest.param(True, marks=pytest.mark.grid), False])
def test_without_anyone_to_encode_images_wait_or_go_to_a_tower(tower: bool, start: Any) -> None:
    """A unified group and an encode group: without an encoder, images wait or go to a tower; text never
    waits.
    """
    arguments = [MODEL, "--encode", "1", "--port", "0", "--max-num-seqs", "8", "--kv-cache-memory", "32M"]
    arguments += ["--dtype", "float64", "--max-model-len", "512", "--role-timeout", str(deadline(60))]
    server = start(*arguments, *(["--no-language-model-only"] if tower else []))
    base = server.url()
    said = ask(base, (0,))
    pid = all_engines(server)["encode0"]
    os.kill(pid, signal.SIGSTOP)  # the encoder is stopped
    with ThreadPoolExecutor(2) as pool:
        waits = pool.submit(ask, base, (1,))
        assert ask(base, ()) == ask(base, ())
        assert not waits.done()
        os.kill(pid, signal.SIGKILL)
        assert waits.result()
    assert of_role(base, "images_encoded_total", "unified") == {"unified0": float(tower)}
    assert ask(base, (0,)) == said
    ends_in_order(server)


@pytest.mark.requirement("D24")
@pytest.mark.grid
@pytest.mark.parametrize(
    "groups",
    [
        ("{role: encode, count: 2}", PREFILL, DECODE),
        (ENCODE, "{role: prefill, tp: 2}", DECODE),
        (ENCODE, "{role: unified}"),
        ("{role: encode, tp: 2}", "{role: unified, tp: 2}"),
        (ENCODE, "{role: prefill, count: 2}", "{role: decode, count: 2}"),
        (ENCODE, "{role: prefill, speculative-method: mtp}", "{role: decode, speculative-method: mtp}"),
        (ENCODE, "{role: prefill, long-prefill-token-threshold: 16}", DECODE),
        (ENCODE, "{role: prefill, dp: 2, ep: true}", DECODE),
    ],
    ids=["2e1p1d", "tp2", "unified", "encode-tp2", "1e2p2d", "drafts", "chunks", "experts"],
)
def test_the_same_answers_in_other_topologies(
    groups: tuple[str, ...], start: Any, tmp_path: Path, due: list[tuple[str, ...]]
) -> None:
    server = start(*up(tmp_path, *groups), command="up")
    base = server.url()
    assert answers(base) == due
    assert metric(base, "embedding_transfers_failed_total") == 0
    ends_in_order(server)


@pytest.mark.requirement("D25")
@pytest.mark.slow
def test_a_burst_with_little_room_for_embeddings(start: Any, tmp_path: Path) -> None:
    """Concurrency 32, each with three images, of which the pools of both ends hold a few."""
    settings = {"mm_cache_bytes": "256K", "max_queued_requests": 256}
    server = start(*up(tmp_path, "{role: encode, count: 2}", PREFILL, DECODE, **settings), command="up")
    base = server.url()
    for width in (4, 8, 16, 32):
        with ThreadPoolExecutor(width) as pool:
            cases = [(3 * n, 3 * n + 1, 3 * n + 2) for n in range(width)]
            assert len(list(pool.map(lambda case: ask(base, case, tokens=3), cases))) == width
    until(server, lambda: metric(base, "embedding_transfers_open") == 0)
    assert ask(base, (0,))
    ends_in_order(server)


@pytest.mark.requirement("D24")
@pytest.mark.slow
@pytest.mark.parametrize("name", ["internvl", "llama4"])
def test_tiles_of_one_image_are_encoded_by_two_groups(name: str, start: Any, tmp_path: Path) -> None:
    """A model from a folder, with a tower of transformers. Equal answers as by one group."""
    from tests.text.test_tiled_chat import write_folder  # imports transformers

    model = tmp_path / "model"
    model.mkdir()
    write_folder(model, name)
    arguments = [str(model), "--served-model-name", MODEL, "--port", "0", "--dtype", "float64"]
    arguments += ["--kv-cache-memory", "64M", "--max-model-len", "512", "--max-num-seqs", "8"]
    alone = Server(tmp_path, *arguments)
    try:
        expected = answers(alone.url())
    finally:
        alone.close()
    server = start(*arguments, "--encode", "2", "--prefill", "1", "--decode", "1")
    base = server.url()
    assert answers(base) == expected
    assert len({*expected}) > 3, "the model says the same to every prompt"
    assert all(of_role(base, "images_encoded_total", "encode").values()), "one group encodes everything"
    assert set(of_role(base, "images_encoded_total", "prefill").values()) == {0}
    assert metric(base, "embedding_transfers_failed_total") == 0
    ends_in_order(server)


@pytest.mark.grid
def test_a_rolling_restart_with_groups_that_encode(start: Any, tmp_path: Path) -> None:
    server = start(
        *up(tmp_path, ENCODE, PREFILL, DECODE, role_timeout=deadline(60)), "--fronts", "2", command="up"
    )
    base = server.url()
    before = engines(server)
    with Askers(base, 3) as askers:
        until(server, lambda: askers.done > 3 or askers.errors)
        server.process.send_signal(signal.SIGUSR1)
        until(server, lambda: "decode0 is restarted" in server.log.read_text() or askers.errors, 200)
    askers.check()
    assert not any(is_alive(pid) for pid in before)
    ends_in_order(server)
