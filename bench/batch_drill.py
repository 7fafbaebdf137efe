"""Run a batch on a server that is killed many times: ``python -m bench.batch_drill --lines 10000 --kills
20``.

Uploads a batch with sampled outputs, kills all processes of the server (SIGKILL) at random moments, and
starts the server again on the same folder. At the end the outputs are compared with an undisturbed run of the
same lines and seeds. Prints one JSON object: lost, repeated and differing lines.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import re
import signal
import sqlite3
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any, NamedTuple

import httpx

from weft.common import env

ROOT = Path(__file__).parents[1]
CHAT = "/v1/chat/completions"
READY = re.compile(r"weft is ready: (\S+) models?=")
START_S, END_S = 180.0, 3600.0
WORDS = ["apples", "pears", "boats", "books", "lamps", "stones", "birds", "trees", "cups", "doors"]


class Result(NamedTuple):
    """Outcome of a drill."""

    lines: int
    kills: int
    lost: int
    repeated: int
    differing: int
    seconds: float

    @property
    def clean(self) -> bool:
        """True if every line has its output exactly once, with the text of the undisturbed run."""
        return not (self.lost or self.repeated or self.differing)


class Server:
    """``weft serve`` with all its processes in one process group."""

    def __init__(self, folder: Path, flags: list[str]) -> None:
        program = "from weft.cli.main import main; main()"
        command = [sys.executable, "-c", program, "serve", *flags, "--port", "0", "--batch-dir", str(folder)]
        variables = env.child_environment(PYTHONPATH=str(ROOT), OMP_NUM_THREADS="1", HF_HUB_OFFLINE="1")
        self._process = subprocess.Popen(
            command,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
            env=variables,
            start_new_session=True,
        )
        assert self._process.stdout is not None
        found = next(filter(None, map(READY.match, self._process.stdout)), None)
        assert found is not None, "the server did not start"
        self.url = found[1]
        self.http = httpx.Client(base_url=self.url, timeout=60)
        self.models = [card["id"] for card in self.http.get("/v1/models").json()["data"]]

    def kill(self) -> None:
        """Kill every process of the server at once."""
        os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        self.http.close()

    def close(self) -> None:
        """End the server in order."""
        self._process.terminate()
        try:
            self._process.wait(30)
        except subprocess.TimeoutExpired:
            self.kill()


def write_lines(path: Path, count: int, models: list[str]) -> None:
    """Write an input file with sampled lines of a few tokens, for each model in turn."""
    rng = random.Random(1)
    with path.open("w") as file:
        for number in range(count):
            text = f"Tom has {rng.randrange(100)} {rng.choice(WORDS)} and {rng.randrange(100)} more."
            body = {
                "model": models[number % len(models)],
                "messages": [{"role": "user", "content": text}],
                "max_tokens": 6,
                "temperature": 1.5,
            }
            line = {"custom_id": f"line-{number}", "method": "POST", "url": CHAT, "body": body}
            file.write(json.dumps(line) + "\n")


def texts_of(data: str) -> list[tuple[str, str]]:
    """Return (custom_id, text) of each record."""
    found = []
    for line in data.splitlines():
        record = json.loads(line)
        choice = record["response"]["body"]["choices"][0]
        found.append((record["custom_id"], choice["message"]["content"]))
    return found


def drill(folder: Path, lines: int, kills: int, seed: int, flags: list[str]) -> Result:
    """Run one drill in an empty folder and return the outcome."""
    rng, begun = random.Random(seed), time.monotonic()
    server = Server(folder / "batches", flags)
    try:
        write_lines(folder / "in.jsonl", lines, server.models)
        with (folder / "in.jsonl").open("rb") as file:
            form = {"data": {"purpose": "batch"}, "files": {"file": ("in.jsonl", file)}}
            uploaded = server.http.post("/v1/files", **form).json()["id"]  # type: ignore[arg-type]
        asked = {"input_file_id": uploaded, "endpoint": CHAT, "completion_window": "24h"}
        batch = server.http.post("/v1/batches", json=asked).json()["id"]
        for number in range(kills):
            # Each kill happens at a random moment after the next part of the lines.
            _wait(server, batch, lines * (number + rng.random()) / (kills + 1))
            time.sleep(rng.random() * 0.2)
            server.kill()
            server = Server(folder / "batches", flags)
        found = _wait(server, batch, lines + 1)
        output = server.http.get(f"/v1/files/{found['output_file_id']}/content").text
        seed_of_batch = _seed(folder / "batches", batch)
        undisturbed = _undisturbed(folder, server.url, seed_of_batch)
    finally:
        server.close()
    return _compared(texts_of(output), undisturbed, lines, kills, time.monotonic() - begun)


def _wait(server: Server, batch: str, done: float) -> Any:
    """Wait until a batch has ``done`` outputs, or has ended, and return the batch."""
    until = time.monotonic() + END_S
    while time.monotonic() < until:
        found = server.http.get(f"/v1/batches/{batch}").json()
        counts = found["request_counts"]
        if found["status"] == "completed" or counts["completed"] + counts["failed"] >= done > 0:
            return found
        assert found["status"] != "failed", found
        time.sleep(0.05)
    raise AssertionError("the batch did not end in time")


def _seed(folder: Path, batch: str) -> int:
    with sqlite3.connect(f"file:{folder / 'batches.sqlite'}?mode=ro", uri=True) as db:
        return int(db.execute("SELECT seed FROM batches WHERE id = ?", (batch,)).fetchone()[0])


def _undisturbed(folder: Path, url: str, seed: int) -> dict[str, str]:
    """Return custom_id -> text of a run with the same seeds, by ``weft batch run``."""
    target = folder / "undisturbed.jsonl"
    program = "from weft.cli.main import main; main()"
    words = ["batch", "run", str(folder / "in.jsonl"), str(target), "--url", url, "--seed", str(seed)]
    variables = env.child_environment(PYTHONPATH=str(ROOT))
    subprocess.run([sys.executable, "-c", program, *words], check=True, env=variables)
    return dict(texts_of(target.read_text()))


def _compared(
    texts: list[tuple[str, str]], wanted: dict[str, str], lines: int, kills: int, seconds: float
) -> Result:
    found = dict(texts)
    return Result(
        lines=lines,
        kills=kills,
        lost=lines - len(found),
        repeated=len(texts) - len(found),
        differing=sum(found[name] != wanted[name] for name in found),
        seconds=round(seconds, 1),
    )


def main() -> int:
    """Run the drill of the command line. Return the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--lines", type=int, default=10_000)
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("flags", nargs="*", help="model and flags of weft serve, after --")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="drill-") as folder:
        flags = given.flags or ["spool-text", "--threads", "1", "--max-num-seqs", "64"]
        result = drill(Path(folder), given.lines, given.kills, given.seed, flags)
    print(json.dumps(result._asdict()))
    return 0 if result.clean else 1


if __name__ == "__main__":
    sys.exit(main())
