"""Groups as real processes, in any number, layout and settings: tokens equal those of a single engine.

The single engine computes one sequence at a time, in float64. Engines, links and fleet are those of a server
(``Replicas``). Counters prove that caches were transferred and that each requested feature was active.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import pytest

from tests.engine.pair_rig import submit
from tests.support.pairwise import covering, name
from tests.support.slow import mostly_slow
from weft.cli.verify.tiny import write_family
from weft.cli.verify.verify_run import generate
from weft.config.flags import from_keywords
from weft.config.resolve import resolve
from weft.config.resolved import EngineConfig, HostShare
from weft.engine.core import EngineCore
from weft.engine.server.replicas import Replicas
from weft.types.messages import EngineStats, Role, Submit
from weft.types.sampling import TokenParams

TP2: dict[str, Any] = {"tensor_parallel_size": 2}
DP2: dict[str, Any] = {"data_parallel_size": 2, "enable_expert_parallel": True}
#: Name -> settings of each prefill group, and of each decode group.
LAYOUTS: dict[str, tuple[list[dict[str, Any]], list[dict[str, Any]]]] = {
    "1p1d": ([{}], [{}]),
    "1p2d": ([{}], [{}, {}]),
    "2p1d": ([{}, {}], [{}]),
    "tp2-1": ([TP2], [{}]),
    "1-tp2": ([{}], [TP2]),
    "dp2ep2-1": ([DP2], [{}]),
    "1-dp2ep2": ([{}], [DP2]),
    "dp2ep2-dp2ep2": ([DP2], [DP2]),
}
FEATURES: dict[str, list[Any]] = {
    "layout": list(LAYOUTS),
    "family": ["qwen3_moe", "deepseek_v3", "qwen3_next", "deepseek_v4", "gpt_oss"],
    "blocks": [(8, 8), (8, 16), (16, 8)],
    "draft": ["none", "ngram", "mtp"],
    "prefix": [True, False],
    "n": [1, 3],
    "kv": ["auto", "fp8"],
    "depth": [1, 2],
    "pools": ["direct", "staged"],
}
PLAIN: dict[str, Any] = {"blocks": (8, 16), "draft": "none", "prefix": True, "n": 3, "kv": "auto"}
PLAIN |= {"depth": 1, "pools": "direct"}
DEFAULT: list[dict[str, Any]] = [
    {**PLAIN, "layout": "1p2d", "family": "qwen3_next", "draft": "ngram"},
    {**PLAIN, "layout": "2p1d", "family": "gpt_oss", "prefix": False, "kv": "fp8", "depth": 2},
    {**PLAIN, "layout": "1-tp2", "family": "deepseek_v4", "pools": "staged"},
    {**PLAIN, "layout": "dp2ep2-1", "family": "deepseek_v3", "draft": "mtp"},
]
SHARED = [3 + (5 * i) % 90 for i in range(40)]
PROMPTS = [[3 + (7 * n + 5 * i) % 90 for i in range(5 + 13 * n)] for n in range(6)]
PROMPTS += [[*SHARED, 7, 9], [*SHARED, 8]]
PARAMS = [
    TokenParams(temperature=0.0, max_tokens=12),
    TokenParams(temperature=0.9, top_p=0.95, repetition_penalty=1.2, max_tokens=9),
]


def possible(case: dict[str, Any]) -> dict[str, Any]:
    """Return ``case``, restricted to the features of its family."""
    family, draft = case["family"], case["draft"]
    draft = "ngram" if draft == "mtp" and family != "deepseek_v3" else draft
    return {**case, "draft": draft}


CASES = [pytest.param(case, id=name(case)) for case in DEFAULT]
CASES += [
    pytest.param(possible(case), id=name(possible(case)), marks=pytest.mark.grid)
    for case in covering(FEATURES)
]


def settings(root: Path, case: dict[str, Any]) -> dict[str, Any]:
    made: dict[str, Any] = {
        "model": str(write_family(root, case["family"])),
        "load_format": "dummy",
        "tokenizer": "spool-text",
        "dtype": "float64",
        "device": "cpu",
        "threads": 1,
        "kv_cache_memory": "8M",
        "max_num_seqs": 8,
        "max_model_len": 160,
        "seed": 1,
        "max_num_batched_tokens": 64,
    }
    return made | ({} if case["kv"] == "auto" else {"kv_cache_dtype": case["kv"]}) | case.get("more", {})


def groups(root: Path, case: dict[str, Any]) -> list[EngineConfig]:
    common = settings(root, case) | {"enable_prefix_caching": case["prefix"]}
    common["steps_in_flight"] = case["depth"]
    if case["draft"] != "none":
        common |= {"speculative_method": case["draft"], "num_speculative_tokens": 2}
        common |= {"speculative_adaptive": False, "ngram_min_length": 1}
    made = []
    for role, block, each in zip(("prefill", "decode"), case["blocks"], LAYOUTS[case["layout"]], strict=True):
        for number, own in enumerate(each):
            keywords = {**common, **own, "role": role, "block_size": block}
            made.append(resolve(from_keywords(keywords), group=f"{role}{number}", host=HostShare(ranks=4)))
    return made


def submits(case: dict[str, Any]) -> list[Submit]:
    """Return the sequences of all prompts. Every second prompt is sampled, with ``n`` choices."""
    made = []
    for number, prompt in enumerate(PROMPTS):
        for choice in range(case["n"] if number % 2 else 1):
            sequence = 10 * number + choice
            made.append(submit(sequence, prompt, PARAMS[number % 2], request=number, choice=choice))
    return made


@pytest.mark.requirement("E24")
@pytest.mark.timeout(600)
@mostly_slow("case", CASES, [CASES[3]])
def test_tokens_are_those_of_each_sequence_alone(
    tmp_path: Path, case: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    if case["pools"] == "staged":
        monkeypatch.setenv("WEFT_STAGED_POOLS", "1")
    asked = submits(case)
    engine = Replicas(groups(tmp_path, case))
    try:
        warm = submit(900, SHARED, PARAMS[0], request=900)
        generate(engine, [warm])
        found = generate(engine, asked)
        stats = engine.stats_of()
        local = engine.thread.links.local_prefills
    finally:
        engine.close()
    assert found == alone(tmp_path, case, asked)
    check(case, stats, 1 + len(asked))
    assert local == 0


def alone(root: Path, case: dict[str, Any], asked: list[Submit]) -> dict[int, list[int]]:
    config = {**settings(root, case), "enable_prefix_caching": False, "steps_in_flight": 1}
    core = EngineCore(resolve(from_keywords({**config, "block_size": 8})), progress=False)
    try:
        found: dict[int, list[int]] = {}
        for number, one in enumerate(asked):  # also choices of one prompt run one after the other
            found |= generate(core, [msgspec.structs.replace(one, request=10_000 + number)])
    finally:
        core.close()
    return found


def check(case: dict[str, Any], stats: dict[str, tuple[Role, EngineStats]], sequences: int) -> None:
    """Check that every cache was transferred, and that every group, replica and requested feature was
    active."""
    done = dict.fromkeys(("prefill", "decode"), 0)
    for instance, (role, one) in stats.items():
        moved = one.transfers
        assert moved is not None
        assert moved.done > 0, instance
        assert moved.sent_bytes + moved.received_bytes > 0, instance
        assert moved.failed == 0, instance
        done[role] += moved.done
    # A sequence that gives up a slot for a fair share is returned to the router, and submitted once more.
    sent = sequences + sum(one.transfers.returns for _, one in stats.values() if one.transfers is not None)
    assert done == {"prefill": sent, "decode": sent}
    decoding = [one for role, one in stats.values() if role == "decode"]
    if case["draft"] != "none":
        assert sum(sum(one.drafts) for one in decoding) > 0
    # A prompt shorter than the distance between two snapshots has hits only for its own other choices.
    if case["prefix"] and (case["family"] != "qwen3_next" or case["n"] > 1):
        assert sum(one.prefix_hits for role, one in stats.values() if role == "prefill") > 0
