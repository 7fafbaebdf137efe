"""Operators' commands at the supervisor. Each is carried out or refused; the API server gets the verdict."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future
from functools import partial
from typing import NamedTuple

from weft.common.errors import Unavailable, WeftError
from weft.common.log import get_logger
from weft.control.links.owner import Scaled
from weft.control.processes import channel
from weft.control.processes import supervisor as s
from weft.control.processes.engine_owner import Starter
from weft.control.processes.rolling import BUSY, RENEWS
from weft.control.processes.scaling import plan_removal, plan_restart, plan_scale, to_revive

log = get_logger(__name__)


class Prepares(NamedTuple):
    """A thread prepares new settings. Carry out the command again after ``done``."""

    done: Future[None]


def carry_out(
    asked: channel.Command,
    supervisor: s.Supervisor,
    starter: Starter,
    on: Callable[[s.Event], None],
    prepared: Future[None] | None = None,
) -> channel.Verdict | Prepares:
    """Carry out a command and return the verdict: the changes, or the reason of a refusal.

    ``on`` passes an event to ``supervisor``. A refused command changes nothing. ``prepared``: of the first
    call of a command with new settings.
    """
    try:
        if supervisor.phase is not s.ServerPhase.SERVING or supervisor.engines.over:
            raise Unavailable("the server starts or shuts down; its groups stay as they are")
        found = _changes(asked, supervisor, starter, on, prepared)
        return found if isinstance(found, Prepares) else channel.Verdict(asked.request, found)
    except WeftError as error:
        refusal = error.info()
    except OSError as error:  # for example a full disk
        refusal = Unavailable(f"the groups stay as they are: {error.strerror}").info()
    log.info("a command of an operator is refused: %s", refusal.message)
    return channel.Verdict(asked.request, error=refusal)


def refuse(asked: channel.Command) -> channel.Verdict:
    """Return the refusal of new settings while a thread prepares others."""
    return channel.Verdict(asked.request, error=Unavailable(BUSY).info())


def _changes(
    asked: channel.Command,
    supervisor: s.Supervisor,
    starter: Starter,
    on: Callable[[s.Event], None],
    prepared: Future[None] | None,
) -> Scaled | Prepares:
    """Carry out a command and return the changes. Raise WeftError or OSError before the first change."""
    table = supervisor.engines
    members, leaving, retired = table.members, table.leaving, table.retired
    match asked:
        case channel.GroupsScaled(base, groups):
            change = plan_scale(
                base,
                groups,
                *(members, leaving, retired, table.serves),
                first=table.first,
                returnable=supervisor.rolling.returnable,
            )
            if change.new:
                if supervisor.rolling.renews:
                    raise Unavailable(RENEWS)
                starter.add(list(change.new), change.like)
            on(s.ScaleAsked(change))
            return Scaled(change.starting, tuple(change.leaving), tuple(change.returning))
        case channel.GroupRemoved(name):
            names = plan_removal(name, members, leaving, retired, table.serves)
            on(s.RemoveAsked(name))
            return Scaled(leaving=tuple(names))
        case channel.GroupRestarted(name, _, topology):
            names = plan_restart(name, members, leaving | retired)
            if topology:
                if supervisor.rolling.active:
                    raise Unavailable(BUSY)
                if prepared is None:
                    return Prepares(in_thread(partial(starter.prepare, topology, names)))
                prepared.result()
            on(s.RestartAsked(name, bool(topology)))
        case channel.GroupRevived(name):
            gone = [one for one, entry in table.entries.items() if entry.condition == "retired"]
            names = to_revive(name, members, gone)
            on(s.ReviveAsked(name))
    return Scaled(tuple(names))


def in_thread(work: Callable[[], None]) -> Future[None]:
    """Run ``work`` in a daemon thread, which does not delay the end of the server."""
    done: Future[None] = Future()

    def run() -> None:
        try:
            work()
        except Exception as error:
            done.set_exception(error)
        else:
            done.set_result(None)

    threading.Thread(target=run, name="weft-settings", daemon=True).start()
    return done
