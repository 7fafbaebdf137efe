"""Groups that exchange caches through NIXL, as engines of one process and as real processes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.disagg.transport.rig import WITHOUT_NIXL
from tests.engine.pair_rig import pair_of, submit, unified
from tests.engine.test_group_processes import PLAIN, alone, check, groups, submits
from tests.runner.transfers_rig import config_of
from tests.support.secret import write_secret
from tests.support.slow import mostly_slow
from weft.cli.verify.verify_run import generate
from weft.engine.server.replicas import Replicas
from weft.types.sampling import TokenParams

pytestmark = pytest.mark.skipif(WITHOUT_NIXL, reason="needs NIXL: pip install weft[nixl]")
GREEDY = TokenParams(temperature=0.0, max_tokens=12)


@pytest.mark.requirement("E24")
@pytest.mark.parametrize("staged", [False, True])
@pytest.mark.parametrize("network", ["cma", "tcp"])
def test_tokens_are_those_of_one_engine(
    tmp_path: Path, network: str, staged: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if network == "tcp":
        monkeypatch.setenv("UCX_TLS", "tcp")
    if staged:
        monkeypatch.setenv("WEFT_STAGED_POOLS", "1")
    secret = str(write_secret(tmp_path))
    more = {"max_num_batched_tokens": 32, "transfer": "nixl", "group_secret": secret}
    prompts = [[3 + (7 * n + 5 * i) % 90 for i in range(5 + 13 * n)] for n in range(6)]
    asked = [submit(n, ids, GREEDY) for n, ids in enumerate(prompts)]
    expected = unified(config_of(tmp_path, "qwen3_next", 8, "unified", **more), asked)
    pair = pair_of(tmp_path, "qwen3_next", (8, 16), **more)
    try:
        for one in asked:
            pair.submit(one)
        pair.run()
        assert {s: answer.ids for s, answer in pair.answers.items()} == expected
        pair.check_given_back()
        for core in pair.cores:
            stats = core.stats().transfers
            assert stats is not None
            assert (stats.done, stats.failed) == (len(asked), 0)
    finally:
        pair.close()


@pytest.mark.requirement("E24")
@pytest.mark.timeout(600)
@mostly_slow("layout", ["1p1d", "1-tp2"], ["1p1d"])
@mostly_slow("network", ["cma", "tcp"], ["cma"])
def test_processes_give_the_tokens_of_each_sequence_alone(
    tmp_path: Path, layout: str, network: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if network == "tcp":
        monkeypatch.setenv("UCX_TLS", "tcp")
    more = {"transfer": "nixl", "group_secret": str(write_secret(tmp_path))}
    case: dict[str, Any] = {**PLAIN, "layout": layout, "family": "qwen3_moe", "more": more}
    asked = submits(case)
    engine = Replicas(groups(tmp_path, case))
    try:
        found = generate(engine, asked)
        stats = engine.stats_of()
    finally:
        engine.close()
    assert found == alone(tmp_path, {**case, "more": {}}, asked)
    check(case, stats, len(asked))
