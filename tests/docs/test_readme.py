"""Every code block of README.md is run by a test.

The blocks that install and serve a published model run offline: the cache of the hub client has a tiny model
under the published name (``tests.support.hub_cache``). The commands are the commands of the page, with
``--port 0`` at the end.
"""

from __future__ import annotations

import contextlib
import importlib
import os
import re
import shutil
import signal
import subprocess
import sys
import sysconfig
import tomllib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from packaging.requirements import Requirement

from tests.docs.test_commands import words
from tests.rehearsal import rig, stand_ins
from tests.support.hub_cache import make_hub_cache
from tests.support.servers import ROOT, Running, Servers
from tests.support.slowness import deadline, until
from weft.cli.main import cli
from weft.cli.serve import server
from weft.common import env
from weft.config.resolved import EngineConfig
from weft.config.sections.all import FrontSection
from weft.engine.core import EngineCore
from weft.engine.ranks.processes import Spares

README = (ROOT / "README.md").read_text(encoding="utf-8")
BLOCKS = re.findall(r"^```\w*\n(.*?)^```", README, re.MULTILINE | re.DOTALL)
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
HERE = "tests/docs/test_readme.py"
TESTS = {
    "make serve": (f"{HERE}::test_the_make_block_serves",),
    "curl": ("tests/clients/test_curl.py::test_a_command_works",),
    "pip install .": (
        f"{HERE}::test_the_package_block_serves",
        f"{HERE}::test_the_package_block_runs_in_a_fresh_environment",
    ),
    "weft serve Qwen/Qwen3-8B": (
        f"{HERE}::test_the_gpu_block_runs_on_a_rehearsed_gpu",
        f"{HERE}::test_the_gpu_block_serves",
    ),
    "from weft import LLM": ("tests/api/test_readme.py::test_the_example_prints_answers",),
}
"""First words of each block -> tests that run the block."""

PACKAGE = next(block for block in BLOCKS if block.startswith("pip install")).splitlines()
GPU = next(block for block in BLOCKS if block.startswith("weft serve")).splitlines()


def published_name(commands: list[str]) -> str:
    """Return the hub name of the model that the block serves."""
    (found,) = [word for line in commands for word in line.split() if re.fullmatch(r"\w+/[\w.-]+", word)]
    return found


@pytest.fixture(scope="module")
def hub(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder for ``HF_HOME`` that has the published models of the page."""
    home = tmp_path_factory.mktemp("hub")
    for commands in (PACKAGE, GPU):
        make_hub_cache(home, published_name(commands))
    return home


@pytest.fixture
def servers() -> Iterator[Servers]:
    made = Servers()
    with made.scope():
        yield made


@contextmanager
def running(command: list[str], **options: Any) -> Iterator[Running]:
    """Start a server in a process group. Yield the ready server, and end the process group.

    The processes of the group must end when the first process gets a signal: nothing may be left.
    """
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, start_new_session=True, **options)
    try:
        ready = Running(process, 120)
        yield ready
        ready.close()
        until(lambda: not in_group(process.pid), 10.0)
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def in_group(group: int) -> bool:
    """Return True if the process group ``group`` has a process."""
    try:
        os.killpg(group, 0)
    except ProcessLookupError:
        return False
    return True


def check_answer(ready: Running, model: str) -> None:
    """Check that the server serves ``model`` under the published name."""
    assert ready.model == model
    answer = ready.chat(max_tokens=4).json()
    assert answer["model"] == model
    assert answer["usage"]["completion_tokens"] > 0


def test_every_block_has_a_test() -> None:
    assert len(BLOCKS) == len(TESTS)
    for block, (begin, tests) in zip(BLOCKS, TESTS.items(), strict=True):
        assert block.startswith(begin)
        for test in tests:
            path, _, name = test.partition("::")
            assert f"def {name}(" in (ROOT / path).read_text(encoding="utf-8"), test


def test_extras_and_the_command_exist() -> None:
    extras = re.findall(r"pip install '\.\[([\w,]+)\]'", README)
    assert extras
    for extra in ",".join(extras).split(","):
        assert extra in PROJECT["optional-dependencies"], extra
    # The page says what the extras of the GPU block add.
    wanted = {
        Requirement(line).name
        for extra in ("cuda", "vision")
        for line in PROJECT["optional-dependencies"][extra]
    }
    assert wanted == {"triton", "pillow"}
    module, _, function = PROJECT["scripts"]["weft"].partition(":")
    assert callable(getattr(importlib.import_module(module), function))


@pytest.mark.slow
@pytest.mark.real_processes
def test_the_make_block_serves(tmp_path: Path) -> None:
    """`make -t` marks the installation as done, and `.venv/bin/weft` is a script that runs this checkout."""
    for name in ("Makefile", "pyproject.toml"):
        shutil.copy(ROOT / name, tmp_path)
    shutil.copytree(ROOT / "requirements", tmp_path / "requirements")
    weft = tmp_path / ".venv/bin/weft"
    weft.parent.mkdir(parents=True)
    weft.write_text(f'#!/bin/sh\nexec {sys.executable} -m weft "$@"\n')
    weft.chmod(0o755)
    clean = env.child_environment(PYTHONPATH=str(ROOT))
    clean = {name: value for name, value in clean.items() if name not in ("MAKEFLAGS", "MAKELEVEL")}
    (line,) = BLOCKS[0].splitlines()
    subprocess.run([*line.split(), "-t"], cwd=tmp_path, env=clean, check=True, stdout=subprocess.DEVNULL)
    with running([*line.split(), "ARGS=--port 0"], cwd=tmp_path, env=clean) as ready:
        check_answer(ready, "spool-text")


@pytest.mark.slow
def test_the_package_block_serves(servers: Servers, hub: Path) -> None:
    """The last command of the block serves. The first two run in a fresh environment (slow)."""
    ready = servers.weft(*words(PACKAGE[-1])[1:], HF_HOME=str(hub))
    check_answer(ready, published_name(PACKAGE))


@pytest.mark.slow
@pytest.mark.real_processes
@pytest.mark.timeout(900)
def test_the_package_block_runs_in_a_fresh_environment(tmp_path: Path, hub: Path) -> None:
    """The block's commands run in a copy of the checkout, in a new environment that has the dependencies.

    pip builds the package. The C++ operations are compiled unless the user's cache has the operations.
    """
    source, fresh = tmp_path / "source", tmp_path / "venv"
    source.mkdir()
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source)
    shutil.copytree(ROOT / "weft", source / "weft", ignore=shutil.ignore_patterns("__pycache__"))
    subprocess.run([sys.executable, "-m", "venv", str(fresh)], check=True)
    # A new environment of Python 3.11 has an old setuptools, which would hide the setuptools of the tests.
    subprocess.run([fresh / "bin/pip", "uninstall", "--quiet", "-y", "setuptools"], check=True)
    (site,) = fresh.glob("lib/*/site-packages")
    (site / "zz_dependencies.pth").write_text(sysconfig.get_path("purelib") + "\n")
    variables = env.child_environment(
        PATH=f"{fresh}/bin:{os.environ['PATH']}",
        VIRTUAL_ENV=str(fresh),
        HF_HOME=str(hub),
        HF_HUB_OFFLINE="1",
        OMP_NUM_THREADS="1",
        PIP_NO_INDEX="1",
        PIP_NO_BUILD_ISOLATION="0",  # pip reads 0 as: without isolation
        PIP_DISABLE_PIP_VERSION_CHECK="1",
    )
    variables.pop("PYTHONPATH", None)
    *steps, serve = PACKAGE
    for step in steps:
        ran = subprocess.run(
            ["bash", "-c", step],
            cwd=source,
            env=variables,
            capture_output=True,
            text=True,
            timeout=deadline(600),
            check=False,
        )
        assert ran.returncode == 0, f"{step}\n{ran.stdout}\n{ran.stderr}"
    # From another folder: the folder of the source would be the first place for imports.
    place = subprocess.run(
        [fresh / "bin/python", "-c", "import weft; print(weft.__file__)"],
        cwd=tmp_path,
        env=variables,
        capture_output=True,
        text=True,
        check=True,
    )
    assert Path(place.stdout).is_relative_to(fresh)
    with running(["bash", "-c", f"exec {serve} --port 0"], cwd=tmp_path, env=variables) as ready:
        check_answer(ready, published_name(PACKAGE))


def resolved(command: str, hub: Path, patch: pytest.MonkeyPatch) -> EngineConfig:
    """Return what ``weft serve`` makes of the command line. No server starts."""
    found: list[EngineConfig] = []

    def run(groups: tuple[EngineConfig, ...], front: FrontSection, spares: Spares) -> int:
        found.extend(groups)
        return 0

    patch.setattr(server, "run", run)
    patch.setattr(server, "configure_log", lambda front: None)
    patch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(hub / "hub"))
    patch.setenv("HF_HUB_OFFLINE", "1")
    cli.main(words(command), standalone_mode=False)
    (config,) = found
    return config


@pytest.mark.slow
def test_the_gpu_block_runs_on_a_rehearsed_gpu(hub: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The command resolves to one group on the GPU in bfloat16, and its engine answers requests."""
    monkeypatch.setattr(stand_ins, "GPU_BYTES", 1 << 28)  # the engine's tables grow with the memory
    (command,) = GPU
    with rig.rehearsed(monkeypatch) as made:
        config = resolved(command, hub, monkeypatch)
        assert (config.device, config.dtype) == ("cuda", "bfloat16")
        assert config.served_names == (published_name(GPU),)
        rig.Answers(made, monkeypatch, config.spec.vocab_size)
        core = EngineCore(config, progress=False)
        answers = rig.serve(core, made, rig.few(config.spec.vocab_size))
        core.close()
    assert len(answers) == 3


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")
def test_the_gpu_block_serves(servers: Servers, hub: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (command,) = GPU
    assert resolved(command, hub, monkeypatch).device == "cuda"
    ready = servers.weft(*words(command)[1:], HF_HOME=str(hub))
    check_answer(ready, published_name(GPU))
