"""The stored state of a fleet, also of another release of Weft."""

from __future__ import annotations

import msgspec

from weft.on_ray.plans import Kept


def read_stored(data: bytes, secret: str, server: str) -> tuple[Kept, bool]:
    """Return the state in ``data`` (msgpack of ``Kept``), and True if ``data`` can be decoded.

    ``secret``: for a state without a readable secret.

    In place of a state that cannot be decoded, return a state without groups, and with a note for operators.
    The secret and the model of the old state count on, if readable: API servers still reach the engines that
    drain, and the name still belongs to the model.
    """
    try:
        return msgspec.msgpack.decode(data, type=Kept), True
    except msgspec.DecodeError as error:
        made = Kept(
            secret=_text(data, "secret") or secret,
            model=_text(data, "model"),
            # There may be placement groups of the old state.
            several_hosts=True,
            note=(
                f"the stored state of server {server} is of another release of Weft and cannot be read "
                f"({error}): all its groups drain and end. Run `weft up FILE --on ray` again to start the "
                "groups of FILE, and repeat orders such as `weft scale`. `weft up FILE --on ray --stop` "
                "removes the old state"
            ),
        )
        return made, False


def _text(data: bytes, name: str) -> str:
    """Return a text field of a stored state; "" without a readable field."""
    try:
        fields = msgspec.msgpack.decode(data, type=dict[str, msgspec.Raw])
        return msgspec.msgpack.decode(fields[name], type=str)
    except (msgspec.DecodeError, KeyError):
        return ""
