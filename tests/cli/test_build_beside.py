"""``weft serve --build-ops`` compiles the C++ operations while the server already serves."""

from __future__ import annotations

import json
import os
import signal
import threading
import time
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.cli.test_serve import Server, start, until
from tests.support.processes import with_role
from tests.support.slowness import deadline
from weft.common.measurements import cache_folder
from weft.ops.cpu import build

pytestmark = pytest.mark.slow

__all__ = ["start"]

COMPILED, CHANGE = "the C++ operations are compiled", "engines switch to the C++ operations"
QUESTION = "Question: Ann has 3 boxes with 8 pens each. How many pens does she have?\nAnswer:"
TOKENS = 600
"""Tokens of the stream: half a second of torch's operations."""
BODY = {"model": "spool-text", "prompt": "Tom has 12 apples.", "temperature": 0, "ignore_eos": True}


def waiting_compiler(folder: Path) -> Path:
    """Return a compiler that answers ``--version`` at once and compiles once ``folder / go`` exists."""
    path = folder / "waiting-g++"
    path.write_text(
        f'#!/bin/sh\n[ "$1" = --version ] && exec g++ --version\n'
        f'while [ ! -e {folder}/go ]; do sleep 0.05; done\nexec g++ "$@"\n'
    )
    path.chmod(0o755)
    return path


@pytest.fixture
def unbuilt(extension: None, tmp_path: Path) -> dict[str, str]:
    """Return the environment of a machine with compiled objects but no library, so that a build takes
    seconds.
    """
    if build.find_compiler().path.rpartition("/")[2] != "g++":
        pytest.skip("the objects of this machine are not those of g++, which the waiting compiler runs")
    cache = tmp_path / "cache"
    (cache / "objects").mkdir(parents=True)
    for made in (cache_folder() / "objects").glob("*.o"):
        os.link(made, cache / "objects" / made.name)
    return {"WEFT_OPS_CACHE": str(cache), "CXX": str(waiting_compiler(tmp_path))}


def ask(base: str, **more: Any) -> str:
    answer = httpx.post(f"{base}/v1/completions", json={**BODY, **more}, timeout=deadline(60))
    assert answer.status_code == 200, answer.text
    text: str = answer.json()["choices"][0]["text"]
    return text


def stream(base: str, tokens: int, begun: threading.Event) -> str:
    """Return the text of a stream of ``tokens``. Set ``begun`` at the first token."""
    text = ""
    body = {**BODY, "max_tokens": tokens, "stream": True}
    with httpx.stream("POST", f"{base}/v1/completions", json=body, timeout=deadline(120)) as answer:
        for line in answer.iter_lines():  # as the lines come: ``events`` waits for the last one
            if line.startswith("data: {"):
                begun.set()
                text += json.loads(line.removeprefix("data: "))["choices"][0]["text"]
    return text


@pytest.mark.real_processes
@pytest.mark.parametrize("fronts", ["1", pytest.param("2", marks=pytest.mark.slow)])
def test_it_answers_before_the_operations_are_compiled_and_no_stream_mixes_bits(
    unbuilt: dict[str, str], tmp_path: Path, start: Any, fronts: str
) -> None:
    """The compiler starts after the server is ready. A stream in progress at the end of the compiler keeps
    torch's operations until its end; then engines change. A later answer has the same tokens.
    """
    server: Server = start("spool-text", "--build-ops", "--port", "0", "--fronts", fronts, **unbuilt)
    base = server.url()
    answer = ask(base, prompt=QUESTION, ignore_eos=False, max_tokens=64)
    expected = ask(base, max_tokens=TOKENS)
    assert "engine ready" in server.log.read_text().partition("compiling the C++ operations")[0]
    assert "compiling the C++ operations" in server.log.read_text()
    assert not list(Path(unbuilt["WEFT_OPS_CACHE"]).glob("*/libweft_cpu.so"))
    (engine,) = with_role(server.process.pid, "head")

    texts: list[str] = []
    begun = threading.Event()
    streaming = threading.Thread(target=lambda: texts.append(stream(base, TOKENS, begun)))
    streaming.start()
    assert begun.wait(deadline(60))
    # The stream is still under way when the compiler ends: the engine stands still, except for a moment
    # each second. A longer halt would let the server replace the engine.
    (tmp_path / "go").touch()
    while COMPILED not in server.log.read_text():
        os.kill(engine, signal.SIGSTOP)
        time.sleep(1)
        os.kill(engine, signal.SIGCONT)
        time.sleep(0.01)
    os.kill(engine, signal.SIGSTOP)
    assert not texts, "the stream ended before the compiler"
    assert CHANGE not in server.log.read_text()
    assert with_role(server.process.pid, "head") == [engine]
    os.kill(engine, signal.SIGCONT)
    streaming.join()

    until(server, lambda: CHANGE in server.log.read_text())
    until(server, lambda: engine not in with_role(server.process.pid, "head"))
    assert ask(base, prompt=QUESTION, ignore_eos=False, max_tokens=64) == answer
    assert "linear (torch)" not in server.log.read_text().partition(CHANGE)[2]
    assert texts == [expected]


@pytest.mark.real_processes
def test_a_build_that_fails_leaves_the_server_as_it_is(tmp_path: Path, start: Any) -> None:
    variables = {"WEFT_OPS_CACHE": str(tmp_path / "cache"), "CXX": "no-such-compiler"}
    server: Server = start("spool-text", "--build-ops", "--port", "0", **variables)
    base = server.url()
    until(server, lambda: "torch's operations stay in use" in server.log.read_text())
    assert "no C++ compiler found (looked for 'no-such-compiler' (CXX))" in server.log.read_text()
    assert ask(base, max_tokens=5)


def test_a_server_keeps_the_operations_that_it_began_with(
    unbuilt: dict[str, str], tmp_path: Path, start: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Operations built while the server runs are not used; a restarted engine also runs torch's.

    A link to the library of this machine stands for the build.
    """
    server: Server = start("spool-text", "--port", "0", "--spare-processes", "0", **unbuilt)
    base = server.url()
    before = ask(base, max_tokens=50)
    library = build.find()
    assert library is not None
    made = Path(unbuilt["WEFT_OPS_CACHE"]) / library.relative_to(cache_folder())
    made.parent.mkdir(parents=True)
    os.link(library, made)
    monkeypatch.setenv("WEFT_OPS_CACHE", unbuilt["WEFT_OPS_CACHE"])
    assert build.find() == made
    os.kill(server.engine(), signal.SIGKILL)
    assert ask(base, max_tokens=50) == before
    assert server.log.read_text().count("linear (torch)") == 2
