"""Run a client on a host of its own: ``python -m tests.faults.asker URL``. Answer each input line with a
line.

A number asks for as many tokens after every prompt, several times at once. "metrics" returns the server's
counters.
"""

from __future__ import annotations

import json
import re
import sys
from concurrent.futures import ThreadPoolExecutor

import httpx

from tests.support.slowness import deadline

PROMPTS = ["Tom has 12 apples", "Ann buys 7 more. " * 4, "Bob"]
TIMES = 6
"""Repetitions of each prompt, so that every replica has work and some requests wait for a slot."""


def metrics(text: str) -> dict[str, float]:
    """Return metrics as name:head -> value where labelled by engine, as name:transport -> value
    where labelled by transport, otherwise as name -> value."""
    made = dict[str, float]()
    for name, labels, value in re.findall(r"^weft:(\w+)(?:{([^}]*)})? (\S+)$", text, re.M):
        of = dict(re.findall(r'(\w+)="([^"]*)"', labels))
        kind = of.get("transport") or of.get("head")
        made[f"{name}:{kind}" if kind else name] = float(value)
    return made


def main(url: str) -> None:
    with httpx.Client(base_url=url, timeout=deadline(180)) as client, ThreadPoolExecutor(32) as pool:
        model = client.get("/v1/models").json()["data"][0]["id"]

        def ask(prompt: str, tokens: int) -> str:
            fields = {"temperature": 0, "max_tokens": tokens, "ignore_eos": True}
            answer = client.post("/v1/completions", json={"model": model, "prompt": prompt, **fields})
            if answer.status_code != 200:
                return f"{answer.status_code}: {answer.text}"
            return str(answer.json()["choices"][0]["text"])

        for line in map(str.strip, sys.stdin):
            if line == "metrics":
                print(json.dumps(metrics(client.get("/metrics").text)), flush=True)
                continue
            asked = [pool.submit(ask, prompt, int(line)) for prompt in PROMPTS for _ in range(TIMES)]
            print(json.dumps([one.result() for one in asked]), flush=True)


if __name__ == "__main__":
    main(sys.argv[1])
