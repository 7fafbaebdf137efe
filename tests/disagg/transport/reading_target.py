"""A process with memory that another process reads: python -m tests.disagg.transport.reading_target NAME

Prints the engine's metadata in hex and the address of 1 MiB of memory, all bytes 7. Ends with standard input.
"""

from __future__ import annotations

import sys

import torch

from weft.disagg.transport.read_engine import NixlEngine, segment_of

BYTES = 1 << 20


def main() -> None:
    memory = torch.full((BYTES,), 7, dtype=torch.uint8)
    engine = NixlEngine(sys.argv[1])
    engine.register([segment_of(memory)])
    print(engine.metadata().hex(), memory.data_ptr(), flush=True)
    sys.stdin.readline()
    engine.close()


if __name__ == "__main__":
    main()
