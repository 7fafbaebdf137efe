"""Registers Weft with verl. verl imports this module as an entry point of the group ``verl.plugins``."""

from __future__ import annotations

from typing import Any

from verl.workers.rollout import base
from verl.workers.rollout.replica import RolloutReplicaRegistry

NAME = "weft"


def _replica() -> Any:
    from weft_verl.replica import WeftReplica

    return WeftReplica


RolloutReplicaRegistry.register(NAME, _replica)
# verl 0.9 has no function that registers a rollout class.
base._ROLLOUT_REGISTRY[NAME, "async"] = "weft_verl.rollout.WeftRollout"
