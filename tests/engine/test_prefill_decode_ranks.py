"""Groups of two ranks in separate processes: transfers between groups, and killed ranks."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest

from tests.engine.pair_rig import EnginePair, submit, unified
from tests.runner.transfers_rig import config_of
from tests.support.generic_models import tiny_model
from tests.support.slow import mostly_slow
from tests.support.slowness import deadline
from weft.types import messages as m
from weft.types.sampling import TokenParams

GREEDY = TokenParams(temperature=0.0, max_tokens=12)
SAMPLED = TokenParams(temperature=0.9, top_p=0.95, max_tokens=9)
PROMPTS = [[3 + (7 * n + 5 * i) % 90 for i in range(5 + 13 * n)] for n in range(6)]
SUBMITS = [submit(n, ids, (GREEDY, SAMPLED)[n % 2]) for n, ids in enumerate(PROMPTS)]
CHUNKS = {"max_num_batched_tokens": 32}
SECONDS = deadline(60.0)


def pair_of_sizes(root: Path, sizes: tuple[int, int], family: str = "llama") -> EnginePair:
    prefill, decode = (
        config_of(root, family, 8, role, tensor_parallel_size=size, **CHUNKS)  # type: ignore[arg-type]
        for role, size in zip(("prefill", "decode"), sizes, strict=True)
    )
    return EnginePair(prefill, decode)


@pytest.mark.requirement("E1")
@mostly_slow(("sizes", "family"), [((2, 1), "llama"), ((1, 2), "qwen3_next")], [((1, 2), "qwen3_next")])
def test_groups_of_other_sizes(tmp_path: Path, sizes: tuple[int, int], family: str) -> None:
    expected = unified(config_of(tmp_path, family, 8, "unified", **CHUNKS), SUBMITS)
    pair = pair_of_sizes(tmp_path, sizes, family)
    try:
        for one in SUBMITS:
            pair.submit(one)
        pair.run()
        assert {s: answer.ids for s, answer in pair.answers.items()} == expected
        pair.check_given_back()
    finally:
        pair.close()


@pytest.mark.slow
@pytest.mark.requirement("E7")
@pytest.mark.parametrize("side", ["prefill", "decode"])
def test_a_rank_that_is_killed_costs_its_transfers_and_nothing_else(tmp_path: Path, side: str) -> None:
    """Active transfers fail at both ends at once, and the sequences are returned to the router.

    A new attempt gives the same tokens, with the restarted rank.
    """
    expected = unified(config_of(tmp_path, "llama", 8, "unified", **CHUNKS), SUBMITS)
    pair = pair_of_sizes(tmp_path, (2, 2))
    core = pair.prefill if side == "prefill" else pair.decode
    try:
        for one in SUBMITS:
            pair.submit(one)
        _until(
            pair,
            lambda: bool(
                core.transfers is not None and core.transfers._records and core.scheduler.in_flight == 0
            ),
        )
        for _ in range(3):
            pair.turn()
        processes = core.runner.processes
        assert processes is not None
        rank = 1
        os.kill(processes.pid(rank), signal.SIGKILL)  # type: ignore[attr-defined]
        _until(pair, lambda: core.recovering)
        _until(pair, lambda: not core.recovering)
        _until(pair, lambda: pair.idle)
        pair.check_given_back()
        again = [one for one in SUBMITS if _lost(pair, one.sequence)]
        assert again, "nothing was under way"
        for one in again:
            _forget(pair, one.sequence)
            kept = pair.answers[one.sequence].tokens
            ids = [kept[position] for position in sorted(kept)]
            pair.submit(msgspec.structs.replace(one, attempt=1, emitted_ids=m.ids_to_bytes(ids)))
            pair.answers[one.sequence].tokens.update(kept)
        pair.run()
        assert {s: answer.ids for s, answer in pair.answers.items()} == expected
        pair.check_given_back()
        stats = core.stats()
        assert stats.transfers is not None
        assert stats.transfers.failed >= 1
    finally:
        pair.close()


def _lost(pair: EnginePair, sequence: int) -> bool:
    return "length" not in pair.answers[sequence].finish


def _forget(pair: EnginePair, sequence: int) -> None:
    """Abort the sequence at both engines, like an API server."""
    for core in pair.cores:
        pair.take(core, core.finish(sequence))


def _until(pair: EnginePair, reached: Callable[[], bool]) -> None:
    until = time.monotonic() + SECONDS
    while not reached():
        assert time.monotonic() < until
        if not pair.turn():
            pair.decode.sleep(0.002)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "sizes"),
    [
        ("Olmo2", (2, 1)),
        ("Olmo2", (1, 2)),
        ("Bloom", (2, 1)),
        ("GPT2LMHeadModel", (1, 2)),
        ("OPT", (1, 1)),
    ],
)
def test_whole_attention_of_the_generic_backend(tmp_path: Path, name: str, sizes: tuple[int, int]) -> None:
    """Two ranks may have whole attention modules, and each rank has the KV heads of its part. The second
    round finds prefixes."""
    tiny_model(name).save_pretrained(tmp_path / name)
    more = {"model": str(tmp_path / name), "model_impl": "transformers", "load_format": "auto", **CHUNKS}
    expected = unified(config_of(tmp_path, "llama", 8, "unified", **more), SUBMITS)
    prefill, decode = (
        config_of(tmp_path, "llama", 8, role, tensor_parallel_size=size, **more)  # type: ignore[arg-type]
        for role, size in zip(("prefill", "decode"), sizes, strict=True)
    )
    pair = EnginePair(prefill, decode)
    try:
        for first in (0, 10):
            for one in SUBMITS:
                pair.submit(msgspec.structs.replace(one, sequence=first + one.sequence))
            pair.run()
            found = {number - first: one.ids for number, one in pair.answers.items() if number >= first}
            assert found == expected
        assert pair.prefill.stats().prefix_hits > 0
        pair.check_given_back()
    finally:
        pair.close()
