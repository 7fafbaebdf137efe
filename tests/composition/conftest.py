"""References and tables of all composition tests. ``--write-composition`` writes the page."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.composition.references import References
from tests.composition.table import (
    AFTER_SLEEP,
    ALONE,
    BETWEEN_GROUPS,
    GROUP_NAMES,
    NAMES,
    ON_DISK,
    ON_REPLICAS,
    GroupTable,
    Table,
    write_part,
)
from weft.config.families.generic import probing as generic

PAGE = Path(__file__).parents[2] / "docs" / "composition.md"


@pytest.fixture(scope="module", autouse=True)
def probe_here() -> Iterator[None]:
    """Probe models of transformers in this process, which has imported transformers already."""

    def probe(folder: Path, architecture: str, layers: int | None) -> generic.Probed:
        from weft.models.generic.probe import probe_folder

        return generic.Probed(spec=probe_folder(str(folder), architecture, layers))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(generic, "run_probe", probe)
        yield


@pytest.fixture(scope="session")
def references(tmp_path_factory: pytest.TempPathFactory) -> References:
    return References(tmp_path_factory.mktemp("composition"))


@pytest.fixture(scope="session")
def table(request: pytest.FixtureRequest) -> Iterator[Table]:
    """Yield the table of feature pairs in one group, and write the page's first part if requested."""
    from tests.composition.test_pairs import NAMES, shown

    made = Table({family: shown(family) for family in NAMES}, ALONE)
    yield made
    # Without the grid some cells have no case.
    if request.config.getoption("--write-composition") and request.config.getoption("-m") == "grid":
        write_part(PAGE, 0, made.lines())


@pytest.fixture(scope="session")
def group_table(request: pytest.FixtureRequest) -> Iterator[GroupTable]:
    """Yield the table of features with separate prefill and decode groups."""
    from tests.composition import test_groups as groups

    features = {family: groups.shown(family) for family in groups.NAMES}
    made = GroupTable(features, BETWEEN_GROUPS, GROUP_NAMES)
    yield made
    # Without the grid some cells have no case.
    if request.config.getoption("--write-composition") and request.config.getoption("-m") == "grid":
        write_part(PAGE, 1, made.lines())


@pytest.fixture(scope="session")
def replica_table(request: pytest.FixtureRequest) -> Iterator[Table]:
    """Yield the table of feature pairs on replicas that share experts."""
    from tests.composition.test_replicas import FAMILIES, shown

    made = Table({family: shown() for family in FAMILIES}, ON_REPLICAS)
    yield made
    # Without the grid some cells have no case.
    if request.config.getoption("--write-composition") and request.config.getoption("-m") == "grid":
        write_part(PAGE, 2, made.lines())


@pytest.fixture(scope="session")
def disk_table(request: pytest.FixtureRequest) -> Iterator[GroupTable]:
    """Yield the table of features with blocks loaded from disk."""
    from tests.composition import test_disk as disk

    made = GroupTable({family: disk.shown_of_disk(family) for family in disk.NAMES}, ON_DISK, NAMES)
    yield made
    # Without the grid some cells have no case.
    if request.config.getoption("--write-composition") and request.config.getoption("-m") == "grid":
        write_part(PAGE, 3, made.lines())


@pytest.fixture(scope="session")
def sleep_table(request: pytest.FixtureRequest) -> Iterator[GroupTable]:
    """Yield the table of features after a sleep."""
    from tests.composition.test_pairs import NAMES as FAMILIES
    from tests.composition.test_pairs import shown

    made = GroupTable({family: shown(family) for family in FAMILIES}, AFTER_SLEEP, NAMES)
    yield made
    # Without the grid some cells have no case.
    if request.config.getoption("--write-composition") and request.config.getoption("-m") == "grid":
        write_part(PAGE, 4, made.lines())
