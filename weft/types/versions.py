"""Messages to engine processes of earlier releases, see docs/adr/0036-releases-that-meet.md."""

from __future__ import annotations

from collections.abc import Iterable

import msgspec

from weft.types.messages import LAG_SINCE, ROUTES_SINCE, Submit, ToEngine, Welcome, common_version

PAYER_SINCE = 3
"""Version that added ``Submit.payer``."""


def message_for(welcome: Welcome | None, message: ToEngine) -> ToEngine:
    """Return ``message`` with only the fields that the engine process with this Welcome knows. Without a
    Welcome, the engine process may be of any release."""
    version = None if welcome is None else common_version(welcome.versions)
    if isinstance(message, Submit) and message.payer and (version or 0) < PAYER_SINCE:
        return msgspec.structs.replace(message, payer="")
    return message


def unknown_to(welcome: Welcome, submits: Iterable[Submit]) -> str:
    """Return the name of a feature of ``submits`` that the engine process with this Welcome does not know, or
    "". The fields of the feature cannot be left out: the answer would be another."""
    version = common_version(welcome.versions) or 0
    if version >= LAG_SINCE:
        return ""
    for submit in submits:
        # Earlier releases refuse the tokens of an item with several frames: they count no averaged frames.
        if any(item.lag is not None or item.grid[0] > 1 for item in submit.media):
            return "videos of this model"
        if version < ROUTES_SINCE and (submit.routes >= 0 or submit.forced is not None):
            return "routed experts"
    return ""
