"""A running server as a planner sees the server: counters of ``/metrics``, groups, and the wanted numbers."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any, Protocol

from weft.common.client_tls import key_headers
from weft.common.errors import ConfigError, EngineDead, WeftError
from weft.control.planner.observations import (
    COUNTERS,
    ENGINE_COUNTERS,
    EngineSeen,
    Series,
    Snapshot,
)

if TYPE_CHECKING:
    import httpx

TIMEOUT_S = 10.0
"""Seconds to wait for an answer."""
_PREFIX = "weft:"
_FIELDS = ("name", "group", "base", "role", "state", "alive")
_LOAD = ("running", "waiting", "kv_usage")
"""Null before the engine answers."""


class WantedNumbers(Protocol):
    """The owner of the groups: today's admin routes, later the scale subresource of Kubernetes."""

    def engines(self) -> tuple[EngineSeen, ...]:
        """Return the engines of all groups. Raises WeftError."""

    def write(self, base: str, groups: int) -> str:
        """Set the wanted number of groups of ``base``; return the answer as text. Raises WeftError."""


class AdminRoutes:
    """The groups through ``GET /admin/groups`` and ``POST /admin/scale``."""

    def __init__(self, client: httpx.Client, admin_key: str) -> None:
        self._client = client
        self._headers = key_headers(admin_key)

    def engines(self) -> tuple[EngineSeen, ...]:
        """Return the engines of all groups. Raises EngineDead without an answer and ConfigError after a
        refusal."""
        answer = request(self._client, "GET", "/admin/groups", self._headers)
        try:
            return tuple(
                EngineSeen(
                    *(one[field] for field in _FIELDS),
                    *(one[field] or 0 for field in _LOAD),
                )
                for one in answer.json()["engines"]
            )
        except (ValueError, KeyError, TypeError) as error:
            raise EngineDead(f"/admin/groups has an unknown form: {error}") from error

    def write(self, base: str, groups: int) -> str:
        """Set the wanted number of groups. Raises EngineDead without an answer and ConfigError after a
        refusal."""
        body = {"base": base, "groups": groups}
        answer = request(self._client, "POST", "/admin/scale", self._headers, body)
        try:
            return str(answer.json()["status"])
        except (ValueError, KeyError, TypeError) as error:
            raise EngineDead(f"/admin/scale has an unknown form: {error}") from error


class LiveServer:
    """Reads a server's metrics beside the groups."""

    def __init__(self, client: httpx.Client, owner: WantedNumbers, api_key: str) -> None:
        """``api_key``: "" for a server without keys, or with open metrics."""
        self._client = client
        self._owner = owner
        self._headers = key_headers(api_key)

    def snapshot(self) -> Snapshot:
        """Return the counters of now. Raises EngineDead without an answer and ConfigError after a
        refusal."""
        engines = self._owner.engines()
        page = request(self._client, "GET", "/metrics", self._headers).text
        counts, open_sequences = read_metrics(page)
        return Snapshot(engines, counts, open_sequences)


def read_metrics(page: str) -> tuple[dict[Series, float], float]:
    """Return the counters of a page of metrics, and the open sequences of all API servers.

    Raises EngineDead for a page without Weft's metrics.
    """
    from prometheus_client.parser import text_string_to_metric_families

    wanted = {f"{_PREFIX}{name}": name for name in (*COUNTERS, *ENGINE_COUNTERS)}
    counts: dict[Series, float] = {}
    found, open_sequences = False, 0.0
    try:
        samples = [one for family in text_string_to_metric_families(page) for one in family.samples]
    except ValueError as error:
        raise EngineDead(f"/metrics is no page of metrics: {error}") from error
    for sample in samples:
        if sample.name == f"{_PREFIX}front_sequences":
            open_sequences += sample.value
            found = True
        elif (name := wanted.get(sample.name)) is not None:
            labels: dict[str, Any] = dict(sample.labels)
            bound = float(labels.pop("le", math.inf))
            # Counters of engines have the name of the engine alone. A failure ends with its code.
            parts = (labels.get("front"), labels.get("finished_reason"), labels.get("head"))
            source = " ".join(part for part in (*parts, labels.get("code")) if part is not None)
            one = Series(name, source, bound)
            counts[one] = counts.get(one, 0.0) + sample.value
    if not found:
        raise EngineDead("/metrics has no metrics of Weft")
    return counts, open_sequences


def request(client: httpx.Client, method: str, path: str, headers: dict[str, str], body: Any = None) -> Any:
    """Return an answer with status 200. Raises EngineDead without an answer, and ConfigError after a
    refusal."""
    import httpx

    try:
        answer = client.request(method, path, json=body, headers=headers, timeout=TIMEOUT_S)
    except (httpx.HTTPError, httpx.InvalidURL) as error:
        raise EngineDead(f"no Weft server answers: {type(error).__name__}") from None
    if answer.status_code == 200:
        return answer
    try:
        message = answer.json()["error"]["message"]
    except (ValueError, KeyError, TypeError):
        message = f"{path} was answered with status {answer.status_code}"
    error_class: type[WeftError] = EngineDead if answer.status_code >= 500 else ConfigError
    raise error_class(message)
