"""A server counts its needed open files before the start, and raises the limit."""

from __future__ import annotations

import resource

import pytest

from tests.faults.rig import config_of
from weft.common import open_files as limits
from weft.common.errors import ConfigError
from weft.config import file_limits
from weft.config.sections.all import FrontSection


@pytest.mark.parametrize(("soft", "hard", "raised"), [(20, 4096, 4096), (20, resource.RLIM_INFINITY, 65536)])
def test_the_limit_is_raised_where_it_may(
    soft: int, hard: int, raised: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[tuple[int, int]] = []
    monkeypatch.setattr(resource, "getrlimit", lambda which: (soft, hard))
    monkeypatch.setattr(resource, "setrlimit", lambda which, both: asked.append(both))
    file_limits.ask_for_files([config_of()], FrontSection())
    assert asked == [(raised, hard)]


def test_too_few_files_are_an_error_that_says_how_many(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits.resource, "getrlimit", lambda which: (20, 20))
    told = r"needs up to (\d+) open files, and the system allows 20.*ulimit -n \1"
    with pytest.raises(ConfigError, match=told):
        file_limits.ask_for_files([config_of()], FrontSection())


def test_more_processes_need_more_files() -> None:
    one = file_limits.files_needed([config_of()], FrontSection())
    groups = [config_of(kv_cache_memory="8MiB")] * 2
    assert file_limits.files_needed(groups, FrontSection()) > one
    assert file_limits.files_needed(groups, FrontSection(fronts=8)) > one + 6 * file_limits.OF_PEER
