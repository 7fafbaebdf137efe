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
LOAD_S = 150.0
BEFORE_S = 115.0
"""Seconds of load before the first screenshot, so that the history of the charts is full."""
HOVER = """(() => {
  const chart = document.getElementById('tokens'), box = chart.getBoundingClientRect();
  const at = { clientX: box.left + box.width * 0.6, clientY: box.top + 40, pointerType: 'mouse' };
  chart.dispatchEvent(new PointerEvent('pointermove', at));
})()"""


def main() -> None:
    folder = Path(sys.argv[1])
    folder.mkdir(parents=True, exist_ok=True)
    command = [sys.executable, "-m", "weft", "serve", "--port", "0", "--dp", "2", "--max-num-seqs", "8"]
    command += ["--kv-cache-memory", "8M"]
    server = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    assert server.stdout is not None
    try:
        line = next(line for line in server.stdout if line.startswith("weft is ready: "))
        url = line.split()[3]
        with concurrent.futures.ThreadPoolExecutor(12) as pool, tempfile.TemporaryDirectory() as place:
            until = time.monotonic() + LOAD_S
            for number in range(10):
                pool.submit(_load, url, number, until)
            time.sleep(BEFORE_S)
            for scheme in ("light", "dark"):
                with Browser(Path(place) / scheme, dark=scheme == "dark", height=960) as browser:
                    browser.open(url + "/")
                    browser.wait("document.querySelector('#examples button') !== null")
                    browser.evaluate("$('period').value = '120'")
                    browser.evaluate("document.querySelector('#examples button').click()")
                    browser.wait("document.querySelector('.stats span') !== null")
                    time.sleep(1.5)
                    browser.evaluate(HOVER)
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
        time.sleep(0.5 + number % 4)


if __name__ == "__main__":
    main()
