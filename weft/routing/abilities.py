"""What instances of an older release cannot be asked for: the fields of a Submit that came with a version of
the messages."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from weft.common.errors import Unavailable
from weft.routing.instances import Instance
from weft.types.messages import Submit

GRAMMARS_SINCE = 4
"""The version of messages in which a Submit may have a grammar, pooling or explain."""


def speaking(instances: Sequence[Instance], submit: Submit) -> Sequence[Instance]:
    """Those of ``instances`` that understand all of ``submit``."""
    if submit.grammar is None and not submit.pooling and not submit.explain:
        return instances
    return [one for one in instances if one.version >= GRAMMARS_SINCE]


def understood(submit: Submit, instance: Instance) -> Submit:
    """``submit`` as ``instance``, which is ``speaking``, knows it."""
    if instance.version < 2 and submit.attempt:
        return msgspec.structs.replace(submit, attempt=0)
    return submit


def too_old(submit: Submit) -> Unavailable:
    """Why there is none."""
    what = "response formats and tool grammars"
    if submit.grammar is None:
        what = "embeddings" if submit.pooling else "explanations of cache misses"
    return Unavailable(
        f"no engine of this server knows {what}: they run an older release of weft; upgrade their hosts"
    )
