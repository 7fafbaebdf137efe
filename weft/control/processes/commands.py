"""Operators' commands at the supervisor. Each is carried out or refused; the API server gets the verdict."""

from __future__ import annotations

from collections.abc import Callable

from weft.common.errors import Unavailable, WeftError
from weft.common.log import get_logger
from weft.control.links.owner import Scaled
from weft.control.processes import channel
from weft.control.processes import supervisor as s
from weft.control.processes.engine_owner import Starter
from weft.control.processes.rolling import BUSY
from weft.control.processes.scaling import plan_removal, plan_restart, plan_scale, to_revive

log = get_logger(__name__)


def carry_out(
    asked: channel.Command, supervisor: s.Supervisor, starter: Starter, on: Callable[[s.Event], None]
) -> channel.Verdict:
    """Carry out a command and return the verdict: the changes, or the reason of a refusal.

    ``on`` passes an event to ``supervisor``. A refused command changes nothing.
    """
    try:
        if supervisor.phase is not s.ServerPhase.SERVING or supervisor.engines.over:
            raise Unavailable("the server starts or shuts down; its groups stay as they are")
        return channel.Verdict(asked.request, _changes(asked, supervisor, starter, on))
    except WeftError as error:
        refusal = error.info()
    except OSError as error:  # for example a full disk
        refusal = Unavailable(f"the groups stay as they are: {error.strerror}").info()
    log.info("a command of an operator is refused: %s", refusal.message)
    return channel.Verdict(asked.request, error=refusal)


def _changes(
    asked: channel.Command, supervisor: s.Supervisor, starter: Starter, on: Callable[[s.Event], None]
) -> Scaled:
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
                starter.prepare(topology, names)
            on(s.RestartAsked(name, bool(topology)))
        case channel.GroupRevived(name):
            gone = [one for one, entry in table.entries.items() if entry.condition == "retired"]
            names = to_revive(name, members, gone)
            on(s.ReviveAsked(name))
    return Scaled(tuple(names))
