"""Agreement of the engines of an expert-parallel group: one small collective per step, in a separate group.

Votes travel over gloo. A wake-up (``weft.parallel.wakeup``) reaches sleeping engines. Only the thread that
runs steps uses both.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec
import numpy as np
import torch

from weft.parallel.group_comm import GroupComm, Launcher
from weft.parallel.wakeup import WakeupChannel
from weft.scheduler.votes import Decision, Vote, Waves, decide, to_row


class AgreementGroup:
    """One replica's member of the group of engines. While ``awake``, each replica calls ``agree`` for each
    step."""

    def __init__(self, replica: int, replicas: int, wakeups: WakeupChannel, host: str | None = None) -> None:
        """Create an unconnected member. For ``host`` see ``GroupComm``."""
        self._replica = replica
        self._launcher = Launcher()
        self._comm = GroupComm("engines", range(replicas), replica, self._launcher, host)
        self._wakeups = wakeups
        self._waves = Waves()
        self._epoch = -1
        self._launched = 0
        self._early: list[tuple[int, int]] = []
        """Wake-ups of an epoch not yet begun at this replica."""
        self.votes = 0
        """Number of completed agreements."""

    def connect(self, store: Any, epoch: int, timeout: float, addresses: Sequence[str] = ()) -> None:
        """Form the group of engines anew for ``epoch``, all asleep. All engines must call. Raise CommLost.

        ``timeout`` bounds the call, and each later wait for another engine's vote, in seconds. For
        ``addresses`` see ``WakeupChannel.reach``.
        """
        self._comm.abort()
        self._launcher.broken = False
        self._wakeups.reach(addresses)
        self._comm.connect(store, epoch, timeout)
        self._waves = Waves()
        self._epoch = epoch
        self._launched = 0

    def abort(self) -> None:
        """End the group: a waiting ``agree`` raises CommLost. May be called from any thread."""
        self._launcher.broken = True
        self._comm.abort()

    @property
    def awake(self) -> bool:
        """True if ``agree`` must be called because other replicas call ``agree``. Reads wake-ups; never
        waits."""
        self._listen()
        return self._waves.awake

    @property
    def sockets(self) -> Sequence[Any]:
        """Sockets to poll while asleep."""
        return self._wakeups.sockets

    def agree(self, vote: Vote, updates: bytes = b"") -> Decision:
        """Wake the expert-parallel group if asleep, wait for the votes of all replicas, and return the
        decision. For a launch, ``Decision.others`` has the ``updates`` of the other replicas.

        Sends ``vote`` with this replica's epoch, step and wave. A decision to launch counts as a launched
        step; a decision to sleep puts this replica to sleep. Raise CommLost if a replica is gone or late, and
        EngineDead if replicas are at different steps.
        """
        called = self._waves.begin()
        if called is not None:
            self._wakeups.wake(self._epoch, called)
        vote = msgspec.structs.replace(
            vote, epoch=self._epoch, step=self._launched, wave=self._waves.wave, updates=len(updates)
        )
        table = self._comm.all_gather(torch.from_numpy(to_row(vote))).result()
        decision = decide(table.numpy())
        self.votes += 1
        self._launched += decision.launch
        if decision.sleep:
            # A wake-up for the next wave may have come already: then `sleep` begins the wave at once.
            self._listen()
            self._waves.sleep()
        # A second collective, in the same steps of all replicas: all have the same table of votes.
        if not decision.launch or not any(decision.updates):
            return decision
        padded = np.frombuffer(updates.ljust(max(decision.updates), b"\0"), np.uint8).copy()
        parts = self._comm.all_gather(torch.from_numpy(padded)).result().numpy()
        others = {
            replica: parts[replica, :size].tobytes()
            for replica, size in enumerate(decision.updates)
            if size and replica != self._replica
        }
        return msgspec.structs.replace(decision, others=others)

    def close(self) -> None:
        """End the group, and close the wake-up channel."""
        self._comm.abort()
        self._wakeups.close()

    def _listen(self) -> None:
        """Read all received wake-ups.

        A wake-up of the present epoch begins its wave, a later epoch's is kept, an earlier epoch's is
        dropped.
        """
        early = self._early
        self._early = []
        for epoch, wave in [*early, *self._wakeups.received()]:
            if epoch == self._epoch:
                self._waves.wake(wave)
            elif epoch > self._epoch:
                self._early.append((epoch, wave))
