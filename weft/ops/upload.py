"""Host values to a device."""

from __future__ import annotations

import numpy as np
import torch


def upload(array: np.ndarray, device: torch.device) -> torch.Tensor:
    """``array`` as a tensor on ``device``. The array must not be written afterwards.

    A GPU gets it from pinned memory of its own, which the allocator keeps until the copy was made; so the
    host never waits. On the CPU it is the array's own memory.
    """
    tensor = torch.from_numpy(array)
    if device.type != "cuda":
        return tensor.to(device)
    return tensor.pin_memory().to(device, non_blocking=True)
