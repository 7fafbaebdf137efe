"""How heads of one host, of which any may die and be started anew, agree that all of them are there.

Every head has a file in a folder that they share: its seat. It says which epoch the head would begin, and
whether it has begun. A head proposes an epoch that nobody has begun, and none below what another proposes;
when all propose the same, it begins. The store that they meet at is named after the lives of all of them. So
a head that took an old seat for a living one meets nobody there, gives up in time, and proposes the next.
"""

from __future__ import annotations

import hashlib
import os
import secrets
import time
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import msgspec

from weft.parallel.group import CommLost

TURN = 0.02
"""Seconds between two looks at others' seats while they are waited for."""
LOOK = 1.0
"""And while there is nothing to do."""
PATIENCE = 3600.0
"""Seconds that heads wait for one that loads its weights."""


class Seat(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What a head says of itself."""

    life: str
    """Of its process, drawn by chance."""
    epoch: int
    begun: bool


class Met(NamedTuple):
    """What heads agreed on."""

    epoch: int
    store: str
    """The address of a store that nobody has used."""


def propose(own: int, others: list[Seat | None]) -> int:
    """The epoch to propose: ``own`` or a later one. Pure."""
    return max([own, *(seat.epoch + seat.begun for seat in others if seat is not None)])


def complete(epoch: int, others: list[Seat | None]) -> bool:
    """Whether all others propose ``epoch``, too. Pure."""
    return all(seat is not None and seat.epoch == epoch and not seat.begun for seat in others)


class Meeting:
    """The seat of one head. Used from one thread at a time."""

    def __init__(self, folder: str, replica: int, replicas: int) -> None:
        """``folder``: only this user can enter it."""
        self._folder = Path(folder)
        self._replica, self._replicas = replica, replicas
        self._life = secrets.token_hex(8)
        self._lives: list[str] = []
        self._looked = 0.0

    def attend(self, epoch: int, check: Callable[[], None], patience: float = PATIENCE) -> Met:
        """Waits until all heads are there. Returns the epoch to begin, ``epoch`` or a later one.

        ``check`` is called often; what it raises passes through. Raises CommLost when ``patience`` is over.
        """
        until = time.monotonic() + patience
        said = None
        while True:
            seats = self._read()
            others = [seat for number, seat in enumerate(seats) if number != self._replica]
            epoch = propose(epoch, others)
            if epoch != said:
                self._write(Seat(self._life, epoch, False))
                said = epoch
            elif complete(epoch, others):
                self._lives = [self._life if seat is None else seat.life for seat in seats]
                return Met(epoch, self._store(epoch))
            if time.monotonic() > until:
                raise CommLost(f"the heads of the domain did not all come within {patience:g} s")
            check()
            time.sleep(TURN)

    def begun(self, epoch: int) -> None:
        """All heads have begun ``epoch``."""
        self._write(Seat(self._life, epoch, True))

    def moved_on(self, epoch: int) -> bool:
        """Whether another head is no longer, or not yet again, in ``epoch``, which this one has begun.

        Looks only now and then.
        """
        now = time.monotonic()
        if now - self._looked < LOOK:
            return False
        self._looked = now
        return any(
            seat is not None and (seat.epoch > epoch or seat.life != life)
            for seat, life in zip(self._read(), self._lives, strict=True)
        )

    def _path(self, replica: int) -> Path:
        return self._folder / f"seat{replica}"

    def _store(self, epoch: int) -> str:
        lives = hashlib.blake2b("/".join(self._lives).encode(), digest_size=6).hexdigest()
        return f"file://{self._folder}/epoch{epoch}-{lives}"

    def _read(self) -> list[Seat | None]:
        seats: list[Seat | None] = []
        for replica in range(self._replicas):
            try:
                seats.append(msgspec.msgpack.decode(self._path(replica).read_bytes(), type=Seat))
            except FileNotFoundError:
                seats.append(None)
        return seats

    def _write(self, seat: Seat) -> None:
        path = self._path(self._replica)
        new = path.with_suffix(".new")
        new.write_bytes(msgspec.msgpack.encode(seat))
        os.replace(new, path)
