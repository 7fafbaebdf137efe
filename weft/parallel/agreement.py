"""The agreement of a domain's heads: one small collective a step, on a process group of their own.

Votes go through gloo; a wake-up (``weft.parallel.wakeup``) reaches heads that sleep. Both are used from the
thread that steps, and no other.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec
import torch

from weft.parallel.group_comm import GroupComm, Launcher
from weft.parallel.wakeup import WakeupChannel
from weft.scheduler.votes import Decision, Vote, Waves, decide, to_row


class AgreementGroup:
    """One replica's member of the group of heads. Every replica calls ``agree`` for every step while it is
    ``awake``.
    """

    def __init__(self, replica: int, replicas: int, wakeups: WakeupChannel, host: str | None = None) -> None:
        """``host``: see ``GroupComm``."""
        self._replica = replica
        self._launcher = Launcher()
        self._comm = GroupComm("heads", range(replicas), replica, self._launcher, host)
        self._wakeups = wakeups
        self._waves = Waves()
        self._epoch = -1
        self._launched = 0
        self._early: list[tuple[int, int]] = []
        """Wake-ups of an epoch that has not begun here."""
        self.votes = 0
        """Number of agreements."""

    def connect(self, store: Any, epoch: int, timeout: float, addresses: Sequence[str] = ()) -> None:
        """Forms the group of heads anew for ``epoch``, all asleep. All heads call it. Raises CommLost.

        ``timeout``: seconds for this, and that one head may wait for another in each agreement.
        ``addresses``: see ``WakeupChannel.reach``.
        """
        self._comm.abort()
        self._launcher.broken = False
        self._wakeups.reach(addresses)
        self._comm.connect(store, epoch, timeout)
        self._waves = Waves()
        self._epoch = epoch
        self._launched = 0

    def abort(self) -> None:
        """Ends the group: a waiting ``agree`` raises CommLost. From any thread."""
        self._launcher.broken = True
        self._comm.abort()

    @property
    def awake(self) -> bool:
        """Whether ``agree`` must be called, since other replicas do. Takes in calls; never waits."""
        self._listen()
        return self._waves.awake

    @property
    def sockets(self) -> Sequence[Any]:
        """To poll while asleep."""
        return self._wakeups.sockets

    def agree(self, vote: Vote) -> Decision:
        """Wakes the domain if it sleeps, and waits for every replica's vote.

        Epoch, step and wave are filled in here. Raises CommLost when a replica is gone or late, and
        EngineDead when replicas are not at the same step.
        """
        called = self._waves.begin()
        if called is not None:
            self._wakeups.wake(self._epoch, called)
        vote = msgspec.structs.replace(vote, epoch=self._epoch, step=self._launched, wave=self._waves.wave)
        table = self._comm.all_gather(torch.from_numpy(to_row(vote))).result()
        decision = decide(table.numpy())
        self.votes += 1
        self._launched += decision.launch
        if decision.sleep:
            self._listen()
            self._waves.sleep()
        return decision

    def close(self) -> None:
        """Ends the group, and closes the wake-up channel."""
        self._comm.abort()
        self._wakeups.close()

    def _listen(self) -> None:
        early = self._early
        self._early = []
        for epoch, wave in [*early, *self._wakeups.received()]:
            if epoch == self._epoch:
                self._waves.heard(wave)
            elif epoch > self._epoch:
                self._early.append((epoch, wave))
