"""Answers of the probes: the state of the server, and the engine processes that are missing, by role."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

from starlette.responses import Response

from weft.common.clock import SystemClock
from weft.control.fleet.instances import Instance
from weft.control.fleet.vacancies import vacant
from weft.front.http.answers import to_json
from weft.front.http.streaming import JSON
from weft.front.lifecycle import Phase
from weft.front.requests.context import Front
from weft.front.requests.models.several_models import SeveralModels

READY_WINDOW = 30.0
"""Maximum seconds since the engine's last progress for a ready server."""


def health_answer(front: Front) -> Response:
    """Return the answer of ``/health``, see the route."""
    if front.several is not None:
        status, code = several_health(front.several)
        return _several(front, front.several, _or_sleeping(front, status), code)
    status, code = _health(front)
    status = _or_sleeping(front, status)
    return _answer(front, status, code, lambda one: one.alive)


def _or_sleeping(front: Front, status: str) -> str:
    """Return "sleeping" in place of "alive" during a sleep."""
    return "sleeping" if status == "alive" and front.pausing.asleep else status


def _health(front: Front) -> tuple[str, int]:
    """Return the state for ``/health`` and the HTTP status."""
    if front.lifecycle.phase is Phase.DEAD or front.links.failure is not None:
        return "dead", 503
    if front.lifecycle.phase is Phase.STARTING:
        return "starting", 503
    table = front.links.fleet.table
    # A role that the operator has scaled to zero is not missing.
    if front.links.whole or (vacant(table) and all(one.alive for one in table.wanted if not one.fresh)):
        return "alive", 200
    # Engine processes that share experts work together or not at all.
    others_serve = front.links.alive and not front.config.parallel.enable_expert_parallel
    return "degraded" if others_serve else "recovering", 200


def ready_answer(front: Front) -> Response:
    """Return the answer of ``/ready``, see the route."""
    window, now = min(READY_WINDOW, front.section.engine_timeout), SystemClock().now()
    phase = front.lifecycle.phase
    if phase is Phase.READY and front.pausing.paused:
        body = {"status": "sleeping" if front.pausing.asleep else "paused"}
        return Response(to_json(body), 503, media_type=JSON)
    if front.several is not None:
        good = phase is Phase.READY and front.several.progressing(window)
        status = "ready" if good else "stalled" if phase is Phase.READY else phase.value
        return _several(front, front.several, status, 200 if good else 503)
    # Requests wait for a role that was scaled to zero, so the server must get requests.
    good = phase is Phase.READY and (front.links.progressing(window) or vacant(front.links.fleet.table))
    status = "ready" if good else "stalled" if phase is Phase.READY else phase.value
    return _answer(front, status, 200 if good else 503, lambda one: one.progressing(window, now))


def _answer(front: Front, status: str, code: int, good: Callable[[Instance], bool]) -> Response:
    """Return the answer of a probe. ``good``: True for an instance that is not missing.

    A member that loads for the first time, and a member that leaves, are not missing.
    """
    roles = {member.name: member.role for member in front.links.describe()}
    wanted = (one for one in front.links.fleet.table.wanted if not one.fresh)
    # An instance reports its role only after the first start of its process.
    lacking = Counter(roles.get(one.name, one.role or "unified") for one in wanted if not good(one))
    body = {"status": status, **({"missing": dict(sorted(lacking.items()))} if lacking else {})}
    return Response(to_json(body), code, media_type=JSON)


def several_health(several: SeveralModels) -> tuple[str, int]:
    """Return the state of a server of several models for ``/health``, and the HTTP status.

    A model that is not loaded is no fault. A model whose last load failed, or whose engines are not all
    alive, makes the server degraded.
    """
    phase = several.lifecycle.phase
    if phase in (Phase.DEAD, Phase.STARTING):
        return phase.value, 503
    failed = any(one.failure for one in several.listed())
    whole = all(one.links.whole or vacant(one.links.fleet.table) for one in several.loaded)
    return "degraded" if failed or not whole else "alive", 200


def _several(front: Front, several: SeveralModels, status: str, code: int) -> Response:
    """Return the answer of a probe. The answer has the state of each model, except in a server with API keys:
    probes have no key, and a key may be limited to some models."""
    shown = {} if front.section.api_key else {"models": {one.name: one.state for one in several.listed()}}
    body = {"status": status, **shown}
    return Response(to_json(body), code, media_type=JSON)
