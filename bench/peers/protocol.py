"""The drivers' side of the protocol: one JSON object per line on stdin, one per line on stdout.

A driver runs in the peer's interpreter, so this file uses only the standard library::

    {"load": {"model": FOLDER, "dtype": "bfloat16", "threads": 2, "max_len": 2304, "max_seqs": 32,
              "args": {}}}
        -> {"ready_s": 3.1, "version": "5.23.0"}
    {"run": "W1", "prompts": [[ids], ...], "output_tokens": 128}
        -> {"seconds": 4.2, "output_tokens": 4096, "tokens": [[ids], ...]}
    {"memory": true}
        -> {"peak_rss": 1234567}         bytes: the high-water marks of this process and its children, summed
    {"stop": true}
        -> {"stopped": true}             and the driver ends

A failure gives the answer ``{"error": "...", "trace": "..."}``, and the driver continues. Output of libraries
goes to stderr, never into the protocol.
"""

from __future__ import annotations

import json
import os
import sys
import time
import traceback
from pathlib import Path
from typing import Any, Protocol

#: Start time of this process, as early as Python code can read it: ready_s includes the imports.
BEGAN = time.perf_counter()


class Engine(Protocol):
    """Define the interface of a driver."""

    def load(self, options: dict[str, Any]) -> str:
        """Load the model and return the peer's version. Call once, before ``run``."""
        ...

    def run(self, prompts: list[list[int]], output_tokens: int) -> list[list[int]]:
        """Return greedy continuations of exactly ``output_tokens`` tokens, in order. Ends of text are
        ignored."""
        ...

    def close(self) -> None:
        """Free everything that ``load`` started."""
        ...


def tree(root: int) -> list[int]:
    """Return the process ids of ``root`` and all descendants, from /proc."""
    children: dict[int, list[int]] = {}
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit():
            continue
        try:
            fields = (entry / "stat").read_text().rpartition(")")[2].split()
        except OSError:
            continue
        children.setdefault(int(fields[1]), []).append(int(entry.name))
    found, queue = [], [root]
    while queue:
        pid = queue.pop()
        found.append(pid)
        queue.extend(children.get(pid, []))
    return found


def peak_rss() -> int:
    """Return the sum of VmHWM in bytes over the process and its descendants. Shared pages count once per
    process.
    """
    total = 0
    for pid in tree(os.getpid()):
        try:
            lines = Path(f"/proc/{pid}/status").read_text().splitlines()
        except OSError:
            continue
        total += sum(int(line.split()[1]) * 1024 for line in lines if line.startswith("VmHWM:"))
    return total


def _load(engine: Engine, options: dict[str, Any]) -> dict[str, Any]:
    version = engine.load(options)
    return {"ready_s": time.perf_counter() - BEGAN, "version": version}


def _run(engine: Engine, message: dict[str, Any]) -> dict[str, Any]:
    began = time.perf_counter()
    tokens = engine.run(message["prompts"], message["output_tokens"])
    seconds = time.perf_counter() - began
    wrong = [len(row) for row in tokens if len(row) != message["output_tokens"]]
    if wrong or len(tokens) != len(message["prompts"]):
        raise RuntimeError(
            f"{len(tokens)} answers for {len(message['prompts'])} prompts, wrong lengths {wrong[:5]}"
        )
    return {"seconds": seconds, "output_tokens": sum(map(len, tokens)), "tokens": tokens}


def _answer(engine: Engine, message: dict[str, Any]) -> dict[str, Any]:
    if "load" in message:
        return _load(engine, message["load"])
    if "run" in message:
        return _run(engine, message)
    if "memory" in message:
        return {"peak_rss": peak_rss()}
    if "stop" in message:
        engine.close()
        return {"stopped": True}
    raise ValueError(f"unknown message with keys {sorted(message)}")


def serve(engine: Engine) -> None:
    """Answers messages until ``stop`` or the end of stdin."""
    out = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    for line in sys.stdin:
        message = json.loads(line)
        try:
            answer = _answer(engine, message)
        except Exception as error:
            answer = {"error": f"{type(error).__name__}: {error}", "trace": traceback.format_exc()}
        print(json.dumps(answer), file=out)
        if "stop" in message:
            return
    engine.close()
