"""Screenshots of the page at / for the docs: ``python -m scripts.page_screenshots docs/images``."""

from __future__ import annotations

import concurrent.futures
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import httpx

from tests.support.browser import Browser

QUESTION = "Tom has 12 apples and buys 7 more. How many apples does he have?"
LOAD_S = 40.0


def main() -> None:
    folder = Path(sys.argv[1])
    folder.mkdir(parents=True, exist_ok=True)
    command = [sys.executable, "-m", "weft", "serve", "--port", "0", "--dp", "2", "--max-num-seqs", "8"]
    server = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    assert server.stdout is not None
    try:
        line = next(line for line in server.stdout if line.startswith("weft is ready: "))
        url = line.split()[3]
        with concurrent.futures.ThreadPoolExecutor(12) as pool, tempfile.TemporaryDirectory() as place:
            until = time.monotonic() + LOAD_S
            for number in range(10):
                pool.submit(_load, url, number, until)
            for scheme in ("light", "dark"):
                with Browser(Path(place) / scheme, dark=scheme == "dark") as browser:
                    browser.open(url + "/")
                    time.sleep(12.0)
                    browser.evaluate("document.getElementById('question').focus()")
                    browser.write(QUESTION)
                    browser.press("Enter", 13, "\r")
                    browser.wait("document.getElementById('log').innerText.includes('12 + 7 = 19')")
                    time.sleep(1.5)
                    browser.screenshot(folder / f"page-{scheme}.png")
    finally:
        server.terminate()
        server.wait(30)


def _load(url: str, number: int, until: float) -> None:
    while time.monotonic() < until:
        body = {
            "model": "spool-text",
            "prompt": f"{number} " + QUESTION * (1 + number % 5),
            "max_tokens": 150,
            "ignore_eos": True,
            "stream": True,
        }
        httpx.post(url + "/v1/completions", json=body, timeout=60)
        time.sleep(number % 4)


if __name__ == "__main__":
    main()
