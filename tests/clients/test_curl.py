"""Every ``curl`` command of the docs, run against a server."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from pathlib import Path

import httpx
import pytest

from tests.support.loras import make_adapter
from tests.support.servers import Running, Servers
from tests.support.slowness import deadline
from weft.common import env
from weft.config.hub import bundled_models

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
ADMIN = "admin-key"
PORT = "http://127.0.0.1:8000"
"""The server's address in the docs."""
SPECIAL = {
    "spool-vision": "seeing",
    "sql": "adapting",
    "/v1/classify": "scoring",
    '"dimensions"': "scoring",
    "/admin/cache/flush": "storing",
    "/pause": "storing",
    "/is_paused": "storing",
    "/resume": "storing",
    "/sleep": "filling",
    "/wake_up": "filling",
    "/is_sleeping": "filling",
    "/reset_prefix_cache": "storing",
    "weight_transfer_engine": "filling",
    "/start_weight_update": "filling",
    "/update_weights": "filling",
    "/finish_weight_update": "filling",
    "/weight_info": "filling",
}
"""Part of a command -> fixture of the server for the command; other commands use ``server``."""


@pytest.fixture(scope="module")
def server(servers: Servers) -> Running:
    """Start a server with drafts, because the docs also read its draft counters."""
    return servers.weft("--threads", "1", "--speculative-method", "ngram")


@pytest.fixture(scope="module")
def seeing(servers: Servers) -> Running:
    """Start a server with image input."""
    return servers.weft("spool-vision", "--threads", "1")


@pytest.fixture(scope="module")
def adapting(servers: Servers, tmp_path_factory: pytest.TempPathFactory) -> Running:
    """Start a server with the adapters of the page about adapters."""
    root = tmp_path_factory.mktemp("adapters")
    base = Path(bundled_models()["spool-text"])
    make_adapter(root / "sql", base, rank=2)
    loras = ("--lora-modules", f"sql={root / 'sql'}", "--allow-lora-updates", "--max-loras", "2")
    return servers.weft("--threads", "1", *loras)


@pytest.fixture(scope="module")
def scoring(servers: Servers) -> Running:
    """Start a server that scores by the logits of two tokens, and shortens embeddings."""
    overrides = {"classifier_from_token": ["a", "b"], "is_matryoshka": True}
    return servers.weft("--threads", "1", "--hf-overrides", json.dumps(overrides))


@pytest.fixture(scope="module")
def storing(servers: Servers, tmp_path_factory: pytest.TempPathFactory) -> Running:
    """Start a server with a disk tier and an admin key."""
    folder = str(tmp_path_factory.mktemp("kv"))
    return servers.weft("--threads", "1", "--admin-key", ADMIN, "--kv-disk", "300M", "--kv-disk-dir", folder)


@pytest.fixture(scope="module")
def filling(servers: Servers) -> Running:
    """Start a server with an admin key, for new weights."""
    return servers.weft("--threads", "1", "--admin-key", ADMIN)


def prepare_update(server: Running, command: str) -> str:
    """Send the requests that come before ``command`` of an update. Return the command with a folder."""
    folder = bundled_models()["spool-text"]
    before = {"/update_weights": 1, "/finish_weight_update": 2}
    for path, body in [
        ("/start_weight_update", {}),
        ("/update_weights", {"update_info": {"path": folder}}),
    ][: next((count for part, count in before.items() if part in command), 0)]:
        headers = {"Authorization": f"Bearer {ADMIN}"}
        assert httpx.post(server.url + path, json=body, headers=headers).status_code == 200
    return command.replace("/checkpoints/step-1", folder)


def commands() -> list[tuple[str, str]]:
    """Return (page, command) for each curl command in a code block, up to the end of its quotes."""
    found = []
    for page in PAGES:
        for block in re.findall(r"^```\w*\n(.*?)^```", page.read_text(encoding="utf-8"), re.M | re.S):
            lines = block.splitlines()
            at = 0
            while at < len(lines):
                if re.match(r"(until |while )?curl ", lines[at]):
                    command = lines[at]
                    while open_ended(command) and at + 1 < len(lines):
                        at += 1
                        command += "\n" + lines[at]
                    found.append((page.name, command))
                at += 1
    return found


def open_ended(command: str) -> bool:
    """Return True if more lines belong to the command."""
    return command.endswith("\\") or command.count("'") % 2 == 1


def test_the_docs_have_some() -> None:
    assert len(commands()) >= 3
    assert all("8000" in command for _, command in commands())


@pytest.mark.requirement("F67")
@pytest.mark.parametrize(("page", "command"), commands())
def test_a_command_works(page: str, command: str, tmp_path: Path, request: pytest.FixtureRequest) -> None:
    if shutil.which("curl") is None:
        pytest.skip("there is no curl")
    fixture = next((name for part, name in SPECIAL.items() if part in command), "server")
    server: Running = request.getfixturevalue(fixture)
    if "/models/sql2" in command:
        made = make_adapter(tmp_path / "sql2", Path(bundled_models()["spool-text"]), rank=2, seed=1)
        command = command.replace("/models/sql2", str(made))
    if fixture == "filling":
        command = prepare_update(server, command)
    (tmp_path / "examples").symlink_to(ROOT / "examples")
    (tmp_path / ".curlrc").write_text("fail\nmax-time 60\nshow-error\n")
    ended = subprocess.run(
        ["bash", "-e", "-o", "pipefail", "-c", command.replace(PORT, server.url)],
        env=env.child_environment(
            HOME=str(tmp_path), CURL_HOME=str(tmp_path), WEFT_ADMIN_KEY=ADMIN, NO_PROXY="*"
        ),
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=deadline(60),
        check=False,
    )
    assert ended.returncode == 0, f"{page}: {command}\n{ended.stdout}\n{ended.stderr}"
