"""Run a single-threaded benchmark on a shared machine, with clocks that count the CPU time of this process.

python -m bench.cputime bench.speculation --model spool-mla --threads 1 --json FILE

Waiting for a core does not count. Contention for shared caches and memory still shows.
"""

from __future__ import annotations

import runpy
import sys
import time

from bench import record


def main() -> None:
    """Runs the module named by the first argument with the others."""
    if len(sys.argv) < 2 or "--threads" not in sys.argv:
        raise SystemExit("python -m bench.cputime MODULE --threads 1 ...")
    time.perf_counter = time.monotonic = time.process_time
    record.PREFIX = ("bench.cputime",)
    sys.argv = sys.argv[1:]
    runpy.run_module(sys.argv[0], run_name="__main__")


if __name__ == "__main__":
    main()
