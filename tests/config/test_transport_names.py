"""Names of transports: Weft's own, and entry points of installed packages."""

from __future__ import annotations

import importlib.metadata
import importlib.util
from typing import Any

import pytest

from tests.faults.rig import config_of
from weft.common.errors import ConfigError
from weft.config import transfers
from weft.config.secret_file import check_secrets
from weft.config.sections.all import ParallelSection, TransferSection
from weft.config.transfers import check_transfer


def added(monkeypatch: pytest.MonkeyPatch, **points: str) -> None:
    made = [importlib.metadata.EntryPoint(name, value, transfers.GROUP) for name, value in points.items()]

    def entry_points(*, group: str) -> list[importlib.metadata.EntryPoint]:
        return made if group == transfers.GROUP else []

    monkeypatch.setattr(importlib.metadata, "entry_points", entry_points)


def checked(name: str, role: Any = "prefill") -> TransferSection:
    return check_transfer(TransferSection(role=role, transfer=name), ParallelSection())


def test_an_unknown_transport_is_refused_with_all_known_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    added(monkeypatch, mooncake="weft_mooncake:KIND", tcp="hostile:KIND")
    for role in ("unified", "decode"):
        with pytest.raises(ConfigError, match=r"rdma: .*auto, shm, tcp, nixl, mooncake\. .*weft\.transports"):
            checked("rdma", role)
    assert checked("mooncake").transfer == "mooncake"
    assert set(transfers.added_transports()) == {"mooncake"}, "Weft's own names are not replaced"


def test_nixl_without_its_package_is_refused_with_the_command(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r"--transfer nixl .*pip install weft\[nixl\]"):
        checked("nixl")
    checked("nixl", "unified")  # no transfer, so no package
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: name == "nixl_cu13" or None)
    checked("nixl")


@pytest.mark.parametrize("name", ["nixl", "mooncake"])
def test_transports_between_processes_need_the_secret(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    added(monkeypatch, mooncake="weft_mooncake:KIND")
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: object())
    group = config_of(role="prefill", transfer=name, kv_cache_memory="8MiB")
    with pytest.raises(ConfigError, match=rf"--transfer {name} requires --group-secret"):
        check_secrets([group])
