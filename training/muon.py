"""Implement Muon: momentum with orthogonalized update matrices (Jordan et al., 2024)."""

from collections.abc import Iterable

import torch
import torch.distributed as dist
from torch import Tensor, nn

NEWTON_SCHULZ = (3.4445, -4.7750, 2.0315)  # the quintic drives singular values toward 1 in five rounds
ROUNDS = 5


def orthogonal(matrices: Tensor) -> Tensor:
    """Return matrices [N, rows, columns] with singular values near 1, in float32."""
    a, b, c = NEWTON_SCHULZ
    x = matrices.bfloat16()
    wide = x.shape[-2] > x.shape[-1]
    x = x.mT if wide else x
    x = x / (torch.linalg.vector_norm(x.float(), dim=(-2, -1), keepdim=True) + 1e-7).bfloat16()
    for _ in range(ROUNDS):
        square = x @ x.mT
        x = a * x + torch.baddbmm(b * square, square, square, alpha=c) @ x
    return (x.mT if wide else x).float()


class Muon(torch.optim.Optimizer):
    """Optimize weights [rows, columns] and stacks [N, rows, columns], with decoupled weight decay.

    The update has the size of Adam's (0.2 per element, Liu et al., 2025), so Adam's rates fit. If ``halves``
    of a group is set, each matrix stacks two matrices on the rows, and each half is orthogonalized
    separately.
    """

    def __init__(
        self, params: Iterable[dict[str, object]], lr: float, weight_decay: float, momentum: float = 0.95
    ) -> None:
        super().__init__(
            params, {"lr": lr, "weight_decay": weight_decay, "momentum": momentum, "halves": False}
        )

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """Apply the gradients, which are equal in all workers. Each worker computes a share of the
        updates.
        """
        rank, size = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
        todo = [(group, p) for group in self.param_groups for p in group["params"] if p.grad is not None]
        updates = []
        for i, (group, p) in enumerate(todo):
            mean = self.state[p].setdefault("mean", torch.zeros_like(p))
            mean.lerp_(p.grad, 1 - group["momentum"])
            if i % size == rank:
                rows = p.shape[-2] // 2 if group["halves"] else p.shape[-2]
                ahead = p.grad.lerp(mean, group["momentum"]).view(-1, rows, p.shape[-1])
                scale = -0.2 * group["lr"] * max(ahead.shape[-2:]) ** 0.5
                updates.append(orthogonal(ahead).mul_(scale).reshape(-1))
            else:
                updates.append(torch.zeros(p.numel()))
        flat = torch.cat(updates)
        if size > 1:
            dist.all_reduce(flat)
        for (group, p), update in zip(todo, flat.split([p.numel() for _, p in todo]), strict=True):
            p.mul_(1 - group["lr"] * group["weight_decay"]).add_(update.view_as(p))


def muon_and_adamw(
    model: nn.Module, matrix_lr: float, lr: float, weight_decay: float
) -> list[torch.optim.Optimizer]:
    """Muon for the matrices of the layers; AdamW for embeddings, norms and routers."""
    pairs: list[Tensor] = []
    single: list[Tensor] = []
    rest: list[Tensor] = []
    for name, p in model.named_parameters():
        if p.ndim < 2 or "embed_tokens" in name or "mlp.gate.weight" in name:
            rest.append(p)
        else:
            (pairs if "gate_up_proj" in name else single).append(p)
    groups: list[dict[str, object]] = [{"params": single}, {"params": pairs, "halves": True}]
    tables = [{"params": [p for p in rest if p.ndim > 1], "weight_decay": weight_decay}]
    tables.append({"params": [p for p in rest if p.ndim == 1], "weight_decay": 0.0})
    return [
        Muon(groups, lr=matrix_lr, weight_decay=weight_decay),
        torch.optim.AdamW(tables, lr=lr, betas=(0.9, 0.98), fused=True),
    ]
