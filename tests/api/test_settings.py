"""Keywords of ``LLM``: every flag, and a warning for flags without effect outside a server."""

from __future__ import annotations

import logging

import pytest

from weft.api.settings import SERVER_ONLY, read_settings
from weft.common.errors import ConfigError
from weft.config.flags import SETTINGS


def test_every_flag_is_a_keyword() -> None:
    defaults = {name: setting.default for name, setting in SETTINGS.items() if name != "model"}
    settings = read_settings("spool-text", {n: v for n, v in defaults.items() if v not in (None, ())})
    assert settings == read_settings("spool-text", {})
    assert set(SERVER_ONLY) <= SETTINGS.keys()


def test_what_only_a_server_heeds_is_named(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, "weft"):
        settings = read_settings("spool-text", {"port": 9000, "max_num_seqs": 4, "max_response_bytes": 2048})
    assert settings.scheduler.max_num_seqs == 4
    assert [record.getMessage() for record in caplog.records] == [
        "without a server these settings have no effect: port, max_response_bytes"
    ]


def test_unknown_keywords_suggest_the_nearest() -> None:
    with pytest.raises(ConfigError, match="max_num_seqs"):
        read_settings("spool-text", {"max_num_seq": 4})
