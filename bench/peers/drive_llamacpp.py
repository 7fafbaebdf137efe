"""Drive llama.cpp through ``llama-server``: continuous batching, prompts as token ids, no input text.

``args``: ``command``, the server's command line with ``{port}``, and the ``version`` to report.
"""

from __future__ import annotations

import contextlib
import http.client
import json
import socket
import subprocess
import threading
import time
from typing import Any

import protocol


def free_port() -> int:
    """Return an unused TCP port."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return listener.getsockname()[1]


class LlamaCpp:
    """Run a llama-server, with one connection per prompt."""

    def load(self, options: dict[str, Any]) -> str:
        self.port = free_port()
        command = [part.replace("{port}", str(self.port)) for part in options["args"]["command"]]
        self.server = subprocess.Popen(command)
        while not self._healthy():
            if self.server.poll() is not None:
                raise RuntimeError(f"llama-server ended with status {self.server.returncode}")
            time.sleep(0.02)
        return str(options["args"]["version"])

    def run(self, prompts: list[list[int]], output_tokens: int) -> list[list[int]]:
        made: list[Any] = [None] * len(prompts)

        def ask(number: int) -> None:
            try:
                made[number] = self._complete(prompts[number], output_tokens)
            except Exception as error:
                made[number] = error

        threads = [threading.Thread(target=ask, args=(number,)) for number in range(len(prompts))]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        for answer in made:
            if isinstance(answer, Exception):
                raise answer
        return made

    def close(self) -> None:
        self.server.terminate()
        self.server.wait(30)

    def _complete(self, prompt: list[int], output_tokens: int) -> list[int]:
        body = {
            "prompt": prompt,
            "n_predict": output_tokens,
            "temperature": 0,
            "samplers": ["top_k"],
            "top_k": 1,
            "ignore_eos": True,
            "cache_prompt": False,
            "return_tokens": True,
        }
        return self._post("/completion", body)["tokens"]

    def _post(self, path: str, body: dict[str, Any]) -> dict[str, Any]:
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=900)
        connection.request("POST", path, json.dumps(body), {"Content-Type": "application/json"})
        return self._read(connection)

    def _get(self, path: str) -> dict[str, Any]:
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=10)
        connection.request("GET", path)
        return self._read(connection)

    def _read(self, connection: http.client.HTTPConnection) -> dict[str, Any]:
        with contextlib.closing(connection):
            response = connection.getresponse()
            text = response.read()
            if response.status != 200:
                raise RuntimeError(f"llama-server answered {response.status}: {text[:300]!r}")
            return json.loads(text)

    def _healthy(self) -> bool:
        try:
            return bool(self._get("/health"))
        except (OSError, RuntimeError, http.client.HTTPException):
            return False


if __name__ == "__main__":
    protocol.serve(LlamaCpp())
