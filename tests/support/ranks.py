"""Ranks of a mesh as threads of one process, over real gloo groups."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import TypeVar

import torch.distributed as dist

from tests.support.slowness import deadline
from weft.parallel.launcher import CommLost
from weft.parallel.mesh import Mesh, make_mesh
from weft.types.layout import Layout

R = TypeVar("R")


def on_ranks(layout: Layout, work: Callable[[Mesh], R], timeout: float | None = None) -> list[R]:
    """Run ``work(mesh)`` on every rank of ``layout`` at once. Return the results by rank.

    Raise the exception of the first failed rank. A failed rank aborts its groups, so no other rank waits for
    it.
    """
    timeout = deadline(30.0) if timeout is None else timeout
    store = dist.HashStore()
    results: list[R | None] = [None] * layout.ranks
    errors: list[BaseException | None] = [None] * layout.ranks
    order: list[BaseException] = []

    def run(rank: int) -> None:
        mesh = make_mesh(layout, rank)
        try:
            mesh.connect(store, 0, timeout)
            results[rank] = work(mesh)
        except BaseException as error:
            errors[rank] = error
            order.append(error)
            mesh.abort()

    threads = [threading.Thread(target=run, args=(rank,), daemon=True) for rank in range(layout.ranks)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(4 * timeout)
        assert not thread.is_alive(), "a rank hangs"
    if order:
        raise order[0]
    return results  # type: ignore[return-value]


def ends_when_aborted(connect: Callable[[], None], abort: Callable[[], None]) -> str:
    """Return the message of the CommLost that a lone ``connect()`` raises after ``abort()``.

    The function repeats ``abort()``, as heartbeats do: the wait may not have begun at the first call.
    """
    said: list[str] = []

    def alone() -> None:
        try:
            connect()
        except CommLost as error:
            said.append(error.message)

    thread = threading.Thread(target=alone, daemon=True)
    thread.start()
    until = time.monotonic() + deadline(20)
    while thread.is_alive():
        assert time.monotonic() < until, "it waits for others though it was aborted"
        abort()
        thread.join(0.01)
    (made,) = said
    return made
