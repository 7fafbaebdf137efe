"""A backend enforces every accepted schema; bench/grammars.py has the full comparison."""

from __future__ import annotations

from pathlib import Path

import pytest

from bench.grammar_schemas import Drawn, functions
from bench.grammars import Tally, bundled, trained, tried, values_of
from tests.grammar.rig import BACKENDS
from weft.grammar.registry import make_compiler


@pytest.mark.slow
@pytest.mark.requirement("G7")
@pytest.mark.parametrize("backend", BACKENDS)
def test_sixty_schemas_are_kept_or_refused(backend: str) -> None:
    if backend == "xgrammar":
        pytest.importorskip("xgrammar")
    model = bundled()
    compiler = make_compiler(backend, str(model.folder), model.size, model.ends)
    tally = Tally(backend)
    drawn = [Drawn(seed).schema() for seed in range(45)] + functions()[:15]
    for seed, schema in enumerate(drawn):
        tried(compiler, model, schema, values_of(schema, seed, 3), seed, tally)
    assert tally.broken == []
    assert tally.taken >= 30
    assert tally.walked > tally.walks / 4
    assert tally.near_accepted > 50


def test_every_function_schema_is_taken_by_llguidance() -> None:
    model = bundled()
    compiler = make_compiler("llguidance", str(model.folder), model.size, model.ends)
    tally = Tally("llguidance")
    for schema in functions():
        tried(compiler, model, schema, [], 0, tally)
    assert tally.refused == {}


@pytest.mark.requirement("G7")
@pytest.mark.grid
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("backend", BACKENDS)
def test_a_thousand_schemas_are_kept_or_refused(backend: str, tmp_path: Path) -> None:
    if backend == "xgrammar":
        pytest.importorskip("xgrammar")
    for model in (bundled(), trained(tmp_path, 8192)):
        compiler = make_compiler(backend, str(model.folder), model.size, model.ends)
        tally = Tally(backend)
        for seed, schema in enumerate([Drawn(seed).schema() for seed in range(1000)] + functions()):
            tried(compiler, model, schema, values_of(schema, seed, 3), seed, tally)
        assert tally.broken == []
