"""The build of the CPU extension: what is reused, and what is said when it fails. The compiler is a stub."""

from __future__ import annotations

import logging
import os
import shutil
import stat
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from click.testing import CliRunner

from weft.common.measurements import cache_folder
from weft.launch.build_ops import build_ops
from weft.launch.main import main
from weft.ops import cpu
from weft.ops.cpu import build

# Fails on sources that say so, and counts its calls. "-o FILE" comes last or before the libraries.
STUB = """#!/bin/sh
if [ "$1" = --version ]; then echo "stub {version}"; exit 0; fi
echo "$*" >> "{calls}"
previous=
for word in "$@"; do
  if [ "$previous" = -c ] && grep -q DOES_NOT_COMPILE "$word"; then echo "error: told to fail"; exit 1; fi
  if [ "$previous" = -o ]; then echo made > "$word"; fi
  previous=$word
done
"""


@pytest.fixture
def sources(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "csrc"
    folder.mkdir()
    (folder / "one.cpp").write_text('#include "shared.h"\n')
    (folder / "two.cpp").write_text("int two;\n")
    (folder / "shared.h").write_text('#include "deep.h"\n')
    (folder / "deep.h").write_text("int deep;\n")
    monkeypatch.setattr(build, "SOURCES", folder)
    monkeypatch.setenv("WEFT_OPS_CACHE", str(tmp_path / "cache"))
    return folder


@pytest.fixture
def calls(tmp_path: Path, sources: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The stub is the compiler; the file holds a line for each of its calls."""
    file = tmp_path / "calls"
    use_stub(tmp_path, monkeypatch, "1.0")
    return file


def use_stub(folder: Path, monkeypatch: pytest.MonkeyPatch, version: str) -> None:
    stub = folder / f"stub-{version}"
    stub.write_text(STUB.format(version=version, calls=folder / "calls"))
    stub.chmod(stub.stat().st_mode | stat.S_IXUSR)
    monkeypatch.setenv("CXX", str(stub))


def count(calls: Path) -> int:
    return len(calls.read_text().splitlines()) if calls.exists() else 0


@pytest.fixture
def loader() -> Iterator[None]:
    """``cpu.load`` looks again, in the test and after it."""
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
    assert said[0].startswith("compiling 2 files with stub 1.0")
    assert {"  1/2 one.cpp", "  2/2 one.cpp"} & set(said)
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
    monkeypatch.setattr(build, "_machine", lambda: "torch 9.9 another-cpu")
    assert build.find() is None


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


def test_old_builds_are_removed(calls: Path, sources: Path) -> None:
    first = build.build()
    os.utime(first, (1, 1))
    (sources / "two.cpp").write_text("int other;\n")
    second = build.build()
    assert not first.exists()
    assert second.exists()


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
    assert "(not a directory): set WEFT_OPS_CACHE to a folder that this user may write" in told


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
