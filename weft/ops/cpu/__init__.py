"""The CPU extension: operations in C++ for bf16 and float32, built once per machine by ``weft build-ops``.

``load`` is the one way in. It never compiles: without a build, or with WEFT_DISABLE_CPU_OPS=1, models run on
the torch implementations. Nothing here imports torch before ``load`` is called.
"""

from __future__ import annotations

import contextlib
import functools
import os

from weft.common import env
from weft.common.errors import EngineDead
from weft.common.log import get_logger
from weft.ops.cpu import build

_log = get_logger(__name__)

UNBUILT, COMPILING = "unbuilt", "compiling"
"""Values of WEFT_DISABLE_CPU_OPS in the processes of a server that began without the operations.

The processes keep torch's operations, whatever is built meanwhile: a stream that goes on in another process
keeps its bits."""


class CannotCapture(EngineDead):
    """A function makes a call that a program of captured calls cannot hold; what it computed is all right."""


@functools.cache
def load() -> bool:
    """Whether ``torch.ops.weft_cpu`` can be called; loads this machine's build on the first call.

    Says once in the log why not, and what that costs. ``load.cache_clear()`` makes the next call look again.
    """
    disabled = env.get("WEFT_DISABLE_CPU_OPS")
    if disabled == COMPILING:
        return False
    if disabled == "1":
        _log.info("the C++ operations are off (WEFT_DISABLE_CPU_OPS)")
        return False
    try:
        library = build.find()
    except (OSError, RuntimeError) as error:  # no home folder, or one that can't be read
        _log.warning("the C++ operations cannot be looked for: %s", error)
        return False
    if library is None or disabled == UNBUILT:
        _log.warning(
            "the C++ operations are not built for this machine, so torch's are used: decode on the CPU takes "
            "about twice as long, deterministic prefill several times as long; `weft build-ops` builds them"
        )
        return False
    import torch

    with contextlib.suppress(OSError):
        os.utime(library)  # in use: builds that nobody used for long are removed
    try:
        torch.ops.load_library(str(library))
    except OSError as error:
        _log.warning("the C++ operations do not load (%s); `weft build-ops --force` builds them again", error)
        return False
    return True


def capabilities() -> tuple[str, ...]:
    """What the loaded build was compiled for, e.g. ("avx2", "avx512", "avx512_bf16"), and what of AMX the
    kernel lets this process have; empty without one."""
    if not load():
        return ()
    import torch

    return tuple(torch.ops.weft_cpu.capabilities.default())
