"""Settings of the KV disk tier: sizes, and combinations that are refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from weft.common.errors import ConfigError
from weft.config.flags import from_keywords
from weft.config.sections.tier_section import TierSection
from weft.config.sizing.tier import check_tier, host_bytes, tier_bytes, write_rate
from weft.engine.server.replicas import summed
from weft.types.messages import EngineStats
from weft.types.tiers import TierStats


@pytest.mark.parametrize(
    ("settings", "device", "words"),
    [
        ({"kv_disk": "20X"}, "cpu", "neither a size such as 20G nor auto"),
        ({"kv_disk": "1M"}, "cpu", "at least 16M"),
        ({"kv_host": "1G"}, "cpu", "--kv-cache-memory"),
        ({"kv_host": "1M"}, "cuda", "--kv-host must be at least 16M"),
        ({"kv_host": "1G", "role": "encode"}, "cuda", "a group of role encode has no KV cache"),
        ({"kv_host": "1G", "kv_disk_ttl": 5.0}, "cuda", "--kv-disk-ttl requires --kv-disk"),
        ({"kv_disk": "1G", "enable_prefix_caching": False}, "cpu", "requires the prefix cache"),
        ({"kv_remote": "x://b/p"}, "cpu", "no URL of an object store"),
        ({"kv_remote": "s3:///p"}, "cpu", "names no bucket"),
        ({"kv_remote": "s3://key:secret@b/p"}, "cpu", "must not have credentials or options"),
        ({"kv_remote": "s3://[b/p"}, "cpu", "is no URL"),
        ({"kv_remote": "az://b/p?sig=secret"}, "cpu", "must not have credentials or options"),
        ({"kv_remote": "https://key:secret@b/p"}, "cpu", "must not have credentials or options"),
        ({"kv_remote": "file://folder/kv"}, "cpu", "use file:///FOLDER"),
        ({"kv_remote": "file:///"}, "cpu", "use file:///FOLDER"),
        ({"kv_store": "all"}, "cpu", "--kv-store requires --kv-disk"),
        ({"kv_disk_dir": "kv"}, "cpu", "--kv-disk-dir requires --kv-disk"),
        ({"kv_disk_write_rate": "1M"}, "cpu", "--kv-disk-write-rate requires --kv-disk"),
    ],
)
def test_combinations_that_cannot_work_are_refused(settings: dict[str, Any], device: str, words: str) -> None:
    with pytest.raises(ConfigError, match=words) as refused:
        check_tier(from_keywords(settings), device)
    assert "secret" not in refused.value.message


def test_a_missing_package_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    for url, install in (
        ("s3://b/p", r"pip install 'weft\[s3\]'"),
        ("mooncake://h:1/p", "mooncake"),
    ):
        with pytest.raises(ConfigError, match=install):
            check_tier(from_keywords({"kv_remote": url}), "cpu")


def test_replicas_of_one_folder_are_summed() -> None:
    one = TierStats(nbytes=5, blocks=2, waiting=1, loads={"done": 2}, saved_tokens=64)
    two = TierStats(nbytes=4, blocks=3, waiting=2, off=1, loads={"done": 1, "late": 1}, saved_tokens=32)
    both = summed([EngineStats(tier=one), EngineStats(tier=two)]).tier
    assert both == TierStats(
        nbytes=5, blocks=3, waiting=3, off=1, loads={"done": 3, "late": 1}, saved_tokens=96
    )
    assert summed([EngineStats(), EngineStats()]).tier is None


def test_sizes(tmp_path: Path) -> None:
    assert check_tier(from_keywords({}), "cuda").kv_disk is None
    assert tier_bytes(TierSection(kv_disk="2G")) == 2 << 30
    assert tier_bytes(TierSection(kv_disk="auto", kv_disk_dir=str(tmp_path / "new"))) > 0
    assert write_rate(TierSection(kv_disk="2G", kv_disk_write_rate="20M")) == 20 << 20
    assert write_rate(TierSection(kv_disk="2G")) == 0.0
    for settings in ({"kv_host": "2G", "kv_store": "all"}, {"kv_disk": "2G"}):
        assert check_tier(from_keywords(settings), "cuda")
    assert host_bytes(TierSection(kv_host="2G")) == 2 << 30
    assert host_bytes(TierSection()) == 0
