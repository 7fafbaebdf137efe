"""Entry point of a receiver of new weights: ``python -m weft.cli.processes.receiver_main PARENT LINK``.

LINK is the descriptor of a socket to the engine. The setup arrives on standard input, as msgpack.
"""

from __future__ import annotations

import socket

from weft.cli.processes import child
from weft.common.title import set_title


def run(arguments: list[str]) -> int:
    """Receive weights until the engine closes the link. Return the exit status 0."""
    parent, descriptor = arguments
    child.begin(int(parent))
    from weft.engine.weights.receiver import ReceiverSetup, serve  # imports torch

    setup = child.read_setup(ReceiverSetup)
    set_title(f"receiver {setup.rank} of weights")
    with socket.socket(fileno=int(descriptor)) as link:
        serve(link, setup)
    return 0


if __name__ == "__main__":
    child.end_after(run)
