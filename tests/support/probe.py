"""Report everything a process inherited from its parent: ``python -m tests.support.probe [ARGUMENTS]``.

The program reads standard input. The first argument decides the end: a status, the negative number of a
signal, or an error if not a number.
"""

from __future__ import annotations

import contextlib
import json
import os
import resource
import signal
import sys
import threading

from tests.support.forked import HIGH


def main() -> None:
    ignored = [int(n) for n in signal.valid_signals() if signal.getsignal(n) is signal.SIG_IGN]
    descriptors = []
    for number in range(HIGH):
        with contextlib.suppress(OSError):
            descriptors.append((number, os.get_inheritable(number)))
    found = {
        "name": __name__,
        "argv": sys.argv[1:],
        "original": sys.orig_argv[1:],
        "variables": dict(os.environ),
        "folder": os.getcwd(),
        "path": sys.path[0],
        "descriptors": descriptors,
        "ignored": ignored,
        "interrupted": signal.getsignal(signal.SIGINT) is signal.default_int_handler,
        "blocked": [int(n) for n in signal.pthread_sigmask(signal.SIG_BLOCK, ())],
        "limits": [resource.getrlimit(kind) for kind in (resource.RLIMIT_CORE, resource.RLIMIT_NOFILE)],
        "cores": sorted(os.sched_getaffinity(0)),
        "parent": os.getppid(),
        "leads": os.getsid(0) == os.getpid(),
        "threads": threading.active_count(),
        "thread": threading.main_thread().native_id == os.getpid(),
        "input": sys.stdin.read(),
        "buffered": [sys.stdout.line_buffering, sys.stderr.line_buffering],
        "encoding": [sys.stdin.encoding, sys.stdout.encoding, sys.stderr.errors],
    }
    print(json.dumps(found))
    status = int(sys.argv[1])
    if status < 0:
        sys.stdout.flush()
        os.kill(os.getpid(), -status)
    sys.exit(status)


if __name__ == "__main__":
    main()
