"""The facts that `weft engine` publishes of its group."""

from __future__ import annotations

from pathlib import Path

from weft.cli.serve.engine import facts_of
from weft.config.alone import group_alone
from weft.config.topology import read_topology

TOPOLOGY = """
model: spool-vision
threads: 1
groups:
  - {role: encode}
  - {role: unified, name: sees, language-model-only: false}
  - {role: unified, name: text}
"""


def test_records_say_which_groups_have_a_vision_tower(tmp_path: Path) -> None:
    file = tmp_path / "shop.yaml"
    file.write_text(TOPOLOGY)
    topology = read_topology(file)
    facts = [facts_of(group_alone(topology, group.name)) for group in topology.groups]
    assert {one.group: (one.role, one.tower) for one in facts} == {
        "encode0": ("encode", True),
        "sees": ("unified", True),
        "text": ("unified", False),
    }
