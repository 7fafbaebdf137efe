"""Count the files that one chat request and one decode step enter.

    python scripts/trip.py            # prints two lines
    python scripts/trip.py --list     # prints the files too

A reader of the code follows such a trip. Fewer files and fewer crossings between packages help.
The chat is one request to ``weft serve spool-text``, counted in all processes of the server, after a first
request. The decode step is one ``EngineCore.step`` for two decoding sequences, counted in all threads.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Callable
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
PRODUCT = ROOT / "weft"
START_S, ANSWER_S, WRITE_S = 120.0, 60.0, 10.0
"""Seconds to wait for a server, for an answer, and for the processes to write their files."""

HOOK = """
import sys
sys.path.insert(0, {scripts!r})
import trip
trip.record_in_this_process({folder!r})
"""
"""Text of ``sitecustomize.py``, which every process of the server runs at its start."""


class Trip:
    """Hold the entered files of the product, and the calls from one package into another."""

    def __init__(self) -> None:
        self.files: set[str] = set()
        self.crossings = 0
        self._places: dict[CodeType, str | None] = {}

    def profile(self, frame: FrameType, event: str, argument: object) -> None:
        """Note a call. To be installed with ``sys.setprofile``."""
        if event != "call" or (here := self._place(frame.f_code)) is None:
            return
        self.files.add(here)
        caller = frame.f_back
        there = self._place(caller.f_code) if caller is not None else None
        if there is not None and package(there) != package(here):
            self.crossings += 1

    def _place(self, code: CodeType) -> str | None:
        """Return the path of a function inside the product, or None for a function of another package."""
        if code not in self._places:
            path = Path(code.co_filename)
            inside = path.is_relative_to(PRODUCT)
            self._places[code] = str(path.relative_to(PRODUCT)) if inside else None
        return self._places[code]


def package(file: str) -> str:
    """Return the top-level package of a file: ``scheduler`` for ``scheduler/planner.py``."""
    return file.split("/")[0]


def record_in_this_process(folder: str) -> None:
    """Record calls from now on in all threads. Write the files entered while ``folder/on`` existed."""
    import threading

    on, trip = Path(folder, "on"), Trip()
    recording = False

    def profile(frame: FrameType, event: str, argument: object) -> None:
        if recording:
            trip.profile(frame, event, argument)

    def watch() -> None:
        nonlocal recording
        while True:
            recording = on.exists()
            if not recording and trip.files:
                partial = Path(folder, f"partial-{os.getpid()}")
                partial.write_text(json.dumps(sorted(trip.files)))
                partial.rename(Path(folder, f"files-{os.getpid()}"))
                return
            time.sleep(0.05)

    threading.Thread(target=watch, daemon=True).start()
    threading.setprofile(profile)
    sys.setprofile(profile)


def one_chat() -> set[str]:
    """Return the files that one chat request enters, in all processes of a server."""
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "sitecustomize.py").write_text(HOOK.format(scripts=str(ROOT / "scripts"), folder=folder))
        variables = {**os.environ, "PYTHONPATH": f"{folder}:{ROOT}", "WEFT_LOG_LEVEL": "info"}
        command = [sys.executable, "-m", "weft", "serve", "spool-text", "--port", "0"]
        command += ["--spare-processes", "0"]
        with open(Path(folder, "log"), "w+") as log:
            server = subprocess.Popen(command, stdout=log, stderr=log, env=variables)
            try:
                url = _wait(lambda: _url(Path(folder, "log")), START_S, "the server did not start")
                _chat(url)
                Path(folder, "on").touch()
                time.sleep(0.2)
                _chat(url)
                Path(folder, "on").unlink()
                written = Path(folder).glob
                _wait(lambda: len(list(written("files-*"))) >= 2, WRITE_S, "no process wrote its files")
                time.sleep(0.5)
            finally:
                server.terminate()
                server.wait(START_S)
        found: set[str] = set()
        for path in Path(folder).glob("files-*"):
            found |= set(json.loads(path.read_text()))
        return found


def _wait(look: Callable[[], Any], seconds: float, problem: str) -> Any:
    """Return the first true result of ``look``. Raise SystemExit with ``problem`` after ``seconds``."""
    until = time.monotonic() + seconds
    while not (found := look()):
        if time.monotonic() > until:
            raise SystemExit(problem)
        time.sleep(0.05)
    return found


def _url(log: Path) -> str | None:
    found = re.search(r"http://127\.0\.0\.1:\d+", log.read_text())
    return found.group() if found else None


def _chat(url: str) -> None:
    question = {"role": "user", "content": "Tom has 12 apples and buys 7 more. How many apples does he have?"}
    body = {"model": "spool-text", "messages": [question], "stream": True}
    headers = {"content-type": "application/json"}
    request = urllib.request.Request(f"{url}/v1/chat/completions", json.dumps(body).encode(), headers)
    with urllib.request.urlopen(request, timeout=ANSWER_S) as answer:
        answer.read()


def one_decode_step() -> Trip:
    """Return the trip of one decode step of two sequences in this process."""
    sys.path.insert(0, str(ROOT))
    import threading

    from weft import LLM, SamplingParams
    from weft.engine.core import EngineCore

    trip, steps, recording = Trip(), 0, False
    step = EngineCore.step

    def profile(frame: FrameType, event: str, argument: object) -> None:
        if recording:
            trip.profile(frame, event, argument)

    def counted(core: EngineCore) -> Any:
        nonlocal steps, recording
        steps += 1
        # Steps 1 to 3 compute the prompts and fill caches; step 6 only decodes.
        recording = steps == 6
        events = step(core)
        recording = False
        return events

    threading.setprofile(profile)  # the threads of the engine are started below
    sys.setprofile(profile)
    EngineCore.step = counted  # type: ignore[method-assign]
    try:
        with LLM("spool-text", max_num_seqs=2) as llm:
            params = SamplingParams(temperature=0, max_tokens=16, ignore_eos=True)
            llm.generate(["Question: Tom has 12", "Question: Ann has 3"], params)
    finally:
        sys.setprofile(None)
        threading.setprofile(None)
        EngineCore.step = step  # type: ignore[method-assign]
    return trip


def main() -> None:
    """Print both trips."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--list", action="store_true", help="print the files too")
    listed = parser.parse_args().list
    chat, step = one_chat(), one_decode_step()
    print(f"one chat: {len(chat)} files of {len({package(file) for file in chat})} packages")
    packages = {package(file) for file in step.files}
    print(f"one decode step: {len(step.files)} files of {len(packages)} packages, {step.crossings} crossings")
    for title, files in (("chat", chat), ("decode step", step.files)) if listed else ():
        print(f"\n{title}:", *sorted(files), sep="\n  ")


if __name__ == "__main__":
    main()
