"""Placement groups that are removed, without Ray."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

pytest.importorskip("ray", reason="ray is not installed: pip install weft[ray]")

from weft.on_ray import placement
from weft.on_ray.plans import GroupPlan


def test_placement_groups_of_earlier_attempts_are_removed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Except those of wanted attempts, and of groups whose actors end."""
    names = ["weft/shop/a#1", "weft/shop/a#2", "weft/shop/b#3", "weft/shop/c#4", "weft/other/a#1"]
    table = {str(n): {"name": name, "state": "CREATED"} for n, name in enumerate(names)}
    table["x"] = {"name": "weft/shop/d#5", "state": "REMOVED"}
    removed: list[str] = []
    monkeypatch.setattr(placement, "placement_group_table", lambda: table)
    monkeypatch.setattr(placement, "get_placement_group", lambda name: SimpleNamespace(name=name))
    monkeypatch.setattr(placement, "remove_placement_group", lambda one: removed.append(one.name))
    wanted = GroupPlan(group="a", base="a", role="unified", engines=("a",), hosts=2, attempt=2)
    placement.free("shop", [wanted], {"b"})
    assert removed == ["weft/shop/a#1", "weft/shop/c#4"]
    removed.clear()
    placement.free("shop")
    assert removed == names[:4]
