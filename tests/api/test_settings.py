"""Keywords of ``LLM``: every flag, and a warning for flags without effect outside a server."""

from __future__ import annotations

import logging
from pathlib import Path

import numpy as np
import pytest
import torch

from weft.api.settings import SERVER_ONLY, read_settings
from weft.common.errors import ConfigError
from weft.config.flags import SETTINGS


def test_every_flag_is_a_keyword() -> None:
    defaults = {name: setting.default for name, setting in SETTINGS.items() if name != "model"}
    settings = read_settings("spool-text", {n: v for n, v in defaults.items() if v not in (None, ())})
    assert settings == read_settings("spool-text", {})
    assert set(SERVER_ONLY) <= SETTINGS.keys()


def test_settings_without_effect_outside_a_server_are_logged(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, "weft"):
        settings = read_settings("spool-text", {"port": 9000, "max_num_seqs": 4, "max_response_bytes": 2048})
    assert settings.scheduler.max_num_seqs == 4
    assert [record.getMessage() for record in caplog.records] == [
        "without a server these settings have no effect: port, max_response_bytes"
    ]


def test_unknown_keywords_suggest_the_nearest() -> None:
    with pytest.raises(ConfigError, match="max_num_seqs"):
        read_settings("spool-text", {"max_num_seq": 4})


def test_values_of_python_callers() -> None:
    """Paths, numbers of numpy and dtypes of torch mean the same as text and Python's numbers."""
    keywords = {"max_num_seqs": np.int64(4), "dtype": torch.float16, "kv_cache_memory": np.int64(1 << 30)}
    made = read_settings(Path("models") / "a", {**keywords, "gpu_memory_utilization": np.float32(0.5)})
    assert made.model.model == "models/a"
    assert (made.scheduler.max_num_seqs, made.model.dtype) == (4, "float16")
    assert made.cache.kv_cache_memory == "1073741824"
    assert read_settings("a", {"dtype": "torch.bfloat16"}).model.dtype == "bfloat16"
    for name, value in (
        ("max_num_seqs", np.float32(4)),
        ("dtype", torch.int8),
        ("kv_cache_memory", "9" * 400),
    ):
        with pytest.raises(ConfigError, match=name):
            read_settings("a", {name: value})
