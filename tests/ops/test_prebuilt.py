"""Prebuilt libraries of a wheel: the choice by CPU, and the cases that compile anyway."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from click.testing import CliRunner

from tests.ops.stub_compiler import count
from weft.cli.build_ops import build_ops
from weft.common.errors import ConfigError
from weft.ops.cpu import build, prebuilt

NAMES = [level.name for level in prebuilt.LEVELS]


@pytest.fixture
def wheel(calls: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of an installed wheel's libraries, which the stub compiled."""
    folder = tmp_path / "prebuilt"
    monkeypatch.setattr(prebuilt, "FOLDER", folder)
    monkeypatch.setattr(build.platform, "machine", lambda: "x86_64")
    build.build_for_wheel(folder)
    calls.unlink()
    return folder


def cpu_of(monkeypatch: pytest.MonkeyPatch, name: str, without: str = "") -> None:
    """Pretend that the CPU has level ``name`` without feature ``without``."""
    needs = next(level.needs for level in prebuilt.LEVELS if level.name == name) - {without}
    monkeypatch.setattr(prebuilt, "cpu_features", lambda: needs | {"another"})


def test_levels_go_from_the_best_to_the_oldest() -> None:
    """A CPU takes the first level it can run, the most demanding or the best."""
    for number, level in enumerate(prebuilt.LEVELS):
        assert not any(level.needs <= later.needs for later in prebuilt.LEVELS[number + 1 :])
        assert prebuilt.LEVELS[-1].needs <= level.needs


@pytest.mark.parametrize("name", NAMES)
def test_a_cpu_takes_the_best_library_that_it_can_run(
    wheel: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    cpu_of(monkeypatch, name)
    assert build.find() == wheel / name / build.LIBRARY


def test_a_cpu_that_lacks_one_feature_takes_the_next(wheel: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cpu_of(monkeypatch, "avx512", without="avx512dq")
    assert build.find() == wheel / "avx2" / build.LIBRARY
    cpu_of(monkeypatch, "avx2_vnni", without="avx_vnni")
    assert build.find() == wheel / "avx2" / build.LIBRARY
    cpu_of(monkeypatch, "avx2", without="fma")
    assert build.find() is None


def test_amx_in_software_is_only_forced(monkeypatch: pytest.MonkeyPatch) -> None:
    cpu_of(monkeypatch, "avx512_bf16")
    assert not {level.name for level in prebuilt.levels_here()} & {level.name for level in prebuilt.EMULATED}
    monkeypatch.setenv("WEFT_CPU_LEVEL", "amx_emulated")
    forced = prebuilt.forced_level()
    assert forced is not None
    assert "-DWEFT_EMULATED_AMX" in forced.flags


def test_intel_without_amx_multiplies_bf16_as_floats(monkeypatch: pytest.MonkeyPatch) -> None:
    """A library built on the machine has the flag of the wheel's library for such a CPU."""
    flags = {}
    for name in ("amx", "avx512_intel", "avx512_bf16"):
        cpu_of(monkeypatch, name)
        flags[name] = prebuilt.native_flags()
    assert flags == {"amx": (), "avx512_intel": ("-DWEFT_NO_BF16_DOTS",), "avx512_bf16": ()}


def test_features_are_read_with_the_vendor(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    core = "processor : {}\nvendor_id\t: GenuineIntel\nmodel name : A Xeon\nflags\t\t: fma avx2\n\n"
    (tmp_path / "cpuinfo").write_text(core.format(0) + core.format(1))
    monkeypatch.setattr(prebuilt, "_CPUINFO", tmp_path / "cpuinfo")
    assert prebuilt.cpu_features() == {"GenuineIntel", "fma", "avx2"}


def test_each_level_is_compiled_with_its_own_flags(
    calls: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(build.platform, "machine", lambda: "x86_64")
    tag = build.build_for_wheel(tmp_path / "out")
    compiled = [line.split() for line in calls.read_text().splitlines() if " -c " in line]
    assert len(compiled) == len(prebuilt.LEVELS) * 2
    for level in prebuilt.LEVELS:
        assert sum(set(level.flags) <= set(words) for words in compiled) >= 2, level
    assert not any("-march=native" in words for words in compiled)
    assert tag == "manylinux_2_17_x86_64"  # the stub's output needs no glibc
    assert json.loads((tmp_path / "out" / "manifest.json").read_text())["torch"] == prebuilt.torch_version()


def test_nothing_is_compiled_beside_a_wheel_unless_told(
    wheel: Path, calls: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cpu_of(monkeypatch, "avx512_bf16")
    said = CliRunner().invoke(build_ops, [])
    assert said.output == (
        "the installed wheel has the C++ operations for this CPU (avx512_bf16); "
        "--force compiles them anyway\n"
    )
    assert count(calls) == 0
    own = build.build(force=True)
    assert own.is_relative_to(build.cache_folder())
    assert build.find() == own  # a library built for the machine has precedence


def test_another_torch_or_other_sources_compile(
    wheel: Path, sources: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cpu_of(monkeypatch, "amx")
    monkeypatch.setattr(prebuilt, "torch_version", lambda: "9.9.0")
    assert build.find() is None
    monkeypatch.undo()
    monkeypatch.setattr(prebuilt, "FOLDER", wheel)
    monkeypatch.setattr(build, "SOURCES", sources)
    (sources / "two.cpp").write_text("int changed;\n")
    assert prebuilt.find(build.sources_digest()) is None


def test_builds_of_one_torch_are_alike(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prebuilt.importlib.metadata, "version", lambda name: "2.13.0+cpu")
    assert prebuilt.torch_version() == "2.13.0"


def test_a_wheel_is_for_the_oldest_glibc_that_loads_it(tmp_path: Path) -> None:
    (tmp_path / "one").write_bytes(b"\0GLIBC_2.2.5\0GLIBC_2.33\0GLIBCXX_3.4.30\0")
    (tmp_path / "two").write_bytes(b"\0GLIBC_2.14\0")
    assert prebuilt.platform_tag([tmp_path / "one", tmp_path / "two"]) == "manylinux_2_33_x86_64"


def test_an_arm_machine_builds_and_takes_its_own_levels(
    calls: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(prebuilt, "FOLDER", tmp_path)
    monkeypatch.setattr(build.platform, "machine", lambda: "aarch64")
    assert build.build_for_wheel(tmp_path) == "manylinux_2_17_aarch64"
    for level in prebuilt.ARM_LEVELS:
        monkeypatch.setattr(prebuilt, "cpu_features", lambda level=level: level.needs | {"another"})
        assert build.find() == tmp_path / level.name / build.LIBRARY
    monkeypatch.setattr(build.platform, "machine", lambda: "x86_64")
    assert build.find() is None


def test_other_machines_have_no_levels(calls: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(build.platform, "machine", lambda: "riscv64")
    with pytest.raises(build.BuildError, match="for x86-64 and aarch64, and this machine is riscv64"):
        build.build_for_wheel(tmp_path / "out")
    assert count(calls) == 0


def test_a_forced_level_is_found_and_built_for_itself(
    calls: Path, wheel: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """WEFT_CPU_LEVEL below the CPU's level selects its wheel library, compiler flags and cache place."""
    cpu_of(monkeypatch, "avx512_bf16")
    monkeypatch.setenv("WEFT_CPU_LEVEL", "avx2")
    assert build.find() == wheel / "avx2" / build.LIBRARY
    forced = build.build(force=True)
    compiled = [line.split() for line in calls.read_text().splitlines() if " -c " in line]
    assert all("-march=x86-64-v3" in words and "-march=native" not in words for words in compiled)
    assert build.find() == forced
    monkeypatch.delenv("WEFT_CPU_LEVEL")
    assert build.find() == wheel / "avx512_bf16" / build.LIBRARY


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("avx3", "set one of amx, avx512_intel, avx512_bf16"),
        ("amx", "does not have amx_bf16, amx_int8, amx_tile; set one of avx512_bf16, avx512_vnni"),
        ("avx512_intel", "does not have GenuineIntel; set one of avx512_bf16"),
    ],
)
def test_a_level_that_cannot_be_forced_is_named(
    calls: Path, monkeypatch: pytest.MonkeyPatch, name: str, says: str
) -> None:
    monkeypatch.setattr(prebuilt.platform, "machine", lambda: "x86_64")
    cpu_of(monkeypatch, "avx512_bf16")
    monkeypatch.setenv("WEFT_CPU_LEVEL", name)
    with pytest.raises(ConfigError, match=says):
        build.find()
    said = CliRunner().invoke(build_ops, [])
    assert isinstance(said.exception, ConfigError)
    assert says in said.exception.message
