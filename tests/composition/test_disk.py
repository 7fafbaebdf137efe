"""Every feature together with the KV disk tier, for every form of attention, in float64.

A first engine stores all blocks. A second engine loads the blocks, and its tokens equal those of runs alone.
Counters show that loads saved prompt tokens. ``-m slow`` has one case of each form, ``-m grid`` each value of
each feature for each form. ``docs/composition.md`` has the results of a full run.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.composition.references import References
from tests.composition.rig import BLOCK, cases_of_forms, distinct_images, make_checkpoint, run, tight
from tests.composition.table import GroupTable
from tests.composition.test_pairs import NAMES, check_answers, check_engaged, of_family, shown
from weft.scheduler import loads
from weft.scheduler.policy.load_speed import LoadSpeed


def of_disk(family: str) -> dict[str, list[Any]]:
    """Return the features of a family. The tier needs the prefix cache. Prompts with loaded blocks need few
    embeddings, so the room for embeddings is ample."""
    return {
        f: {"prefix": [True], "room": ["ample"]}.get(f, values) for f, values in of_family(family).items()
    }


def shown_of_disk(family: str) -> list[str]:
    """Return the features of a family in the table."""
    return [feature for feature in shown(family) if feature not in ("room", "hits")]


CASES = cases_of_forms(of_disk, NAMES)


@pytest.mark.requirement("B10")
@pytest.mark.parametrize(("family", "case"), CASES)
def test_tokens_with_loaded_blocks_are_those_of_each_sequence_alone(
    family: str,
    case: dict[str, Any],
    references: References,
    disk_table: GroupTable,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # These small models compute as quickly as a busy disk reads, and a busy machine misses the shortest
    # deadline of a load: then nothing is loaded.
    monkeypatch.setattr(LoadSpeed, "observe", lambda *_: None)
    monkeypatch.setattr(loads, "SOONEST_S", loads.LATEST_S)
    expected, stop = references.of(family, case)
    folder = make_checkpoint(references.root, family)
    disk = {"kv_disk": "256M", "kv_disk_dir": str(tmp_path / "kv"), "kv_store": "all"}
    if case["preempt"]:
        # In the smallest possible cache, running sequences evict loaded blocks before their use.
        disk["kv_cache_memory"] = str(3 * tight(folder, case, BLOCK))
    first, seen = run(folder, {**case, "disk": disk}, stop)
    check_answers(case, first, expected)
    assert case["preempt"] or not seen.stats.tier.saved_tokens  # preempted sequences load their own blocks
    made, seen = run(folder, {**case, "disk": disk}, stop)
    check_answers(case, made, expected)
    tier = seen.stats.tier
    assert tier.saved_tokens > 0, tier
    disk_table.ran(family, check_engaged(family, case, made, seen, distinct_images(folder)))
