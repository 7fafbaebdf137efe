"""The build of the CPU extension with a stub compiler: reuse of objects, and error messages."""

from __future__ import annotations

import contextlib
import logging
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from click.testing import CliRunner

from tests.ops.stub_compiler import count, use_stub
from tests.support.slowness import deadline, until
from weft.cli.build_ops import build_ops
from weft.cli.main import main
from weft.common import signals
from weft.common.measurements import cache_folder
from weft.ops import cpu
from weft.ops.cpu import build, compilers


@pytest.fixture
def loader() -> Iterator[None]:
    """Clear the cache of ``cpu.load`` before and after the test."""
    cpu.load.cache_clear()
    yield
    cpu.load.cache_clear()


def test_built_once_and_found(calls: Path) -> None:
    assert build.find() is None
    said: list[str] = []
    library = build.build(say=said.append)
    assert library.read_text() == "made\n"
    assert build.find() == library
    assert count(calls) == 3  # two files and the link
    assert re.match(r"compiling 2 files with [12] process(es)? of stub 1\.0, once", said[0])
    assert {line.split(" (")[0] for line in said} & {"  1/2 one.cpp", "  2/2 one.cpp"}
    assert build.build(say=said.append) == library
    assert count(calls) == 3
    assert said[-1] == "the C++ operations are built already"
    build.build(force=True)
    assert count(calls) == 6
    assert not list(cache_folder().rglob("partial-*"))


def test_a_changed_source_is_another_library_and_one_compile(calls: Path, sources: Path) -> None:
    first = build.build()
    (sources / "two.cpp").write_text("int other;\n")
    assert build.find() is None
    second = build.build()
    assert second != first
    assert build.find() == second
    assert count(calls) == 5


def test_a_changed_header_compiles_what_includes_it(calls: Path, sources: Path) -> None:
    build.build()
    (sources / "deep.h").write_text("int deeper;\n")
    build.build()
    assert count(calls) == 5
    assert "one.cpp" in calls.read_text().splitlines()[3]


def test_another_compiler_torch_or_cpu_is_another_library(
    calls: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = build.build()
    use_stub(tmp_path, monkeypatch, "2.0")
    second = build.build()
    assert second != first
    # Same base: without a compiler, the newest of both is used.
    os.utime(first, (1, 1))
    assert build.find() == second
    monkeypatch.setattr(build, "_machine", lambda target: "torch 9.9 another-cpu")
    assert build.find() is None


def test_objects_are_shared_by_environments_with_the_same_torch(
    calls: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A second virtual environment links anew and compiles nothing."""
    library = build.build()
    assert count(calls) == 3
    library.unlink()
    other = tmp_path / "other" / "torch"
    other.parent.mkdir()
    other.symlink_to(build._torch_folder())
    monkeypatch.setattr(build, "_torch_folder", lambda: other)
    build.build()
    assert count(calls) == 4


def test_a_failing_compile_shows_the_last_lines_and_leaves_nothing(calls: Path, sources: Path) -> None:
    (sources / "two.cpp").write_text("DOES_NOT_COMPILE\n")
    with pytest.raises(build.BuildError, match=r"two\.cpp does not compile") as raised:
        build.build()
    assert "told to fail" in raised.value.output
    assert build.find() is None
    assert not list(cache_folder().rglob("partial-*"))


def test_no_compiler_says_what_to_install(sources: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CXX", raising=False)
    monkeypatch.setattr(shutil, "which", lambda name: None)
    with pytest.raises(
        build.BuildError, match=r"no C\+\+ compiler found .*g\+\+, c\+\+, clang.*apt-get install g\+\+"
    ):
        build.build()
    monkeypatch.setenv("CXX", "no-such-compiler")
    with pytest.raises(build.BuildError, match=r"'no-such-compiler' \(CXX\)"):
        build.build()


def test_builders_at_once_build_once(calls: Path) -> None:
    with ThreadPoolExecutor(4) as pool:
        made = list(pool.map(lambda _: build.build(), range(4)))
    assert len(set(made)) == 1
    assert count(calls) == 3


def test_as_many_compilers_as_cores_and_memory_allow(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(build, "usable_cores", lambda: 8)
    monkeypatch.setattr(build, "available_memory", lambda: 64 << 30)
    assert build.processes_for(10) == 8
    assert build.processes_for(3) == 3
    monkeypatch.setattr(build, "available_memory", lambda: 5 << 29)
    assert build.processes_for(10) == 2
    monkeypatch.setattr(build, "available_memory", lambda: 0)
    assert build.processes_for(10) == 1
    monkeypatch.setattr(build, "available_memory", lambda: None)
    assert build.processes_for(10) == 8


def test_the_longest_compile_begins_first(
    calls: Path, sources: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(build, "SECONDS", {"one.cpp": 1, "two.cpp": 9})
    monkeypatch.setattr(build, "usable_cores", lambda: 1)
    build.build()
    order = [line for line in calls.read_text().splitlines() if " -c " in line]
    assert ["two.cpp" in line for line in order] == [True, False]


def test_another_home_has_its_own_build(calls: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The build lies in the user's cache, so another HOME has no build, and the command makes one there."""
    monkeypatch.delenv("WEFT_OPS_CACHE")
    for number, user in enumerate(("one", "two", "one"), 1):
        monkeypatch.setenv("HOME", str(tmp_path / user))
        if number < 3:
            assert build.find() is None
        ran = CliRunner().invoke(build_ops, [])
        assert ran.exit_code == 0
        found = build.find()
        assert found is not None
        assert found.is_relative_to(tmp_path / user)
        assert count(calls) == 3 * min(number, 2)


MAKEFILE = (Path(__file__).parents[2] / "Makefile").read_text(encoding="utf-8")
USES_OPS = (
    "unit",
    "test",
    "quick",
    "test-slow",
    "test-transformers",
    "test-levels",
    "test-grid",
    "test-ray",
    "test-nixl",
    "test-clients",
    "soak",
    "bench",
    "wheel",
)


@pytest.mark.parametrize("target", USES_OPS)
def test_make_asks_for_the_build_every_time(target: str, tmp_path: Path) -> None:
    """No mark in .venv stands for the build: the build may be missing in the cache of this user.

    `make -t` makes each mark of a file new. Then `make -n` shows the commands that still run.
    """
    root = Path(__file__).parents[2]
    for name in ("Makefile", "pyproject.toml"):
        shutil.copy(root / name, tmp_path)
    shutil.copytree(root / "requirements", tmp_path / "requirements")
    (tmp_path / ".venv/bin").mkdir(parents=True)
    clean = {name: value for name, value in os.environ.items() if name not in ("MAKEFLAGS", "MAKELEVEL")}
    for flag in ("-t", "-n"):
        ran = subprocess.run(
            ["make", flag, target], cwd=tmp_path, env=clean, capture_output=True, text=True, check=True
        )
    assert "pip install" not in ran.stdout
    assert "weft build-ops" in ran.stdout


def test_make_serve_compiles_beside_the_server() -> None:
    serve = re.search(r"^serve:.*\n\t(.*)", MAKEFILE, re.MULTILINE)
    assert serve is not None
    assert serve.group(1).startswith("exec env PYTHONDONTWRITEBYTECODE= $(BIN)/weft serve --build-ops")


@pytest.mark.parametrize("forbidden", ["", "1"])
def test_pip_compiles_where_python_may_not_keep_what_it_compiles(forbidden: str, tmp_path: Path) -> None:
    """Else every start of a server would compile its modules again."""
    shutil.copy(Path(__file__).parents[2] / "Makefile", tmp_path)
    (tmp_path / "requirements").mkdir()
    for name in ("pyproject.toml", "requirements/runtime.txt"):
        (tmp_path / name).touch()
    clean = {name: value for name, value in os.environ.items() if name not in ("MAKEFLAGS", "MAKELEVEL")}
    clean["PYTHONDONTWRITEBYTECODE"] = forbidden
    ran = subprocess.run(
        ["make", "-n", "serve"], cwd=tmp_path, env=clean, capture_output=True, text=True, check=True
    )
    installs = [line for line in ran.stdout.splitlines() if re.search("install_torch|pip .*install", line)]
    assert len(installs) == 3
    assert [line for line in installs if ("--no-compile" in line) == bool(forbidden)] == []


def test_every_target_that_runs_operations_is_checked() -> None:
    """Targets that run Python of this repository, except for GPUs, ARM, the simulator and the checks."""
    others = {
        "serve",
        "test-gpu",
        "test-arm",
        "simulate",
        "lint",
        "types",
        "types-tests",
        "imports",
        "ops",
        "docs",
        "clean",
        "help",
        "setup",
    }
    named = set(re.findall(r"^\.PHONY: (.*)", MAKEFILE, re.MULTILINE)[0].split())
    assert named - others - {"bench-peers"} == set(USES_OPS)


def test_pages_that_install_the_package_say_how_to_compile() -> None:
    """`pip install .` compiles nothing. A block that serves on a CPU afterwards has `weft build-ops`."""
    root = Path(__file__).parents[2]
    blocks = []
    for page in (root / "README.md", *(root / "docs").rglob("*.md")):
        text = page.read_text(encoding="utf-8")
        blocks += re.findall(r"^ *```\w*\n((?:(?!```).)*\bpip install \.\n.*?)^ *```", text, re.M | re.S)
    assert len(blocks) >= 2
    assert all("\nweft build-ops" in block for block in blocks)


def test_every_source_was_measured() -> None:
    """For a new file, measure it (`/usr/bin/time weft build-ops` after `touch`) and extend the table."""
    assert set(build.SECONDS) == {path.name for path in build.SOURCES.glob("*.cpp")}


def test_one_source_includes_torchs_headers() -> None:
    """Torch's headers take longer to compile than most kernels, which get plain pointers (csrc/tensor.h)."""
    torchs = re.compile(r"#include <(torch|ATen|c10)/")
    including = {path.name for path in build.SOURCES.iterdir() if torchs.search(path.read_text())}
    assert including == {"library.cpp", "torch.h", "boxed.h", "program.h"}
    for source in build.SOURCES.glob("*.cpp"):
        texts = "".join(build._with_headers(source))
        assert bool(torchs.search(texts)) == (source.name == "library.cpp"), source.name


def test_headers_are_compiled_once_for_four_sources(calls: Path, sources: Path) -> None:
    (sources / "precompiled.h").write_text('#include "shared.h"\n')
    for name in ("three", "four"):
        (sources / f"{name}.cpp").write_text(f"int {name};\n")
    said: list[str] = []
    build.build(verbose=True, say=said.append)
    headers, *objects, _ = calls.read_text().splitlines()
    assert "-x c++-header" in headers
    assert any("-x c++-header" in line for line in said)
    first = headers.split()[headers.split().index("-c") + 1]
    assert len(objects) == 4
    assert all(f"-include {first} -c" in line for line in objects)
    assert not list(cache_folder().rglob("partial-*"))
    # Fewer sources compile without the headers.
    (sources / "two.cpp").write_text("int other;\n")
    build.build()
    assert "-include" not in calls.read_text().splitlines()[-2]


def test_an_exception_stops_the_compiler_of_the_headers(tmp_path: Path) -> None:
    """The compiler is a driver with a child, as g++ is."""
    compiler, headers = tmp_path / "compiler", tmp_path / "all.h"
    compiler.write_text("#!/bin/sh\nsleep 543.21 &\nwait\n")
    compiler.chmod(0o755)
    headers.touch()
    until = time.monotonic() + deadline(10)

    def become(state: bool) -> None:
        while running("543.21") != state:
            assert time.monotonic() < until
            time.sleep(0.01)

    def interrupt(command: str) -> None:
        become(True)
        raise KeyboardInterrupt

    with (
        pytest.raises(KeyboardInterrupt),
        compilers.precompiled([str(compiler)], headers, tmp_path, interrupt),
    ):
        pass
    become(False)
    assert not list(tmp_path.glob("partial-*"))


def test_compilers_run_at_the_same_time(
    calls: Path, sources: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each compiler waits for the start of the other, so sequential runs would never end."""
    monkeypatch.setattr(build, "usable_cores", lambda: 2)
    (sources / "one.cpp").write_text(f"BEGIN {tmp_path}/a AWAIT {tmp_path}/b\n")
    (sources / "two.cpp").write_text(f"BEGIN {tmp_path}/b AWAIT {tmp_path}/a\n")
    assert build.build().exists()


def test_a_failing_compile_stops_the_others_and_what_is_done_stays(
    calls: Path, sources: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(build, "usable_cores", lambda: 2)
    (sources / "good.cpp").write_text(f"BEGIN {tmp_path}/good AWAIT /dev/null\n")
    (sources / "one.cpp").write_text(f"BEGIN {tmp_path}/hangs AWAIT {tmp_path}/never\n")
    (sources / "two.cpp").write_text(f"BEGIN {tmp_path}/x AWAIT {tmp_path}/hangs\nDOES_NOT_COMPILE\n")
    monkeypatch.setattr(build, "SECONDS", {"good.cpp": 3, "one.cpp": 2, "two.cpp": 1})
    with pytest.raises(build.BuildError, match=r"two\.cpp does not compile"):
        build.build()
    assert len(list(cache_folder().glob("objects/*.o"))) == 1
    assert not list(cache_folder().rglob("partial-*"))
    # A killed process that no parent has read yet is still listed.
    until(lambda: not running(str(sources / "one.cpp")), 10)
    before = count(calls)
    (sources / "one.cpp").write_text("int one;\n")
    (sources / "two.cpp").write_text("int two;\n")
    build.build()
    assert count(calls) - before == 3  # not good.cpp


def running(word: str) -> bool:
    """Return True if a process has ``word`` among its arguments."""
    for folder in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            if word.encode() in (folder / "cmdline").read_bytes().split(b"\0"):
                return True
    return False


def heed_signals() -> None:
    """Restore default signal handling: a child would inherit ignored signals."""
    for number in signals.STOPS:
        signal.signal(number, signal.SIG_DFL)


@pytest.mark.slow
def test_an_interrupted_build_stops_its_compilers_and_goes_on(
    calls: Path, sources: Path, tmp_path: Path
) -> None:
    """The next build also removes partial files of a killed build."""
    (sources / "one.cpp").write_text(f"BEGIN {tmp_path}/hangs AWAIT {tmp_path}/go\n")
    code = (
        "import pathlib, sys; from weft.cli.main import main; from weft.ops.cpu import build; "
        "build.SOURCES = pathlib.Path(sys.argv[1]); build.SECONDS = {'two.cpp': 2, 'one.cpp': 1}; "
        "main(['build-ops'])"
    )
    numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGKILL)
    statuses = []
    for number in numbers:
        process = subprocess.Popen(
            [sys.executable, "-c", code, str(sources)],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            preexec_fn=heed_signals,
        )
        until = time.monotonic() + deadline(60)
        while not ((tmp_path / "hangs").exists() and list(cache_folder().glob("objects/*.o"))):
            assert time.monotonic() < until
            time.sleep(0.02)
        process.send_signal(number)
        statuses.append(process.wait(deadline(60)))
        (tmp_path / "hangs").unlink()
        # A killed compiler's children are still seen for a moment.
        while running(str(sources / "one.cpp")) and number != signal.SIGKILL:
            assert time.monotonic() < until, "a compiler goes on"
            time.sleep(0.02)
        assert running(str(sources / "one.cpp")) == (number == signal.SIGKILL)
    assert statuses == [130, 143, 129, -9]
    assert count(calls) == 5  # two.cpp once, one.cpp each time
    (tmp_path / "go").touch()
    build.build()
    assert count(calls) == 7
    assert not list(cache_folder().rglob("partial-*"))


def test_a_terminal_gets_one_line_that_is_rewritten(
    calls: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.stdout.isatty", lambda: True)
    build_ops.main([], standalone_mode=False)
    out = capsys.readouterr().out
    first, *rest = out.split("\n")
    assert first.startswith("compiling 2 files")
    assert re.search(r"\r  [01] of 2 compiled, \d+ s: (one|two)\.cpp", rest[0])
    assert rest[0].endswith("\x1b[Kbuilt the C++ operations in 0 s") or "\x1b[Kbuilt the C++" in rest[0]


def test_old_builds_are_removed(calls: Path, sources: Path) -> None:
    first = build.build()
    os.utime(first, (1, 1))
    (sources / "two.cpp").write_text("int other;\n")
    second = build.build()
    assert not first.exists()
    assert second.exists()


def test_a_reader_that_leaves_is_not_blamed_on_the_folder(
    calls: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def gone(*_: object, **__: object) -> None:
        raise BrokenPipeError

    monkeypatch.setattr("click.echo", gone)
    with pytest.raises(BrokenPipeError):
        build_ops.main([], standalone_mode=False)


def test_command(calls: Path, sources: Path) -> None:
    ran = CliRunner().invoke(build_ops, ["--verbose"])
    assert ran.exit_code == 0
    assert "-march=native" in ran.output
    assert "built the C++ operations in" in ran.output
    (sources / "two.cpp").write_text("DOES_NOT_COMPILE\n")
    ran = CliRunner().invoke(build_ops, [])
    assert isinstance(ran.exception, build.BuildError)
    assert "told to fail" in ran.output


def test_a_folder_that_cannot_be_written_is_an_error_in_one_line(
    tmp_path: Path,
    calls: Path,
    sources: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("WEFT_OPS_CACHE", str(tmp_path / "file" / "ops"))
    with pytest.raises(SystemExit) as ended:
        main(["build-ops"])
    assert ended.value.code == 2
    told = capsys.readouterr().err
    assert told.count("\n") == 1
    assert "(not a directory): set WEFT_OPS_CACHE to a folder with write permission" in told


def test_without_a_build_one_line_says_what_it_costs(
    sources: Path, loader: None, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(logging.getLogger("weft"), "propagate", True)
    assert not cpu.load()
    assert not cpu.load()
    # A record can be captured twice, where an earlier test configured the log.
    records = {id(record): record for record in caplog.records if record.name == "weft.ops.cpu"}
    lines = [record.getMessage() for record in records.values()]
    assert len(lines) == 1
    assert "`weft build-ops` builds them" in lines[0]
    assert cpu.capabilities() == ()


def test_a_broken_library_is_not_used(
    calls: Path, loader: None, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(logging.getLogger("weft"), "propagate", True)
    build.build()  # the stub makes a text file
    assert not cpu.load()
    assert "build-ops --force" in caplog.text


def test_the_real_library_loads(extension: None) -> None:
    assert cpu.load()
    assert torch_namespace_has("linear")


def test_what_a_cpu_can_run_is_told_and_never_raises(extension: None) -> None:
    # On AVX-512 without bf16 oneDNN rejects a kernel with an exception; engines must start there too.
    assert set(cpu.capabilities()) <= {"avx2", "avx512", "avx512_bf16", "word_rows", "amx_bf16", "brgemm"}


def torch_namespace_has(name: str) -> bool:
    import torch

    return hasattr(torch.ops.weft_cpu, name)


def test_switched_off(extension: None, loader: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WEFT_DISABLE_CPU_OPS", "1")
    assert not cpu.load()


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root, which alone can give files away")
def test_a_library_that_somebody_else_made_is_not_loaded(calls: Path) -> None:
    library = build.build()
    os.chown(library, 12345, -1)
    assert build.find() is None
    os.chown(library, 0, -1)
    os.chown(library.parent, 12345, -1)
    assert build.find() is None


def test_a_cache_that_cannot_be_looked_at_is_no_build(
    sources: Path, monkeypatch: pytest.MonkeyPatch, loader: None
) -> None:
    def denied() -> Path:
        raise PermissionError("not yours")

    monkeypatch.setattr(build, "find", denied)
    assert not cpu.load()
