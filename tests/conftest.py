"""For every test: without a GPU, Triton's kernels run in its interpreter, on the CPU.

That is chosen when Triton is imported, so it is set here, before any test module can import it.
"""

from __future__ import annotations

import os

import torch

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")
