"""The groups behind a headless Service of Kubernetes: a watch over EndpointSlices finds the pods.

The service account needs ``get``, ``list`` and ``watch`` on ``endpointslices`` of ``discovery.k8s.io``.
"""

from __future__ import annotations

import contextlib
import threading
import time
from pathlib import Path

import httpx

from weft.common import env
from weft.common.counted_log import CountedLog
from weft.common.errors import ConfigError
from weft.common.log import get_logger
from weft.control.directory.endpoint_slices import EndpointSlices, Expired

log = get_logger(__name__)

ACCOUNT = Path("/var/run/secrets/kubernetes.io/serviceaccount")
PORT = "http"
"""Name of the port of the service that answers /records."""
WATCH_S = 300
"""Seconds after which the API server ends a watch. A new watch follows at once."""
AGAIN_S = 1.0
"""Seconds between two attempts after an error."""
SILENCE_S = 60.0
"""Seconds beyond ``WATCH_S`` without a byte after which a connection counts as broken."""


class KubernetesGroups:
    """The URLs of the groups of a service. A thread watches; readers get the last state."""

    def __init__(
        self,
        service: str,
        namespace: str = "",
        server: str = "",
        account: Path = ACCOUNT,
        again: float = AGAIN_S,
    ) -> None:
        """Start to watch. ``namespace``: default: that of the service account. ``server``: URL of the API
        server; default: from the environment of a pod. Raise ConfigError outside a pod."""
        self._account, self._again = account, again
        try:
            namespace = namespace or (account / "namespace").read_text().strip()
            server = server or _server()
            (account / "token").read_text()
        except OSError as error:
            raise ConfigError(
                f"--directory kubernetes:{service}: this process runs in no pod with a service account "
                f"({error})",
                param="--directory",
            ) from error
        authority = account / "ca.crt"
        self._slices = EndpointSlices(PORT)
        self._client = httpx.Client(
            base_url=f"{server}/apis/discovery.k8s.io/v1/namespaces/{namespace}",
            verify=str(authority) if authority.exists() else True,
            trust_env=False,
            timeout=httpx.Timeout(10.0, read=WATCH_S + SILENCE_S),
        )
        self._selector = f"kubernetes.io/service-name={service}"
        self._urls: list[str] | None = None
        self._trouble = CountedLog(log)
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._run, name="weft-kubernetes", daemon=True)
        self._thread.start()

    def urls(self) -> list[str]:
        """Return the URLs of all groups. Raise OSError before the first list."""
        if self._urls is None:
            raise OSError("Kubernetes has not listed the groups yet")
        return self._urls

    def close(self) -> None:
        """End the watch at its next event. Idempotent."""
        self._over.set()
        self._client.close()

    def _run(self) -> None:
        """List and watch until ``close``. The body of a thread. Errors are logged; the last state stays."""
        while not self._over.is_set():
            began = time.monotonic()
            try:
                if not self._slices.version:
                    self._list()
                self._watch()
            except Expired:
                self._slices.version = ""
            except Exception as error:  # of the network, or in what the API server sends
                if not self._over.is_set():
                    self._trouble.warn("the watch over the groups broke (%s)", error)
            # Also after a watch that ended at once.
            self._over.wait(max(0.0, began + self._again - time.monotonic()))

    def _list(self) -> None:
        answer = self._client.get(
            "/endpointslices", params={"labelSelector": self._selector}, headers=self._key()
        )
        if answer.status_code != 200:
            raise ValueError(
                f"Kubernetes answers a list with status {answer.status_code}: {answer.text[:200]}"
            )
        self._slices.relist(answer.content)
        self._show()

    def _watch(self) -> None:
        """Follow the events of one watch to its end. Raise Expired if the version is too old."""
        self._slices.reconnect()
        query = {
            "labelSelector": self._selector,
            "watch": "true",
            "allowWatchBookmarks": "true",
            "resourceVersion": self._slices.version,
            "timeoutSeconds": str(WATCH_S),
        }
        with self._client.stream("GET", "/endpointslices", params=query, headers=self._key()) as answer:
            if answer.status_code == 410:
                raise Expired
            if answer.status_code != 200:
                raise ValueError(f"Kubernetes answers a watch with status {answer.status_code}")
            for piece in answer.iter_bytes():
                self._slices.feed(piece)
                self._show()
                if self._over.is_set():
                    return

    def _show(self) -> None:
        self._urls = [
            f"http://[{address}]:{port}" if ":" in address else f"http://{address}:{port}"
            for address, port in self._slices.endpoints
        ]

    def _key(self) -> dict[str, str]:
        # Kubernetes replaces the token from time to time, so the file is read for each request.
        with contextlib.suppress(OSError):
            return {"Authorization": f"Bearer {(self._account / 'token').read_text().strip()}"}
        return {}


def _server() -> str:
    """Return the URL of the API server, as a pod finds it. Raise OSError outside a pod."""
    host, port = env.get("KUBERNETES_SERVICE_HOST"), env.get("KUBERNETES_SERVICE_PORT")
    if not host or not port:
        raise OSError("KUBERNETES_SERVICE_HOST is not set")
    return f"https://[{host}]:{port}" if ":" in host else f"https://{host}:{port}"
