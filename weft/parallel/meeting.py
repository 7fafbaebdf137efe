"""How heads, of which any may die and be started anew, agree that all of them are there.

Every head has a seat that all can see: a file in a folder that they share or, where they are on several
hosts, an entry of the board on host 0. It says which epoch the head would begin, and whether it has begun. A
head proposes an epoch that nobody has begun, and none below what another proposes; when all propose the same,
it begins. The store that they meet at is named after the lives of all of them. So a head that took an old
seat for a living one meets nobody there, gives up in time, and proposes the next.
"""

from __future__ import annotations

import hashlib
import os
import secrets
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import msgspec

from weft.parallel.board import BoardClient
from weft.parallel.group import CommLost
from weft.types.board import seat_key

TURN = 0.02
"""Seconds between two looks at others' seats while they are waited for."""
LOOK = 1.0
"""And while there is nothing to do."""
PATIENCE = 3600.0
"""Seconds that heads wait for one that loads its weights."""
ANSWER = 1.0
"""Seconds that a look at a board may take; what it said before is what is known then."""


class Seat(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What a head says of itself."""

    life: str
    """Of its process, drawn by chance."""
    epoch: int
    begun: bool
    bell: str = ""
    """The address where it is woken."""
    stores: str = ""
    """What the addresses of stores begin with that heads meet at, if this one is the first of all heads."""


class Met(NamedTuple):
    """What heads agreed on."""

    epoch: int
    store: str
    """The address of a store that nobody has used."""
    bells: tuple[str, ...] = ()
    """Where each head is woken."""


def propose(own: int, others: list[Seat | None]) -> int:
    """The epoch to propose: ``own`` or a later one. Pure."""
    return max([own, *(seat.epoch + seat.begun for seat in others if seat is not None)])


def complete(epoch: int, others: list[Seat | None]) -> bool:
    """Whether all others propose ``epoch``, too. Pure."""
    return all(seat is not None and seat.epoch == epoch and not seat.begun for seat in others)


class Seats(Protocol):
    """Where seats are. Used from one thread at a time."""

    def read(self, wait: bool) -> list[Seat | None]:
        """Everybody's seat. Without ``wait`` what is known without waiting."""

    def write(self, seat: Seat) -> None:
        """This head's own."""


class FolderSeats:
    """Files in a folder that heads of one host share; only this user can enter it."""

    def __init__(self, folder: str, replica: int, replicas: int) -> None:
        self._paths = [Path(folder) / f"seat{number}" for number in range(replicas)]
        self._mine = self._paths[replica]

    def read(self, wait: bool) -> list[Seat | None]:
        seats: list[Seat | None] = []
        for path in self._paths:
            try:
                seats.append(msgspec.msgpack.decode(path.read_bytes(), type=Seat))
            except FileNotFoundError:
                seats.append(None)
        return seats

    def write(self, seat: Seat) -> None:
        new = self._mine.with_suffix(".new")
        new.write_bytes(msgspec.msgpack.encode(seat))
        os.replace(new, self._mine)


class BoardSeats:
    """Entries of the board of host 0."""

    def __init__(self, client: BoardClient, replica: int, replicas: int) -> None:
        self._client = client
        self._keys = [seat_key(number) for number in range(replicas)]
        self._mine = self._keys[replica]

    def read(self, wait: bool) -> list[Seat | None]:
        self._client.look(ANSWER if wait else 0.0)
        found = [self._client.entries.get(key) for key in self._keys]
        return [None if data is None else msgspec.msgpack.decode(data, type=Seat) for data in found]

    def write(self, seat: Seat) -> None:
        self._client.post(self._mine, msgspec.msgpack.encode(seat))
        self._client.look(0.0)


class Meeting:
    """The seat of one head. Used from one thread at a time."""

    def __init__(
        self, seats: Seats, replica: int, stores: str = "", bell: str = "", hosted: Any = None
    ) -> None:
        """``stores``: see ``Seat``; of replica 0 alone. ``bell``: this head's address. ``hosted``: is kept as
        long as this.
        """
        self._seats, self._replica = seats, replica
        self._stores, self._bell, self._hosted = stores, bell, hosted
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
            seats = self._seats.read(wait=True)
            others = [seat for number, seat in enumerate(seats) if number != self._replica]
            epoch = propose(epoch, others)
            if epoch != said:
                self._write(epoch, begun=False)
                said = epoch
            elif complete(epoch, others):
                return self._meet(epoch, seats)
            if time.monotonic() > until:
                raise CommLost(f"the heads of the domain did not all come within {patience:g} s")
            check()
            time.sleep(TURN)

    def begun(self, epoch: int) -> None:
        """All heads have begun ``epoch``."""
        self._write(epoch, begun=True)

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
            for seat, life in zip(self._seats.read(wait=False), self._lives, strict=True)
        )

    def _meet(self, epoch: int, seats: list[Seat | None]) -> Met:
        """``seats``: of all, this head's own as anybody wrote it."""
        mine = self._seat(epoch, begun=False)
        all_seats = [mine if n == self._replica else seat for n, seat in enumerate(seats)]
        present = [seat for seat in all_seats if seat is not None]
        self._lives = [seat.life for seat in present]
        lives = hashlib.blake2b("/".join(self._lives).encode(), digest_size=6).hexdigest()
        store = f"{present[0].stores}/epoch{epoch}-{lives}"
        return Met(epoch, store, tuple(seat.bell for seat in present))

    def _seat(self, epoch: int, begun: bool) -> Seat:
        return Seat(self._life, epoch, begun, self._bell, self._stores)

    def _write(self, epoch: int, begun: bool) -> None:
        self._seats.write(self._seat(epoch, begun))
