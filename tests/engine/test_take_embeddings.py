"""Groups of several ranks that receive embeddings: shards of rows, small pools, lost ranks, micro-batches."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec
import pytest

from tests.engine.encode_rig import EncodeFleet
from tests.engine.pair_rig import unified
from tests.engine.test_encode_group import check, encoder, fleets, many, models, taker
from tests.engine.test_images import config_of
from tests.support.seen import SeeingModels
from tests.support.slow import mostly_slow
from weft.types.media_item import BLOCK_ROWS

__all__ = ["fleets", "models"]  # fixtures

NAME = "qwen3-vl"
Make = Callable[..., EncodeFleet]


@pytest.mark.requirement("D14")
@pytest.mark.timeout(600)
def test_shares_halve_what_an_encoder_sends_to_two_ranks(models: SeeingModels, fleets: Make) -> None:
    """The ratio is exact: 12 images of 1 to 9 rows, to engines that differ in nothing else."""
    folder = models.folder(NAME)
    submits = many(models, NAME)
    expected = unified(config_of(folder), submits)
    rows = {item.key: item.count for one in submits for item in one.media}
    sent = {}
    for shard in ("off", "on"):
        fleet = fleets([encoder(folder)], taker(folder, tensor_parallel_size=2, shard_embeddings=shard))
        check(fleet, submits, expected)
        sent[shard] = fleet.stats(fleet.encoders[0]).sent_bytes
        assert sent[shard] == fleet.stats(fleet.compute).received_bytes
    limits = config_of(folder).kv.media
    assert limits is not None
    assert sent["on"] == sum(rows.values()) * limits.row_bytes
    assert sent["off"] == 2 * sent["on"]


@pytest.mark.timeout(600)
@mostly_slow("ranks", [2, 4], [2])
def test_shares_that_leave_for_host_memory_and_come_back_are_made_whole(
    ranks: int, models: SeeingModels, fleets: Make
) -> None:
    """The pool holds the images of one prompt, and host memory holds as many.

    Prompts come in small chunks, share images, and are submitted twice.
    """
    folder = models.folder(NAME)
    submits = many(models, NAME, n=2)
    expected = unified(config_of(folder), submits)
    limits = config_of(folder).kv.media
    assert limits is not None
    transfer = str(9 * BLOCK_ROWS * limits.row_bytes)
    small: dict[str, Any] = {"mm_cache_bytes": transfer, "mm_host_cache_bytes": transfer}
    fleet = fleets(
        [encoder(folder)],
        taker(folder, tensor_parallel_size=ranks, long_prefill_token_threshold=5, **small),
    )
    check(fleet, submits, expected)
    again = [msgspec.structs.replace(one, sequence=900 + one.sequence) for one in submits]
    check(fleet, again, {**expected, **{900 + number: tokens for number, tokens in expected.items()}})


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_taker_that_loses_a_rank_has_its_images_sent_again(models: SeeingModels, fleets: Make) -> None:
    """Ranks are lost while transfers are active and while received sequences run."""
    folder = models.folder(NAME)
    submits = many(models, NAME)
    expected = unified(config_of(folder), submits)
    fleet = fleets([encoder(folder)], taker(folder, tensor_parallel_size=2))
    processes = fleet.compute.runner.processes
    assert processes is not None
    for first, turns in ((0, 0), (900, 2)):
        for one in submits:
            fleet.submit(msgspec.structs.replace(one, sequence=first + one.sequence))
        for _ in range(turns):
            fleet.turn()
        processes.kill(1)
        fleet.run()
        lost = [number for number, heard in fleet.heard.items() if number >= first and heard.attempt]
        assert lost, "nothing was under way"
    assert fleet.answers() == {
        first + number: made for first in (0, 900) for number, made in expected.items()
    }
    fleet.check_given_back()


@pytest.mark.requirement("D14")
@pytest.mark.timeout(600)
def test_shares_are_made_whole_before_a_step_is_divided(models: SeeingModels, fleets: Make) -> None:
    folder = models.folder(NAME)
    submits = many(models, NAME, n=2)
    expected = unified(config_of(folder), submits)
    fleet = fleets([encoder(folder)], taker(folder, tensor_parallel_size=2, overlap="all"))
    check(fleet, submits, expected)
    assert fleet.compute.stats().overlapped_steps > 0
