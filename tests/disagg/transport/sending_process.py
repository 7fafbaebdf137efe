"""A sender's rank as a process of its own: python -m tests.disagg.transport.sending_process KIND FOLDER

Reads the answers of the receiver's head, in hex, from standard input, and pushes: the first layer of a room
when its Bound comes, the rest of it at the next line. Says "half" and then how the room ended.
"""

from __future__ import annotations

import sys
from pathlib import Path

from tests.disagg.transport.rig import Pair
from weft.types import transfer as r


def main() -> None:
    pair = Pair(sys.argv[1], Path(sys.argv[2]), kinds=("full", "state"), receivers=False)
    while line := sys.stdin.readline().strip():
        bound = r.decode(bytes.fromhex(line))
        assert isinstance(bound, r.Bound)
        pair.push(bound)
        rank = pair.senders[0]
        rank.transfer.computed(bound.key, (1,), pair.start, pair.end)
        print("half", flush=True)
        sys.stdin.readline()
        rank.transfer.computed(bound.key, (2,), pair.start, pair.end)
        print(rank.wait(bound.key).outcome.name, flush=True)
        rank.transfer.stop(bound.key)
    pair.close()


if __name__ == "__main__":
    main()
