"""The table of requirements names existing tests and omits no requirement."""

from __future__ import annotations

import ast
import functools
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
TABLE = ROOT / "docs" / "requirements.md"
BUILT = (
    [f"A{i}" for i in range(1, 22)]
    + [f"B{i}" for i in range(1, 22)]
    + [f"C{i}" for i in range(1, 15)]
    + [f"D{i}" for i in range(1, 32)]
    + [f"E{i}" for i in range(1, 36)]
    + [f"F{i}" for i in (*range(1, 36), *range(40, 49), *range(60, 68))]
    + [f"G{i}" for i in (*range(1, 16), 20, 21)]
)  # fmt: skip

CLIENTS = "its client has many packages of its own: make test-clients"
SAMPLED = "a smaller sample of the same is in the row, too"
NOT_IN_CI = {
    "tests/clients/test_agents.py::test_claude": "the agent comes from npm: make test-clients",
    "tests/clients/test_agents.py::test_codex": "the agent comes from npm: make test-clients",
    "tests/clients/test_langchain.py::test_a_tools_round_trip": CLIENTS,
    "tests/clients/test_litellm.py::test_a_tools_round_trip": CLIENTS,
    "tests/clients/test_lm_eval.py::test_likelihoods_of_choices": CLIENTS,
    "tests/clients/test_schemathesis.py::test_every_operation_keeps_to_the_document": CLIENTS,
    "tests/e0/test_grid.py::test_whole_grid": SAMPLED,
    "tests/faults/test_continued_streams.py::test_a_death_before_each_token": SAMPLED,
    "tests/faults/test_role_hosts.py::test_caches_cross_the_network_and_what_befalls_it": (
        "it needs network namespaces; the same without hosts is in the row, too"
    ),
    "tests/front/test_mutated_bodies.py::test_twenty_thousand_mutated_bodies": SAMPLED,
    "tests/front/test_pause.py::test_a_thousand_clients_that_never_read": SAMPLED,
    "tests/grammar/test_comparison.py::test_a_thousand_schemas_are_kept_or_refused": SAMPLED,
    "tests/launch/test_encode.py::test_the_same_answers_in_other_topologies": SAMPLED,
    "tests/launch/test_verify_topology.py::test_every_family_moves": SAMPLED,
    "tests/sim/test_cluster.py::test_invariants_hold_over_the_whole_budget": SAMPLED,
    "tests/text/parsing/test_outputs.py::test_five_thousand_outputs_lose_nothing": SAMPLED,
}
"""Named tests that ``.ci/run`` does not run, with reasons. Each row also has tests that run."""


def rows() -> dict[str, tuple[str, str]]:
    """id -> (where, tests), both as written."""
    found = {}
    for line in TABLE.read_text(encoding="utf-8").splitlines():
        cells = [cell.strip() for cell in line.split("|")]
        if len(cells) == 6 and re.fullmatch(r"[A-G]\d+", cells[1]):
            assert cells[1] not in found, f"{cells[1]} stands twice"
            found[cells[1]] = (cells[3], cells[4])
    return found


def unmet() -> set[str]:
    """Return the requirements that the second table lists as unmet or not shown."""
    lines = TABLE.read_text(encoding="utf-8").splitlines()
    return {line.split("|")[1].strip() for line in lines if re.match(r"\| [A-G]\d+ \|", line)} - rows().keys()


NAMED = re.compile(r"`(tests/[\w/]+\.py)(?:::[A-Z]\w+)?::(\w+)`")


def named(tests: str) -> list[str]:
    """Return ``path::function`` of each test, without its class."""
    return [f"{file}::{function}" for file, function in NAMED.findall(tests)]


@functools.cache
def functions_of(path: Path) -> set[str]:
    tree = ast.parse(path.read_text(encoding="utf-8"))
    return {node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)}


def test_every_requirement_built_so_far_is_listed() -> None:
    assert sorted([*rows(), *unmet()]) == sorted(BUILT)


def test_every_named_test_exists() -> None:
    missing = []
    for number, (_, tests) in rows().items():
        assert named(tests), f"{number} names no test"
        for file, _, function in (name.partition("::") for name in named(tests)):
            path = ROOT / file
            if not path.is_file() or function not in functions_of(path):
                missing.append(f"{number}: {file}::{function}")
    assert missing == []


@pytest.mark.slow
def test_every_named_test_runs_in_ci() -> None:
    """Pytest collects each named test among default or slow tests, unless an exception has a reason."""
    files = sorted({name.partition("::")[0] for _, tests in rows().values() for name in named(tests)})
    elsewhere = "not grid and not clients and not agents and not gpu"
    command = [sys.executable, "-m", "pytest", "--collect-only", "-q", "-n", "0", "-p", "no:cacheprovider"]
    made = subprocess.run(
        [*command, "-m", elsewhere, *files], cwd=ROOT, capture_output=True, text=True, env=os.environ
    )
    assert made.returncode == 0, made.stdout[-2000:] + made.stderr[-2000:]
    lines = [line.strip().partition("[")[0] for line in made.stdout.splitlines() if "::" in line]
    run = {f"{line.split('::')[0]}::{line.split('::')[-1]}" for line in lines}
    missing, alone, used = [], [], set()
    for number, (_, tests) in rows().items():
        absent = {name for name in named(tests) if name not in run}
        missing += [f"{number}: {name}" for name in sorted(absent - NOT_IN_CI.keys())]
        alone += [number] if absent == set(named(tests)) else []
        used |= absent
    assert missing == []
    assert alone == [], "rows of which CI runs no test"
    assert sorted(NOT_IN_CI.keys() - used) == [], "CI runs them, or no row names them"


def test_the_record_of_sequences_over_ranks_says_both_sides() -> None:
    (record,) = (ROOT / "docs" / "adr").glob("0015-*.md")
    text = record.read_text(encoding="utf-8")
    parts = ("**Measured**", "**What it does not buy.**", "| part |", "| step |", "| of that, collectives |")
    assert [part for part in parts if part not in text] == []
    for burst in (4, 8):
        assert re.search(rf"^\| {burst} \|.*->.*->.*->", text, re.M), burst


def test_every_named_place_exists() -> None:
    missing = []
    for number, (where, _) in rows().items():
        for place in re.findall(r"`([\w/.]+)`", where):
            if not (ROOT / "weft" / place).exists():
                missing.append(f"{number}: weft/{place}")
    assert missing == []


def test_links_in_the_docs_lead_somewhere() -> None:
    broken = []
    for page in [ROOT / "README.md", *(ROOT / "docs").rglob("*.md"), *(ROOT / "training").glob("*.md")]:
        for target in re.findall(r"\]\(([^)#:]+)(?:#[^)]*)?\)", page.read_text(encoding="utf-8")):
            if not (page.parent / target).exists():
                broken.append(f"{page.name}: {target}")
    assert broken == []
