"""Drills on two Ray nodes in two network namespaces: no request is lost or changed. `make test-ray` runs all
drills, `make test-slow` a few.
"""

from __future__ import annotations

import subprocess
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("ray", reason="ray is not installed: pip install weft[ray]")

from tests.on_ray.drills import (
    BASE,
    IMAGE_FAULTS,
    IMAGES,
    TEXT,
    TEXT_FAULTS,
    Fleet,
    run,
)
from tests.on_ray.streams import Clients
from tests.on_ray.two_nodes import TwoNodes
from tests.on_ray.wide_drills import EXPERT_FAULTS, EXPERTS, SPLIT, SPLIT_FAULTS
from weft import LLM, SamplingParams

SPLIT_SHORT = ("loss of the rank on the other node",)
EXPERT_SHORT = ("loss of the engine on the other node",)
SHORT = ("partition of 4 s", "loss of a Ray node", "decode groups: 2, 0, 2")


def drills(names: Iterable[str], short: tuple[str, ...] = ()) -> list[Any]:
    """Return the drills; those of ``short`` are slow tests, the others tests of the grid."""
    marks = {name: pytest.mark.slow if name in short else pytest.mark.grid for name in names}
    return [pytest.param(name, id=name.replace(" ", "-"), marks=mark) for name, mark in marks.items()]


@pytest.fixture(scope="module")
def cluster() -> Iterator[TwoNodes]:
    try:
        made = TwoNodes()
    except (OSError, subprocess.CalledProcessError) as error:
        pytest.skip(f"this machine has no network namespaces: {error}")
    yield made
    made.close()


def served(cluster: TwoNodes, topology: str, folder: Path) -> Iterator[tuple[Fleet, Clients]]:
    """Yield a server and its clients."""
    fleet = Fleet(cluster, topology, folder)
    try:
        yield fleet, Clients(BASE, tokens=fleet.tokens, images=fleet.images)
    finally:
        fleet.close()


@pytest.fixture(scope="class")
def text_server(
    cluster: TwoNodes, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[Fleet, Clients]]:
    yield from served(cluster, TEXT, tmp_path_factory.mktemp("text"))


@pytest.fixture(scope="class")
def image_server(
    cluster: TwoNodes, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[Fleet, Clients]]:
    yield from served(cluster, IMAGES, tmp_path_factory.mktemp("images"))


@pytest.fixture(scope="class")
def split_server(
    cluster: TwoNodes, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[Fleet, Clients]]:
    yield from served(cluster, SPLIT, tmp_path_factory.mktemp("split"))


@pytest.fixture(scope="class")
def expert_server(
    cluster: TwoNodes, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[Fleet, Clients]]:
    yield from served(cluster, EXPERTS, tmp_path_factory.mktemp("experts"))


@pytest.mark.real_processes  # processes must begin in the namespace of the test
@pytest.mark.timeout(600)
class TestTextGroups:
    @pytest.mark.slow
    def test_groups_spread_over_the_nodes(self, text_server: tuple[Fleet, Clients]) -> None:
        """The prefill group has the node of its label. Engines of host 1 advertise the address of host 1."""
        placed = text_server[0].cluster.placed()
        assert placed["prefill0"] == 0
        assert {placed["decode0"], placed["decode1"]} == {0, 1}

    @pytest.mark.parametrize("fault", drills(TEXT_FAULTS, SHORT))
    def test_no_request_is_lost_or_changed(self, fault: str, text_server: tuple[Fleet, Clients]) -> None:
        run(text_server[0], TEXT_FAULTS[fault], text_server[1]).check()


@pytest.mark.real_processes
@pytest.mark.timeout(600)
class TestImageGroups:
    @pytest.mark.parametrize("fault", drills(IMAGE_FAULTS))
    def test_no_request_is_lost_or_changed(self, fault: str, image_server: tuple[Fleet, Clients]) -> None:
        run(image_server[0], IMAGE_FAULTS[fault], image_server[1]).check()


@pytest.mark.real_processes
@pytest.mark.timeout(600)
class TestOneGroupOnBothNodes:
    @pytest.mark.slow
    def test_two_nodes_answer_with_the_tokens_of_one_rank(self, split_server: tuple[Fleet, Clients]) -> None:
        fleet, clients = split_server
        assert set(fleet.ranks().values()) == {0, 1}
        params = SamplingParams(temperature=0, max_tokens=fleet.tokens, ignore_eos=True)
        with LLM("spool-text", dtype="float64", max_num_seqs=4, kv_cache_memory="32M") as one_rank:
            found = one_rank.generate(
                [clients.prompt(number) for number in clients.due], params, use_tqdm=False
            )
        assert [one.outputs[0].text for one in found] == [*clients.due.values()]

    @pytest.mark.parametrize("fault", drills(SPLIT_FAULTS, SPLIT_SHORT))
    def test_no_request_is_lost_or_changed(self, fault: str, split_server: tuple[Fleet, Clients]) -> None:
        run(split_server[0], SPLIT_FAULTS[fault], split_server[1]).check()


@pytest.mark.real_processes
@pytest.mark.timeout(600)
class TestExpertsOnBothNodes:
    @pytest.mark.parametrize("fault", drills(EXPERT_FAULTS, EXPERT_SHORT))
    def test_no_request_is_lost_or_changed(self, fault: str, expert_server: tuple[Fleet, Clients]) -> None:
        run(expert_server[0], EXPERT_FAULTS[fault], expert_server[1]).check()
