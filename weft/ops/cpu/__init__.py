"""The CPU extension: C++ operations for bf16 and float32, built once per machine by ``weft build-ops``.

``load`` is the only entry point and never compiles. Without a build, or with WEFT_DISABLE_CPU_OPS=1, models
run on the torch implementations. This module imports torch only inside ``load``.
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
"""Values of WEFT_DISABLE_CPU_OPS in processes of a server that started without the operations.

These processes keep torch's operations, whatever is built meanwhile. A stream that continues in another
process therefore keeps its bits.
"""


class CannotCapture(EngineDead):
    """A call cannot be stored in a program of captured calls. The result of the call is valid."""


@functools.cache
def load() -> bool:
    """Return True if ``torch.ops.weft_cpu`` can be called; the first call loads this machine's build.

    Logs once why the operations are unavailable, and the cost. ``load.cache_clear()`` makes the next call
    look again. Raises ConfigError for a bad WEFT_CPU_LEVEL.
    """
    disabled = env.get("WEFT_DISABLE_CPU_OPS")
    if disabled == COMPILING:
        return False
    if disabled == "1":
        _log.info("the C++ operations are off (WEFT_DISABLE_CPU_OPS)")
        return False
    try:
        library = build.find()
    except (OSError, RuntimeError) as error:  # no home folder, or an unreadable folder
        _log.warning("the C++ operations cannot be located: %s", error)
        return False
    if library is None or disabled == UNBUILT:
        _log.warning(
            "the C++ operations are not built for this machine, so torch's are used: decode on the CPU takes "
            "about twice as long, deterministic prefill several times as long; `weft build-ops` builds them"
        )
        return False
    import torch

    with contextlib.suppress(OSError):
        os.utime(library)  # marks the build as used: unused builds are removed after a month
    try:
        torch.ops.load_library(str(library))
    except OSError as error:
        _log.warning("the C++ operations do not load (%s); `weft build-ops --force` builds them again", error)
        return False
    return True


def capabilities() -> tuple[str, ...]:
    """Return the instruction sets of the loaded build, e.g. ("avx2", "avx512", "avx512_bf16") or ("neon",).

    Includes the parts of AMX permitted by the kernel, and "word_rows" if products may round rows of x to 16
    bits. Empty without a loaded build.
    """
    if not load():
        return ()
    import torch

    return tuple(torch.ops.weft_cpu.capabilities.default())
