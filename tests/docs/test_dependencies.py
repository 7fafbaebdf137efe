"""The pinned dependencies: `make serve` installs the package's needs, and no test tools."""

from __future__ import annotations

import importlib.metadata
import tomllib
from collections.abc import Iterator
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]


def pinned(name: str) -> dict[str, Requirement]:
    lines = (ROOT / "requirements" / name).read_text().splitlines()
    found = [Requirement(line.partition("#")[0]) for line in lines if line and line[0] not in "#-"]
    return {canonicalize_name(one.name): one for one in found}


def closure(roots: list[str]) -> Iterator[str]:
    """Yield the names of ``roots`` and their transitive requirements, as installed packages declare them."""
    waiting, seen = [Requirement(root) for root in roots], set[str]()
    while waiting:
        wanted = waiting.pop()
        name = canonicalize_name(wanted.name)
        if name in seen or (wanted.marker is not None and not wanted.marker.evaluate({"extra": ""})):
            continue
        seen.add(name)
        yield name
        for declared in map(Requirement, importlib.metadata.requires(name) or ()):
            extras = [{"extra": extra} for extra in ("", *wanted.extras)]
            if declared.marker is None or any(map(declared.marker.evaluate, extras)):
                declared.marker = None
                waiting.append(declared)


def test_the_server_finds_all_it_needs_in_the_runtime_file() -> None:
    extras = PROJECT["optional-dependencies"]
    wanted = set(closure([*PROJECT["dependencies"], *extras["vision"], *extras["gguf"]]))
    assert wanted - {"triton"} <= pinned("runtime.txt").keys()  # a CUDA build of torch pins its triton


def test_the_docs_have_pins_for_all_they_ask_for() -> None:
    pins = pinned("docs.txt")
    for asked in map(Requirement, PROJECT["optional-dependencies"]["docs"]):
        (exact,) = pins[canonicalize_name(asked.name)].specifier
        assert asked.specifier.contains(exact.version), asked
    # The lists import weft.config. ruff formats the signatures of the Python API.
    assert str(pins["msgspec"]) == str(pinned("runtime.txt")["msgspec"])
    assert str(pins["ruff"]) == str(pinned("lock.txt")["ruff"])


def test_pins_satisfy_what_the_package_asks_for_and_stand_in_one_file() -> None:
    runtime, tests = pinned("runtime.txt"), pinned("lock.txt")
    assert not runtime.keys() & tests.keys()
    assert "-r runtime.txt" in (ROOT / "requirements/lock.txt").read_text().splitlines()
    for asked in map(Requirement, [*PROJECT["dependencies"], *PROJECT["optional-dependencies"]["dev"]]):
        pin = (runtime | tests)[canonicalize_name(asked.name)]
        exact = [one.version for one in pin.specifier if one.operator == "=="]
        assert not exact or asked.specifier.contains(exact[0], prereleases=True), asked
