"""A batch on a server that is killed many times: nothing lost, nothing twice, no other text."""

from __future__ import annotations

from pathlib import Path

import pytest

from bench.batch_drill import drill


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_kills_change_no_output(tmp_path: Path) -> None:
    result = drill(tmp_path, 300, 5, 0, ["spool-text", "--threads", "1", "--max-num-seqs", "32"])
    assert result.clean, result
