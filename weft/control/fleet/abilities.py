"""The fields of a Submit unknown to instances of older releases, by version of the messages."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import msgspec

from weft.common.errors import Unavailable
from weft.control.fleet.instances import Instance
from weft.control.fleet.pairs import serve
from weft.types.messages import Submit

GRAMMARS_SINCE = 4
"""The first version of messages in which a Submit may have a grammar, pooling, explain or session."""
PROFILES_SINCE = 6
"""The first version of messages in which engines can be asked for profiles."""
MEDIA_SINCE = 5
"""The first version of messages in which a Submit may have images."""


def speaking(instances: Sequence[Instance], submit: Submit) -> Sequence[Instance]:
    """Return the ``instances`` with support for every feature of ``submit``."""
    if (since := _since(submit)) == 0:
        return instances
    return [one for one in instances if one.version >= since]


def _since(submit: Submit) -> int:
    """Return the oldest version of messages with all features of ``submit``; 0 if any version will do."""
    if submit.media:
        return MEDIA_SINCE
    return GRAMMARS_SINCE if submit.grammar is not None or submit.pooling else 0


def outdated(instances: Iterable[Instance], submit: Submit, local: bool) -> bool:
    """Return True if no instance takes ``submit`` because the live instances run too old a release.

    Assume that all live instances of a sufficient version took sequences. If even these instances could not
    serve ``submit``, an upgrade is missing. For ``local`` see ``serve``.
    """
    return not serve(speaking([one for one in instances if one.alive], submit), local)


def understood(submit: Submit, instance: Instance) -> Submit:
    """Return ``submit`` without the fields unknown to ``instance``, which is among ``speaking``."""
    if instance.version < 2 and submit.attempt:
        submit = msgspec.structs.replace(submit, attempt=0)
    if instance.version < GRAMMARS_SINCE and (submit.explain or submit.session):  # optional features
        submit = msgspec.structs.replace(submit, explain=False, session="")
    return submit


def too_old(submit: Submit) -> Unavailable:
    """Return the error, naming the missing ability, for a Submit when every live instance is too old."""
    what = "response formats and tool grammars"
    if submit.media:
        what = "images"
    elif submit.grammar is None:
        what = "embeddings"
    return Unavailable(
        f"no available engine supports {what}: all engines run an older release of weft; upgrade their hosts"
    )
