"""HTTP server of a group that runs alone (``weft engine``): probes, records, metrics and /drain."""

from __future__ import annotations

import threading

import msgspec
import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from weft.control.directory.engine_host import HostPhase
from weft.control.directory.host_server import HostView, describe
from weft.front.front_server import bind
from weft.front.http.access import ApiKeys
from weft.front.monitoring.metrics import CONTENT_TYPE, engine_page

_ENDS_S = 10.0
"""Maximum seconds for open answers at the end."""


class EnginePort:
    """An HTTP server in a thread of its own. Answers while the engines load and while they drain."""

    def __init__(self, server: HostView, model: str, host: str, port: int, key: str | None) -> None:
        """Start listening. ``key``: admin keys for /drain, separated by commas; without a key, /drain
        refuses. Raise ConfigError for an address that cannot be used."""
        self._server, self._model = server, model
        self._keys = ApiKeys(one.strip() for one in (key or "").split(",") if one.strip())
        listener = bind(host, port)
        name, number = listener.getsockname()[:2]
        self.address = f"[{name}]:{number}" if ":" in name else f"{name}:{number}"
        """HOST:PORT."""
        routes = [
            Route("/live", self._live),
            Route("/ready", self._ready),
            Route("/records", self._records),
            Route("/metrics", self._metrics),
            Route("/drain", self._drain, methods=["POST"]),
        ]
        config = uvicorn.Config(
            Starlette(routes=routes), log_config=None, access_log=False, lifespan="off", ws="none"
        )
        self._http = uvicorn.Server(config)
        self._thread = threading.Thread(
            target=self._http.run, args=([listener],), name="weft-http", daemon=True
        )
        self._thread.start()

    def close(self) -> None:
        """Stop listening. Waits up to ``_ENDS_S`` seconds for open answers."""
        self._http.should_exit = True
        self._thread.join(_ENDS_S)

    async def _live(self, request: Request) -> Response:
        """Liveness: 200 while the command runs."""
        return JSONResponse({"status": "alive"})

    async def _ready(self, request: Request) -> Response:
        """Readiness: 200 once all engines have loaded, until the drain; else 503."""
        phase = self._server.phase
        said = describe(self._server.instances, phase)
        return JSONResponse(said, 200 if phase is HostPhase.SERVING else 503)

    async def _records(self, request: Request) -> Response:
        """The records of the group's engines, for API servers that ask the groups themselves."""
        return Response(msgspec.json.encode(self._server.records), media_type="application/json")

    async def _metrics(self, request: Request) -> Response:
        """The metrics of the group's engines, in Prometheus text format."""
        return Response(engine_page(self._server, self._model), media_type=CONTENT_TYPE)

    async def _drain(self, request: Request) -> Response:
        """Drain and end the group. Needs the admin key."""
        if not self._keys:
            return _error("set WEFT_ADMIN_KEY for the command to allow /drain, or send SIGTERM", 403)
        if self._keys.find(request.headers.get("authorization", "").encode()) is None:
            return _error("this route needs the admin key: Authorization: Bearer KEY", 401)
        self._server.drain()
        return JSONResponse({"status": "the group drains and ends"})


def _error(message: str, status: int) -> Response:
    return JSONResponse({"error": {"message": message}}, status)
