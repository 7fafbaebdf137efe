"""Messages about LoRA adapters between an API server and an engine process.

    API server                                engine process
      │ LoadAdapter ───────────────────────────► │   reads the folder on every rank
      │ ◄─────────────── AdapterChanged(loaded) │   or with ``error``
      │ Submit(adapter=digest) ────────────────► │   an unknown digest fails only its request
      │ DropAdapter ───────────────────────────► │   running requests end with the adapter
      │ ◄────────────────────── AdapterChanged │

The digest of its content names an adapter (``weft.config.adapters``), so two contents never share a name.
Only the API server knows the names that clients use. An API server sends these messages only to an engine
process with ``Welcome.max_loras`` above 0.
"""

from __future__ import annotations

import msgspec

from weft.common.errors import ErrorInfo

DIGEST_DIGITS = 32
"""Hexadecimal digits of an adapter's digest."""


class LoadAdapter(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, tag=True):
    """API server to engine: read an adapter from ``folder``, and accept requests for the adapter. Idempotent.

    Answered by ``AdapterChanged``, to the sender only. A second message for a known digest changes
    ``pinned``.
    """

    name: str
    """Name for log lines and errors. No other effect."""
    digest: str
    """Digest of the content of ``folder``. Another content is refused."""
    folder: str
    """Absolute path, on the hosts of the engine process and of all its ranks."""
    pinned: bool = False
    """True if the adapter stays in the pool after its last request."""


class DropAdapter(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, tag=True):
    """API server to engine: accept no further request for the adapter. Answered by ``AdapterChanged``.

    Requests accepted earlier finish with the adapter. Afterwards the memory is freed.
    """

    digest: str


class AdapterChanged(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, tag=True):
    """Engine to API server: the answer to ``LoadAdapter`` or ``DropAdapter``."""

    digest: str
    loaded: bool
    """True if the engine process accepts requests for the adapter."""
    error: ErrorInfo | None = None
    """The reason why the adapter was not loaded; None after success."""
