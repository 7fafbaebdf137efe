"""Sum of the results of a token's experts, for the kernel of the sum and for the norm that adds the sum."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def sum_of_experts(
    made_ptr, weight_ptr, shared_ptr, share_ptr, token, n, N: tl.constexpr, TOP_K: tl.constexpr,
    SHARED: tl.constexpr, SHARE: tl.constexpr,
):  # fmt: skip
    """Return columns ``n`` of the sum of one token's experts in top-k order, then the shared expert, float32.

    See ``moe.ExpertSum`` for the terms.
    """
    total = tl.zeros(n.shape, dtype=tl.float32)
    for choice in range(TOP_K):
        part = tl.load(made_ptr + (token * TOP_K + choice) * N + n, mask=n < N, other=0.0).to(tl.float32)
        total += part * tl.load(weight_ptr + token * TOP_K + choice)
    if SHARED:
        part = tl.load(shared_ptr + token * N + n, mask=n < N, other=0.0).to(tl.float32)
        if SHARE:
            part = part * tl.load(share_ptr + token)
        total += part
    return total
