"""Messages to engine processes of earlier releases, see docs/adr/0036-releases-that-meet.md."""

from __future__ import annotations

import msgspec

from weft.types.messages import Submit, ToEngine, Welcome, common_version

PAYER_SINCE = 3
"""Version that added ``Submit.payer``."""


def message_for(welcome: Welcome | None, message: ToEngine) -> ToEngine:
    """Return ``message`` with only the fields that the engine process with this Welcome knows. Without a
    Welcome, the engine process may be of any release."""
    version = None if welcome is None else common_version(welcome.versions)
    if isinstance(message, Submit) and message.payer and (version or 0) < PAYER_SINCE:
        return msgspec.structs.replace(message, payer="")
    return message
