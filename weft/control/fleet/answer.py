"""Check of an engine's answer: the answer must come from the expected process, in a known version."""

from __future__ import annotations

from weft.control.fleet.instances import Instance
from weft.types import messages as m
from weft.types.handshake import no_common_version_text, wrong_engine_text


def why_unusable(instance: Instance, welcome: m.Welcome) -> str:
    """Return the reason why the process behind ``welcome`` cannot be used for ``instance``; "" for none.

    Reasons: no common version, another engine at the address, or another process over the same link.
    """
    if m.common_version(welcome.versions) is None:
        return no_common_version_text(welcome.versions, (m.OLDEST, m.VERSION), "API server")
    wanted, found = instance.identity, welcome.engine
    if wanted is not None and found is not None and not wanted.is_same(found):
        return wrong_engine_text(wanted, found)
    if instance.welcome is not None and instance.welcome.incarnation != welcome.incarnation:
        return "the engine was replaced"
    return ""
