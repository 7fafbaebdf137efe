"""Moves of experts between ranks, for the routed layers of one model with divided experts.

    rebalance    loads of all ranks, summed -> the same plan on all -> experts move, maps change
    agree        whenever groups have formed: a restarted rank takes over the present placement

All ranks must call ``rebalance`` at the same step. Weights are written in place, so captured programs stay
valid.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence

import torch

from weft.common.errors import ConfigError
from weft.common.log import get_logger
from weft.moe.parallel import DividedExperts
from weft.moe.placement import Placement, in_order, moves, plan, rank_loads
from weft.parallel.comm import Comm, Pending

Tensor = torch.Tensor

log = get_logger(__name__)


class ExpertLayers:
    """The routed layers of one model on one rank, in order."""

    def __init__(self, layers: Sequence[DividedExperts]) -> None:
        """``layers``: the divided layers, in order.

        ``agree`` runs from now on whenever the mesh is formed anew.
        """
        self._layers = layers
        self._ep = layers[0].mesh.ep
        self._launcher = layers[0].mesh.launcher
        self.moved = 0
        """Number of experts moved to the own rank."""
        self.rebalanced = 0
        """Number of rebalancing passes."""
        self.reload: Callable[[Sequence[Placement]], ExpertLayers | None] | None = None
        """Reader of the experts of another placement from the checkpoint."""
        self._torn = False
        """True if the last pass ended while experts were moving."""
        layers[0].mesh.formed.append(self.agree)

    @property
    def placements(self) -> tuple[Placement, ...]:
        """Placement of each layer."""
        return tuple(layer.map.placement for layer in self._layers)

    def asks(self, tokens: int) -> bool:
        """Return True if the host reads row counts in a step of ``tokens`` tokens per replica."""
        return any(layer.chooser.form(tokens) == "throughput" for layer in self._layers)

    def rebalance(self) -> Generator[Pending, None, None]:
        """Move experts by the rows that chose each expert since the last call, on all ranks together.

        Yields once per collective. Counts ``moved`` and ``rebalanced``, resets the loads, and rank 0 logs an
        improvement. If an exception ends the generator, the experts count as lost until ``agree``.
        """
        counts = [layer.loads for layer in self._layers]
        # Stays True if an exception ends the generator: experts may then be lost on the way.
        self._torn = True
        assert all(count is not None for count in counts), "the loads of experts were not counted"
        own = torch.stack([count for count in counts if count is not None])
        # All ranks sum the same loads and therefore compute the same plan.
        pending = self._ep.all_reduce(own)
        if pending is not None:
            yield pending
            loads = pending.result().cpu().numpy()
            before, after = 0.0, 0.0
            for layer, load in zip(self._layers, loads, strict=True):
                old = layer.map.placement
                new = plan(load, old)
                before = before + max(rank_loads(old, load))
                after = after + max(rank_loads(new, load))
                if new != old:
                    self.moved += yield from self._move(layer, new)
            if self._ep.rank == 0 and after < before:
                share = loads.sum() / self._ep.size
                log.info(
                    "experts moved: busiest rank %.2f of the average, was %.2f", after / share, before / share
                )
        self.rebalanced += 1
        for count in counts:
            if count is not None:
                count.zero_()
        self._torn = False

    def _move(self, layer: DividedExperts, new: Placement) -> Generator[Pending, None, int]:
        """Move the experts of one layer with the launcher marked as moving.

        Return the number of experts received.
        """
        self._launcher.moving = True
        try:
            return (yield from _move(self._ep, layer, new))
        finally:
            self._launcher.moving = False

    def agree(self) -> None:
        """Make all ranks use rank 0's choice of forms, and the placement and ``rebalanced`` of the rank with
        the most passes.

        A rank with another placement reads its experts again. If experts were lost on any rank, all ranks
        return to the order of the checkpoint. Blocks; all ranks must call. Raises ConfigError if the ranks'
        answers would differ in dtype.
        """
        votes = torch.tensor([[layer.chooser.element, *layer.chooser.votes()] for layer in self._layers])
        all_votes = self._ep.all_gather(votes).result()
        if not (all_votes[:, :, 0] == all_votes[0, :, 0]).all():
            raise ConfigError(
                "some ranks compute experts with the C++ operations, and some without; with --deterministic "
                "their answers differ in size: run `weft build-ops` on every host, or set "
                "WEFT_DISABLE_CPU_OPS=1 for all ranks"
            )
        for layer, (_, *vote) in zip(self._layers, all_votes[0].tolist(), strict=True):
            layer.chooser.follow(vote)
        flat = [expert for placement in self.placements for mine in placement for expert in mine]
        own = torch.tensor([int(self._torn), self.rebalanced, *flat])
        states = self._ep.all_gather(own).result().tolist()
        # A torn rank has lost weights in place, and no other rank need have copies.
        if any(torn for torn, *_ in states):
            self._take(None)
            self.rebalanced = 0
            return
        _, most, *target = max(states, key=lambda state: state[1])
        if flat != target:
            self._take(self._unflat(target))
        self.rebalanced = most

    def _unflat(self, flat: list[int]) -> list[Placement]:
        """Return the placements of all layers from one list of experts."""
        rest = iter(flat)
        result = []
        for placement in self.placements:
            result.append(tuple(tuple(next(rest) for _ in mine) for mine in placement))
        return result

    def _take(self, target: list[Placement] | None) -> None:
        """Read the experts of ``target`` from the checkpoint into the layers, in place, and set maps and
        loads anew.

        None: the placement of a new rank. The experts are whole afterwards.
        """
        if target is None:
            target = [
                in_order(len(one.map), self._ep.size, sum(map(len, one.map.placement)) - len(one.map))
                for one in self._layers
            ]
        assert self.reload is not None, "there is no loader to read experts with"
        fresh = self.reload(target)
        assert fresh is not None
        for layer, new, placement in zip(self._layers, fresh._layers, target, strict=True):
            for own, other in zip(layer.tensors(), new.tensors(), strict=True):
                own.copy_(other)
            layer.map.set(placement)
            if layer.loads is not None:
                layer.loads.zero_()
        self._torn = False


def _move(ep: Comm, layer: DividedExperts, new: Placement) -> Generator[Pending, None, int]:
    """Move every expert to its new place, in place, and set the layer's map.

    Return the number of experts received by the rank. Yields once per tensor.
    """
    steps = moves(layer.map.placement, new)
    # Both ends sort by (peer, number of the move), so rows arrive in the order of ``into``.
    out = sorted(
        (to, number, place) for number, (source, place, to, _) in enumerate(steps) if source == ep.rank
    )
    into = sorted(
        (source, number, place) for number, (source, _, to, place) in enumerate(steps) if to == ep.rank
    )
    sends = [sum(to == rank for to, _, _ in out) for rank in range(ep.size)]
    receives = [sum(source == rank for source, _, _ in into) for rank in range(ep.size)]
    for tensor in layer.moving():
        rows = tensor[torch.tensor([place for _, _, place in out], dtype=torch.int64, device=tensor.device)]
        pending = ep.all_to_all(rows, sends, receives)
        yield pending
        if into:
            places = torch.tensor([place for _, _, place in into], device=tensor.device)
            tensor[places] = pending.result().view(len(into), *tensor.shape[1:])
        else:
            pending.result()
    layer.map.set(new)
    return len(into)
