"""Several models whose groups run alone: names, the topology of one group, and refused settings."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.config.test_resolve import checkpoint
from weft.common.errors import ConfigError
from weft.config.alone import group_alone
from weft.config.models.alone import models_alone, topology_of
from weft.config.models.several import read_models

MODELS = """
model: {folder}
block-size: 16
kv-cache-memory: 8M
front: {{port: 8001}}
models:
  Large One: {{aliases: [x], max-num-seqs: 4}}
  b: {{groups: [{{role: prefill, name: bp}}, {{role: decode, count: 2, name: bd}}]}}
"""


def written(tmp_path: Path, text: str) -> Path:
    file = tmp_path / "models.yaml"
    file.write_text(text.format(folder=checkpoint(tmp_path)))
    return file


def found(file: Path, **front: Any) -> Any:
    return models_alone(*read_models(file, front))


def test_engines_and_api_servers_agree_on_the_names(tmp_path: Path) -> None:
    file = written(tmp_path, MODELS)
    one, b = found(file)
    assert (one.name, one.config.accepted_names, b.name) == ("Large One", ("x",), "b")
    for group, model in (("large-one", one), ("large-one3", one), ("bp", b), ("bd1", b), ("bd7", b)):
        config = group_alone(topology_of(file, group), group)
        assert (config.group, config.served_names) == (group, (model.name,))
    assert group_alone(topology_of(file, "large-one"), "large-one").scheduler.max_num_seqs == 4
    with pytest.raises(ConfigError, match="has the groups large-one, bp, bd0, bd1"):
        topology_of(file, "bd")


@pytest.mark.parametrize(
    ("models", "front", "message"),
    [
        (
            "a: {groups: [{role: decode}]}\n  b: {groups: [{role: prefill}, {role: decode}]}",
            {},
            "the models a and b may both have groups called 'decode'",
        ),
        ("a_b: {}\n  a-b: {}", {}, "groups called 'a-b'"),
        ("qwen: {}\n  qwen3: {}", {}, "the models qwen and qwen3 may both have groups called 'qwen3'"),
        ("x1: {}\n  x: {groups: [{role: decode, count: 3}, {role: prefill, name: x}]}", {}, "called 'x1'"),
        ("a: {}\n  b: {aliases: [a]}", {}, "two models are called a"),
        ("a: {groups: [{role: prefill}]}", {}, "model a: the groups cannot serve requests"),
        ("a: {load: demand}", {}, "model a: engines that run alone are always loaded: remove load: demand"),
        ("a: {ttl: 5}", {}, "remove ttl"),
        ("a: {memory: 1G}", {}, "remove memory"),
        ("a: {}", {"models_memory": "1G"}, "--models-memory is for models that load on demand"),
        ("a: {}", {"vllm_metrics": True}, "--vllm-metrics is for a server of one model"),
    ],
)
def test_settings_that_cannot_hold_are_refused(
    tmp_path: Path, models: str, front: dict[str, Any], message: str
) -> None:
    text = "model: {folder}\nblock-size: 16\nmodels:\n  " + models.replace("{", "{{").replace("}", "}}")
    with pytest.raises(ConfigError, match=message):
        found(written(tmp_path, text), **front)
