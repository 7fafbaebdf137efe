"""The KV disk tier at the API server: the route that empties the cache, and metrics."""

from __future__ import annotations

import pytest

from weft.common.errors import InvalidRequest
from weft.front.monitoring.tier_metrics import tier_families
from weft.front.protocol.parse import parse
from weft.front.tier_routes import FlushRequest
from weft.types.messages import EngineStats, stats_in
from weft.types.tiers import LevelStats, TierStats


@pytest.mark.parametrize(
    "body",
    [b"{}", b'{"all": true, "salt": "x"}', b'{"salt": "x", "session": "y"}', b'{"authorization": "x"}'],
)
def test_a_flush_names_one_thing(body: bytes) -> None:
    with pytest.raises(InvalidRequest, match="exactly one"):
        parse(body, FlushRequest).check()


def test_metrics_of_a_tier() -> None:
    levels = {"host": LevelStats(nbytes=3, stores={"all": 4}), "remote": LevelStats(nbytes=4, away=1)}
    stats = EngineStats(
        tier=TierStats(nbytes=7, loads={"done": 2, "late": 1}, saved_tokens=64, levels=levels)
    )
    roles = [("head0", "unified"), ("head1", "unified")]
    found = {
        one.name: list(one.rows) for one in tier_families(roles, [("head0", stats), ("head1", EngineStats())])
    }
    who, host, remote = (("head0", "unified", level) for level in ("all", "host", "remote"))
    assert found["kv_tier_bytes"] == [(host, 3.0), (remote, 4.0)]
    assert found["kv_tier_off"] == [(host, 0.0), (remote, 1.0), (who, 0.0)]
    assert found["kv_stores"] == [((*host, "all"), 4.0)]
    assert found["kv_loads"] == [((*who, "done"), 2.0), ((*who, "late"), 1.0)]
    assert found["prompt_tokens_saved"] == [(who, 64.0)]


def test_an_api_server_of_an_earlier_release_gets_no_tier() -> None:
    stats = EngineStats(tier=TierStats(nbytes=7))
    assert stats_in(3, stats) == stats
    newer = EngineStats(tier=TierStats(nbytes=7, levels={"disk": LevelStats(nbytes=7)}))
    assert stats_in(4, newer) == newer
    assert stats_in(3, newer) == stats
    assert stats_in(2, stats).tier is None
