"""What instances of an older release cannot be asked for: the fields of a Submit that came with a version of
the messages."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import msgspec

from weft.common.errors import Unavailable
from weft.routing.instances import Instance
from weft.routing.pairs import serve
from weft.types.messages import Submit

GRAMMARS_SINCE = 4
"""The version of messages in which a Submit may have a grammar, pooling, explain or session."""
PROFILES_SINCE = 6
"""The version in which heads can be asked for profiles."""
MEDIA_SINCE = 5
"""Likewise, in which it may have images."""


def speaking(instances: Sequence[Instance], submit: Submit) -> Sequence[Instance]:
    """The ``instances`` that can do what ``submit`` asks."""
    if (since := _since(submit)) == 0:
        return instances
    return [one for one in instances if one.version >= since]


def _since(submit: Submit) -> int:
    """The oldest version of messages that has all it asks; 0 for any."""
    if submit.media:
        return MEDIA_SINCE
    return GRAMMARS_SINCE if submit.grammar is not None or submit.pooling else 0


def outdated(instances: Iterable[Instance], submit: Submit, local: bool) -> bool:
    """Whether it is for want of an upgrade that none of ``instances`` takes ``submit``: those that are alive
    and can do it could not serve it if all of them took sequences. ``local``: as for ``serve``."""
    return not serve(speaking([one for one in instances if one.alive], submit), local)


def understood(submit: Submit, instance: Instance) -> Submit:
    """``submit`` as ``instance``, which is ``speaking``, knows it."""
    if instance.version < 2 and submit.attempt:
        submit = msgspec.structs.replace(submit, attempt=0)
    if instance.version < GRAMMARS_SINCE and (submit.explain or submit.session):  # it does as much without
        submit = msgspec.structs.replace(submit, explain=False, session="")
    return submit


def too_old(submit: Submit) -> Unavailable:
    """Why none takes it."""
    what = "response formats and tool grammars"
    if submit.media:
        what = "images"
    elif submit.grammar is None:
        what = "embeddings"
    return Unavailable(
        f"no engine that takes requests now knows {what}: they run an older release of weft; upgrade their "
        "hosts"
    )
