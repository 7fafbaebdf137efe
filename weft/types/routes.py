"""Routes: the experts that each routed layer chose for each token.

Layers are counted over routed layers only (``MoESpec.layers``). The experts of a token are in the order of
the router: weight descending.
"""

from __future__ import annotations

import msgspec
import numpy as np

from weft.common.errors import InvalidRequest

_IDS = "<u2"


class RouteShape(msgspec.Struct, frozen=True, kw_only=True):
    """Size of the routes of a model."""

    layers: int
    top_k: int
    experts: int

    @property
    def dtype(self) -> np.dtype:
        """Smallest dtype of an expert's id: uint8 or uint16."""
        return np.dtype("u1" if self.experts <= 256 else _IDS)

    @property
    def nbytes(self) -> int:
        """Bytes of ``Routes`` per token."""
        return 2 * self.layers * self.top_k


class Routes(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Routes of consecutive positions of one sequence."""

    start: int
    """First position, in prompt and output together."""
    layers: int
    top_k: int
    ids: bytes
    """uint16 [positions, layers, top_k], little-endian."""

    @property
    def positions(self) -> int:
        return len(self.ids) // self._each

    @property
    def end(self) -> int:
        """The position after the last position."""
        return self.start + self.positions

    @property
    def _each(self) -> int:
        return 2 * self.layers * self.top_k

    @classmethod
    def of(cls, ids: np.ndarray, start: int = 0) -> Routes:
        """Return the routes of an integer array [positions, layers, top_k]. Raises InvalidRequest for other
        arrays."""
        if ids.ndim != 3 or ids.dtype.kind not in "iu" or not ids.size:
            raise InvalidRequest(
                "force_routed_experts must be integers of the shape [tokens, layers, experts per token]",
                param="force_routed_experts",
            )
        if ids.min() < 0 or ids.max() > np.iinfo(_IDS).max:
            raise InvalidRequest(
                f"force_routed_experts has an expert outside 0 to {np.iinfo(_IDS).max}",
                param="force_routed_experts",
            )
        return cls(start=start, layers=ids.shape[1], top_k=ids.shape[2], ids=ids.astype(_IDS).tobytes())

    def array(self) -> np.ndarray:
        """Return uint16 [positions, layers, top_k]."""
        return np.frombuffer(self.ids, _IDS).reshape(-1, self.layers, self.top_k)

    def part(self, begin: int, end: int) -> Routes | None:
        """Return the routes of positions ``begin`` .. ``end - 1``, as far as present; None without any."""
        begin, end = max(begin, self.start), min(end, self.end)
        if begin >= end:
            return None
        cut = self.ids[(begin - self.start) * self._each : (end - self.start) * self._each]
        return msgspec.structs.replace(self, start=begin, ids=cut)

    def check(self, shape: RouteShape | None, most: int) -> None:
        """Raise InvalidRequest unless the routes can replace the choice of a model's router.

        ``shape``: routes of the model, None without routed experts. ``most``: maximum tokens of a sequence.
        """
        # Clients send the routes, so each check protects the kernels from ids or sizes out of range.
        param = "force_routed_experts"
        if shape is None:
            raise InvalidRequest("this model has no routed experts to force", param=param)
        if self._each <= 0 or len(self.ids) % self._each:
            raise InvalidRequest("the size of force_routed_experts does not fit its shape", param=param)
        if (self.layers, self.top_k) != (shape.layers, shape.top_k):
            raise InvalidRequest(
                f"force_routed_experts has the shape [tokens, {self.layers}, {self.top_k}]; this model needs "
                f"[tokens, {shape.layers}, {shape.top_k}]",
                param=param,
            )
        if self.start or not 0 < self.positions <= most:
            raise InvalidRequest(
                f"force_routed_experts must have routes of the first 1 to {most} tokens", param=param
            )
        ids = self.array()
        if int(ids.max()) >= shape.experts:
            raise InvalidRequest(
                f"force_routed_experts has expert {int(ids.max())}; this model has experts 0 to "
                f"{shape.experts - 1}",
                param=param,
            )
        ordered = np.sort(ids, axis=2)
        if (ordered[:, :, 1:] == ordered[:, :, :-1]).any():
            raise InvalidRequest(
                "force_routed_experts has a token with the same expert twice in a layer", param=param
            )


def check_routes(start: int, forced: Routes | None, known: int, shape: RouteShape | None, most: int) -> None:
    """Raise InvalidRequest, with the name of the parameter, if a model cannot report or force the routes.

    ``start``: first reported position, -1 for none; also in the output if the sequence continues. ``known``:
    tokens of the prompt and of the output so far. ``shape``, ``most``: see ``Routes.check``.
    """
    if start >= 0 and shape is None:
        raise InvalidRequest(
            "this model has no routed experts to report; leave out return_routed_experts",
            param="return_routed_experts",
        )
    if not -1 <= start < known:
        raise InvalidRequest(
            "routed_experts_prompt_start must be less than the number of prompt tokens",
            param="routed_experts_prompt_start",
        )
    if forced is not None:
        forced.check(shape, most)


def joined(pieces: list[Routes]) -> Routes | None:
    """Return consecutive routes as one; None for none."""
    if len(pieces) < 2:
        return pieces[0] if pieces else None
    return msgspec.structs.replace(pieces[0], ids=b"".join(piece.ids for piece in pieces))
