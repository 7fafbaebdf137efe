"""The commands of the compose file and of the pods, as processes of this host: a request is answered."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from tests.cli.test_engine_front import get
from tests.cli.test_serve import Server
from tests.deploy.manifests import ROOT, golden, named
from tests.deploy.test_docker import SERVICES
from tests.support.secret import write_secret
from tests.support.slowness import deadline, until


@pytest.fixture
def started() -> Iterator[list[Server]]:
    servers: list[Server] = []
    yield servers
    for one in servers:
        one.close()


def start(servers: list[Server], folder: Path, command: str, words: list[str], **variables: str) -> Server:
    place = folder / f"process{len(servers)}"
    place.mkdir()
    servers.append(Server(place, *words, command=command, **variables))
    return servers[-1]


def assert_an_answer(base: str) -> None:
    """Check one request to the bundled model."""
    question = "Tom has 12 apples and buys 7 more. How many apples does he have?"
    body = {"messages": [{"role": "user", "content": question}], "max_tokens": 64, "temperature": 0}
    answer = httpx.post(f"{base}/v1/chat/completions", json=body, timeout=deadline(120))
    assert answer.status_code == 200, answer.text
    assert "19" in answer.json()["choices"][0]["message"]["content"]


def test_the_services_of_the_compose_file_answer(started: list[Server], tmp_path: Path) -> None:
    """Paths and addresses are replaced; all other words are those of the compose file."""
    folder = tmp_path / "weft"
    folder.mkdir(mode=0o700)
    secret = write_secret(tmp_path)
    file = tmp_path / "topology.yaml"
    text = (ROOT / "deploy/docker/topology.yaml").read_text()
    file.write_text(
        text.replace("/var/lib/weft/group-secret", str(secret)).replace("threads: 2", "threads: 1")
    )

    def here(name: str) -> list[str]:
        """Return the words of a service, with paths and addresses of this host, and free ports."""
        changes = {"/etc/weft/topology.yaml": str(file), "/var/lib/weft": str(folder), "0.0.0.0": "127.0.0.1"}
        found = []
        for word in SERVICES[name]["command"]:
            for before, after in changes.items():
                word = word.replace(before, after)
            found.append("127.0.0.1" if word.startswith("10.89.") else word)
        found[found.index("--port") + 1] = "0"
        return found

    for name in ("prefill", "decode"):
        command, *words = here(name)
        start(started, tmp_path, command, words)
    command, *words = here("front")
    assert_an_answer(start(started, tmp_path, command, words).url())


@pytest.mark.slow
def test_the_pods_of_an_overlay_answer(started: list[Server], tmp_path: Path) -> None:
    """Each pod has the container's words and variables. The front gets the addresses of the pods, because no
    Kubernetes runs here (tests/control/directory/test_kubernetes.py has the watch)."""
    manifests = golden("pd")
    (config,) = (one for one in manifests if one["kind"] == "ConfigMap")
    secret, file = write_secret(tmp_path), tmp_path / "topology.yaml"
    text = config["data"]["topology.yaml"].replace("/etc/weft-secret/group-secret", str(secret))
    file.write_text(text.replace("threads: 2", "threads: 1"))
    urls = []
    for role in ("prefill", "decode"):
        (container,) = named(manifests, "StatefulSet", role)["spec"]["template"]["spec"]["containers"]
        words = [word.replace("$(POD_INDEX)", "3") for word in container["args"]]
        words[words.index("--host") + 1], words[words.index("--port") + 1] = "127.0.0.1", "0"
        home = tmp_path / f"cache-{role}"
        home.mkdir()
        one = start(
            started,
            tmp_path,
            "engine",
            [str(file), *words],
            WEFT_ADVERTISE="127.0.0.1",
            WEFT_ADMIN_KEY="admin",
            XDG_CACHE_HOME=os.environ.get("XDG_CACHE_HOME", str(Path.home() / ".cache")),
        )
        until(lambda one=one: "http://" in one.log.read_text())  # type: ignore[misc]
        urls.append("http://" + one.log.read_text().rpartition("http://")[2].split()[0])
    (container,) = named(manifests, "Deployment", "weft-front")["spec"]["template"]["spec"]["containers"]
    words = [word.replace("kubernetes:weft-groups", ",".join(urls)) for word in container["args"]]
    words[words.index("--host") + 1], words[words.index("--port") + 1] = "127.0.0.1", "0"
    front = start(started, tmp_path, "front", [str(file), *words], WEFT_ADMIN_KEY="admin")
    assert_an_answer(front.url())
    # The command's own look at the engine may come after the API server's.
    until(lambda: get(f"{urls[1]}/ready") == (200, {"status": "serving", "engines": {"decode3": True}}))
    started[1].process.terminate()
    assert started[1].process.wait(deadline(30)) == 0
