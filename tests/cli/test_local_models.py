"""weft run, pull, list and ps: in processes of their own, and against a running server."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator

import pytest
from click.testing import CliRunner

from tests.support.servers import Running, Servers
from tests.support.slowness import deadline
from weft.cli.local_models import list_models, pull


def weft(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "weft", *arguments],
        capture_output=True,
        text=True,
        stdin=subprocess.DEVNULL,
        timeout=deadline(120),
    )


@pytest.fixture(scope="module")
def server() -> Iterator[Running]:
    servers = Servers()
    with servers.scope():
        yield servers.weft("--threads", "1", "--max-model-len", "2048")


def test_bundled_models_are_listed_and_need_no_download() -> None:
    listed = CliRunner().invoke(list_models)
    assert "spool-text" in listed.stdout
    assert "bundled" in listed.stdout
    assert CliRunner().invoke(pull, ["spool-text"]).stdout.rstrip().endswith("spool-text")
    refused = CliRunner().invoke(pull, ["no-such-model"])
    assert "no folder 'no-such-model'" in str(refused.exception)


@pytest.mark.slow
def test_the_loaded_models_of_a_server(server: Running) -> None:
    shown = weft("ps", "--url", server.url)
    assert server.model in shown.stdout
    assert "2048" in shown.stdout
    gone = weft("ps", "--url", "http://127.0.0.1:9")
    assert gone.returncode == 2
    assert "does not answer" in gone.stderr


@pytest.mark.slow
def test_a_prompt_goes_to_the_server_that_has_the_model(server: Running) -> None:
    ran = weft("run", server.model, "What", "is", "7", "times", "8?", "--url", server.url)
    assert ran.returncode == 0, ran.stderr
    assert "56" in ran.stdout
    other = weft("run", "other-model", "hello", "--url", server.url)
    assert other.returncode == 2
    assert "does not have the model" in other.stderr


@pytest.mark.slow
def test_without_a_server_the_command_starts_one() -> None:
    ran = weft("run", "spool-text", "What is 7 times 8?")
    assert "56" in ran.stdout, ran.stderr
