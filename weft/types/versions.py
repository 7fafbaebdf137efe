"""Messages to engine processes of earlier releases, see docs/adr/0036-releases-that-meet.md."""

from __future__ import annotations

from collections.abc import Iterable

import msgspec

from weft.types.messages import LAG_SINCE, ROUTES_SINCE, Submit, ToEngine, Welcome, common_version

PAYER_SINCE = 3
"""Version that added ``Submit.payer``."""


def message_for(welcome: Welcome | None, message: ToEngine) -> ToEngine:
    """Return ``message`` without fields that the engine process of ``welcome`` does not know. None: the
    engine process may be of any release."""
    version = None if welcome is None else common_version(welcome.versions)
    if isinstance(message, Submit) and message.payer and (version or 0) < PAYER_SINCE:
        return msgspec.structs.replace(message, payer="")
    return message


def unknown_to(welcome: Welcome, submits: Iterable[Submit]) -> str:
    """Return the name of a feature of ``submits`` that the engine process of ``welcome`` does not know; "" if
    there is none. Such a request cannot be sent, because the feature changes the output."""
    version = common_version(welcome.versions) or 0
    if version >= LAG_SINCE:
        return ""
    for submit in submits:
        # Earlier releases count the tokens of averaged frames differently.
        if any(item.lag is not None or item.grid[0] > 1 for item in submit.media):
            return "videos of this model"
        if version < ROUTES_SINCE and (submit.routes >= 0 or submit.forced is not None):
            return "routed experts"
    return ""
