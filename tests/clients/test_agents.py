"""Coding agents carry out a scripted tool call: ``codex exec`` and ``claude -p``.

The agents come from npm: on PATH, or in the folder of WEFT_TEST_AGENTS (``node_modules/.bin``). Each agent
has a separate home, and requests to other hosts go to a port without a listener.
"""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest

from tests.clients.conftest import MODEL, Play
from tests.clients.outputs import call
from tests.support.servers import Running
from tests.support.slowness import deadline

pytestmark = pytest.mark.agents

NOWHERE = "http://127.0.0.1:9"
SECRET = "it-is-a-quiet-harbour-4711"
"""Text that occurs only in the file."""


def agent(name: str) -> str:
    """The program. Skips where there is none."""
    folder = os.environ.get("WEFT_TEST_AGENTS", "")
    path = shutil.which(name, path=os.pathsep.join([folder, os.environ.get("PATH", "")]))
    if path is None:
        pytest.skip(f"there is no {name}: npm install its package, and put it on PATH or in WEFT_TEST_AGENTS")
    return path


def run(command: list[str], home: Path, work: Path, **variables: str) -> subprocess.CompletedProcess[str]:
    """Run the agent in folder ``work``, with loopback as its only network."""
    away = dict.fromkeys(("HTTP_PROXY", "HTTPS_PROXY", "http_proxy", "https_proxy", "ALL_PROXY"), NOWHERE)
    loopback = {"NO_PROXY": "127.0.0.1,localhost", "no_proxy": "127.0.0.1,localhost"}
    keep = {name: value for name, value in os.environ.items() if name in ("PATH", "LANG", "TERM", "TMPDIR")}
    return subprocess.run(
        command,
        cwd=work,
        env={**keep, **away, **loopback, "HOME": str(home), "CI": "1", **variables},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=deadline(120),
        check=False,
    )


@pytest.fixture
def work(tmp_path: Path) -> Path:
    """A folder with a file for the agent to read."""
    made = tmp_path / "work"
    made.mkdir()
    (made / "note.txt").write_text(SECRET + "\n")
    return made


def entries(*calls: str) -> list[dict[str, Any]]:
    """Return a model script: calls first, an answer once the result is in the prompt, "ok" for side
    questions.
    """
    return [
        {"match": {"contains": [SECRET]}, "text": "The note was read: all is well.", "repeat": True},
        *[{"match": "Read note.txt", "text": text, "repeat": True} for text in calls],
        {"text": "ok", "repeat": True},
    ]


@pytest.mark.requirement("G10")
def test_codex(play: Play, home: Path, work: Path) -> None:
    program = agent("codex")
    shell = call("exec_command", cmd="cat note.txt")
    server = play(entries(shell))
    (home / ".codex").mkdir()
    (home / ".codex" / "config.toml").write_text(
        f'model = "{MODEL}"\n'
        'model_provider = "weft"\n'
        'approval_policy = "never"\n'
        'sandbox_mode = "danger-full-access"\n'
        "check_for_update_on_startup = false\n"
        "[analytics]\nenabled = false\n"
        '[otel]\nexporter = "none"\n'
        "[model_providers.weft]\n"
        'name = "weft"\n'
        f'base_url = "{server.url}/v1"\n'
        'wire_api = "responses"\n'
    )
    command = [program, "exec", "--skip-git-repo-check", "Read note.txt and say that it was read."]
    ended = run(command, home, work)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert "The note was read: all is well." in ended.stdout
    assert tool_calls(server) >= 1


@pytest.mark.requirement("G10")
def test_claude(play: Play, home: Path, work: Path) -> None:
    program = agent("claude")
    server = play(entries(call("Bash", command="cat note.txt", description="Read the note")))
    command = [program, "-p", "Read note.txt and say that it was read.", "--model", MODEL]
    command += ["--allowedTools", "Bash(cat:*)", "--output-format", "text"]
    ended = run(
        command,
        home,
        work,
        ANTHROPIC_BASE_URL=server.url,
        ANTHROPIC_API_KEY="none",
        ANTHROPIC_SMALL_FAST_MODEL=MODEL,
        ANTHROPIC_DEFAULT_HAIKU_MODEL=MODEL,
        CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC="1",
        DISABLE_TELEMETRY="1",
        DISABLE_ERROR_REPORTING="1",
        DISABLE_AUTOUPDATER="1",
        CLAUDE_CODE_SKIP_PROMPT_HISTORY="1",
    )
    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert "The note was read: all is well." in ended.stdout
    assert tool_calls(server) >= 1


def tool_calls(server: Running) -> int:
    """Return the number of successful requests except the last."""
    return int(server.metric("request_success_total")) - 1
