"""Memory that torch allocates during a call."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

import numpy as np
from torch.profiler import ProfilerActivity, profile


def most_allocated(run: Callable[[], object]) -> int:
    """Return the largest number of bytes that torch allocates at a time on the CPU while ``run`` runs."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        run()
    results = cast(Any, profiler.profiler).kineto_results.events()
    events = sorted((one for one in results if one.name() == "[memory]"), key=lambda one: one.start_ns())
    return int(np.cumsum([one.nbytes() for one in events]).max())
