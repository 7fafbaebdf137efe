"""A client on a host of its own: ``python -m tests.faults.asker URL``; answers lines of input with lines.

A number: so many tokens after every prompt, asked a few times at once. "metrics": what the server counts.
"""

from __future__ import annotations

import json
import re
import sys
from concurrent.futures import ThreadPoolExecutor

import httpx

from tests.faults.host_zero import PROMPTS

TIMES = 6
"""Of each prompt, so that every replica has something to do, and some wait for a slot."""


def metrics(text: str) -> dict[str, float]:
    """name:head -> value, of what is told by head; name -> value of the rest."""
    found = re.findall(r'^weft:(\w+)(?:{(?:head="(\d+)")?[^}]*})? (\S+)$', text, re.M)
    return {f"{name}:{head}" if head else name: float(value) for name, head, value in found}


def main(url: str) -> None:
    with httpx.Client(base_url=url, timeout=180) as client, ThreadPoolExecutor(32) as pool:
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
