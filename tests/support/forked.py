"""In tests, processes of Weft begin as copies of a process that has imported everything.

``install`` makes ``subprocess.Popen`` start commands ``python -m weft...`` in this way, and some other
commands (``asked``). The process of a command is a child of the caller, with the arguments, environment,
folder, descriptors, signals, limits and exit of a new process (``tests/cli/test_forked.py``). Two things
differ: more modules are imported, and memory of modules is shared. Some tests of each command start real
processes (``real``, the marker ``real_processes``).

A *nursery* is a process of one thread that only makes copies of itself. Each copy becomes a command. Before
the copy starts a thread, the copy makes a nursery of its own for later commands. ``clone(2)`` with
CLONE_PARENT makes the copy a sibling of the nursery, so a child of the caller. In some cases a copy cannot be
like a new process: an option of the interpreter, another value of a variable that is read at import, or a
system other than Linux. Then a real process begins.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import fcntl
import gc
import importlib
import inspect
import json
import os
import platform
import resource
import runpy
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import types
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NoReturn

ROOT = Path(__file__).parents[2]
ROOTS = ("weft", "tests", "bench", "training")
"""Packages whose modules are commands of this repository."""
MAIN = "from weft.cli.main import main; main()"
"""The program of tests that start the command line with ``-c``."""
SCRIPTS = tuple(str(ROOT / name) for name in ("tests/front/fake_server.py", "tests/front/fake_engine.py"))
PRELOADED = (
    "torch.distributed",
    "weft.control.processes.engine_owner",
    "weft.control.processes.cluster_server",
    "weft.config.resolve",
    "weft.engine.server.engine_server",
    "weft.engine.rank",
    "weft.engine.start",
    "weft.front.front_server",
    "weft.cli.processes.front_main",
    "weft.cli.processes.engine_main",
    "weft.cli.main",
    "weft.cli.options",
    "weft.cli.processes.rank_main",
    "weft.cli.serve.serve",
    "weft.cli.serve.server",
    "weft.cli.serve.up",
    "weft.media.media_worker",
    "weft.overlap",
)
AT_IMPORT = (
    "CUDA_", "GOMP_", "HF_", "KMP_", "LANG", "LC_", "LD_", "MALLOC_", "MKL_", "NUMEXPR_", "OMP_", "OPENBLAS_",
    "PYTHON", "TOKENIZERS_", "TORCH", "TRITON", "TZ", "WEFT_",
)  # fmt: skip
"""Variables that a process may read as it begins: a copy has those of the first nursery, or there is none."""
FREE = ("PYTHONPATH", "GOMP_SPINCOUNT", "TORCHINDUCTOR_", "TORCH_NCCL_", "WEFT_API_KEY", "WEFT_ADMIN_KEY")
"""Variables among ``AT_IMPORT`` without an effect on a copy: the root is in the path, one thread waits for no
other, and there is no GPU.
"""
MOST = 1 << 18
HIGH = 700
"""Descriptors from here on are this module's: no process of a test has as many."""
_CLONE_PARENT, _CHILD_CLEARTID, _CHILD_SETTID = 0x8000, 0x200000, 0x1000000
_CLONE = {"x86_64": 56, "aarch64": 220}

NURSERY = "tests: nursery"
"""The title of nurseries."""
PATIENCE = 60.0
"""Seconds until a nursery that makes no copy is given up."""

_link: socket.socket | None = None
"""To this process's nursery."""
_nursery: subprocess.Popen[bytes] | None = None
"""The first one, in the process that started it."""
_failed = False
_lock = threading.Lock()
_real = 0
_Real = subprocess.Popen


@contextlib.contextmanager
def real() -> Iterator[None]:
    """Inside, this process starts real processes, which start real ones."""
    global _real
    _real += 1
    try:
        yield
    finally:
        _real -= 1


def install() -> None:
    """Has ``subprocess.Popen`` of this process start copies where it can."""
    if sys.platform == "linux" and platform.machine() in _CLONE:
        subprocess.Popen = Popen  # type: ignore[misc]


def asked(command: Any) -> list[str] | None:
    """The arguments of a Python command that a copy may become, without the interpreter; None for others."""
    if isinstance(command, str | bytes | os.PathLike) or not isinstance(command, Sequence):
        return None
    words = [os.fsdecode(word) for word in command]
    if len(words) < 2 or words[0] != sys.executable:
        return None
    if words[1] == "-m" and len(words) > 2 and words[2].split(".")[0] in ROOTS:
        return words[1:]
    if words[1:3] == ["-c", MAIN] or words[1] in SCRIPTS:
        return words[1:]
    return None


def read_at_import(variables: dict[str, str]) -> dict[str, str]:
    return {
        name: value
        for name, value in variables.items()
        if name.startswith(AT_IMPORT) and not name.startswith(FREE) and value
    }


_NAMES = tuple(inspect.signature(_Real._execute_child).parameters)[1:]  # type: ignore[attr-defined]
_ORDINARY = {
    "executable": None, "preexec_fn": None, "close_fds": True, "startupinfo": None, "creationflags": 0,
    "shell": False, "restore_signals": True, "gid": None, "gids": None, "uid": None, "umask": -1,
    "process_group": -1,
}  # fmt: skip


class Popen(_Real):  # type: ignore[type-arg]
    """``subprocess.Popen``; commands of Weft begin as copies."""

    def _execute_child(self, *values: Any) -> None:
        given = dict(zip(_NAMES, values, strict=True))
        words = asked(given["args"])
        if (
            words is None
            or _real
            or any(given.get(name, value) != value for name, value in _ORDINARY.items())
        ):
            return super()._execute_child(*values)  # type: ignore
        ends = [given["p2cread"], given["c2pwrite"], given["errwrite"]]
        with contextlib.ExitStack() as opened:
            for number, end in enumerate(ends):
                if end == -1:
                    ends[number] = _inherited(number, opened)
            targets = [0, 1, 2, *map(int, given["pass_fds"])]
            pid = _ask(words, given["env"], given["cwd"], given["start_new_session"], ends, targets)
        if pid is None:
            return super()._execute_child(*values)  # type: ignore[misc,no-any-return]
        self.pid = pid
        self._child_created = True
        names = ("p2cread", "p2cwrite", "c2pread", "c2pwrite", "errread", "errwrite")
        self._close_pipe_fds(*(given[name] for name in names))  # type: ignore[attr-defined]
        return None


def _inherited(number: int, opened: contextlib.ExitStack) -> int:
    """A standard descriptor that a child would share; nothing where there is none."""
    with contextlib.suppress(OSError):
        if os.get_inheritable(number):
            return number
    nothing = os.open(os.devnull, os.O_RDWR)
    opened.callback(os.close, nothing)
    return nothing


def _ask(
    words: list[str], variables: Any, folder: Any, session: bool, ends: list[int], targets: list[int]
) -> int | None:
    """The process id of a copy that becomes the command ``words``; None where none can."""
    own = {
        os.fsdecode(k): os.fsdecode(v) for k, v in (os.environ if variables is None else variables).items()
    }
    if own.get("PYTHONPATH", str(ROOT)) != str(ROOT):
        return None
    with _lock:
        if _link is None and not _failed:
            _first()
        if _link is None or read_at_import(own) != read_at_import(_begun):
            return None
        request = {
            "words": words,
            "env": own,
            "cwd": os.fspath(folder) if folder is not None else os.getcwd(),
            "session": session,
            "targets": targets,
            "blocked": [int(n) for n in signal.pthread_sigmask(signal.SIG_BLOCK, ())],
            "ignored": [int(n) for n in signal.valid_signals() if signal.getsignal(n) is signal.SIG_IGN],
            "cores": list(os.sched_getaffinity(0)),
            "limits": [
                [kind, resource.getrlimit(kind)] for kind in (resource.RLIMIT_CORE, resource.RLIMIT_NOFILE)
            ],
        }
        try:
            socket.send_fds(_link, [json.dumps(request).encode()], [*ends, *targets[3:]])
            return int(_link.recv(64))
        except (OSError, ValueError):  # the nursery was killed, e.g. with its process group
            _give_up()
            return None


_begun: dict[str, str] = {}
"""The environment of the first nursery."""


def _give_up() -> None:
    global _link, _failed
    if _link is not None:
        _link.close()
    _link, _failed = None, True


def _first() -> None:
    """Starts the first nursery, of a process that no nursery made."""
    global _link, _nursery
    theirs, ours = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    _begun.update(os.environ)
    _begun.update(OMP_NUM_THREADS="1", HF_HUB_OFFLINE="1", PYTHONPATH=str(ROOT))
    with theirs, _null() as null:
        command = [sys.executable, "-m", "tests.support.forked", str(theirs.fileno())]
        _nursery = _Real(command, env=_begun, cwd=ROOT, stdin=null, stdout=null, pass_fds=[theirs.fileno()])
    ours.settimeout(PATIENCE)
    _link = ours


@contextlib.contextmanager
def _null() -> Iterator[int]:
    number = os.open(os.devnull, os.O_RDWR)
    try:
        yield number
    finally:
        os.close(number)


class _Library:
    """``clone(2)`` as the C library's fork would call it. Called in a process of one thread."""

    def __init__(self) -> None:
        self._call = ctypes.PyDLL(None).syscall  # it keeps Python's lock
        self._call.restype = ctypes.c_long
        self._number = _CLONE[platform.machine()]
        self._place = self._thread_id()

    def _thread_id(self) -> int:
        """Where the C library keeps the main thread's id: the kernel is to write a copy's there."""
        itself = ctypes.PyDLL(None).pthread_self
        itself.restype = ctypes.c_size_t
        start = itself()
        found = [
            place
            for place in range(start, start + 1024, 4)
            if ctypes.c_int.from_address(place).value == os.getpid()
        ]
        assert len(found) == 1, "the C library's thread id was not found"
        return found[0]

    def clone(self) -> int:
        """Like ``os.fork``, but the copy is a sibling."""
        flags = _CLONE_PARENT | _CHILD_CLEARTID | _CHILD_SETTID | signal.SIGCHLD
        place = (self._place, 0) if platform.machine() == "x86_64" else (0, self._place)
        python = ctypes.pythonapi
        python.PyOS_BeforeFork()
        pid: int = self._call(*(ctypes.c_long(value) for value in (self._number, flags, 0, 0, *place)))
        if pid == 0:
            python.PyOS_AfterFork_Child()
        else:
            python.PyOS_AfterFork_Parent()
        return pid


def _one_thread() -> bool:
    return len(os.listdir("/proc/self/task")) == 1


def _tend(link: socket.socket, library: _Library) -> tuple[dict[str, Any], list[int]]:
    """Makes copies until nobody can ask for more. Returns in a copy, with what it is to become."""
    while True:
        data, descriptors, _, _ = socket.recv_fds(link, MOST, 64)
        if not data:
            os._exit(0)
        pid = library.clone()
        if pid == 0:
            link.close()
            return json.loads(data), descriptors
        for descriptor in descriptors:
            os.close(descriptor)
        link.send(str(max(pid, 0)).encode())


def _settle(request: dict[str, Any], descriptors: list[int]) -> None:
    """Gives this copy what the command's process would inherit."""
    if request["session"]:
        os.setsid()
    high = [fcntl.fcntl(descriptor, fcntl.F_DUPFD_CLOEXEC, HIGH) for descriptor in descriptors]
    for descriptor in descriptors:
        os.close(descriptor)
    for descriptor, target in zip(high, request["targets"], strict=True):
        os.dup2(descriptor, target)
        os.close(descriptor)
    for number in signal.valid_signals():
        with contextlib.suppress(OSError, ValueError):  # SIGKILL, SIGSTOP
            signal.signal(number, signal.SIG_IGN if number in request["ignored"] else signal.SIG_DFL)
    signal.signal(signal.SIGPIPE, signal.SIG_IGN)
    if signal.SIGINT not in request["ignored"]:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.pthread_sigmask(signal.SIG_SETMASK, request["blocked"])
    os.sched_setaffinity(0, request["cores"])
    for kind, limit in request["limits"]:
        resource.setrlimit(kind, tuple(limit))
    os.chdir(request["cwd"])
    os.environ.clear()
    os.environ.update(request["env"])
    tempfile.tempdir = None
    threading.main_thread()._set_native_id()  # type: ignore[attr-defined]


def _become(words: list[str]) -> NoReturn:
    """Runs the command, and ends the process in an interpreter's order.

    But what the interpreter would free is left to the kernel: it is the memory that all copies share.
    """
    status = 0
    try:
        _run(words)
    except SystemExit as error:
        status = error.code if isinstance(error.code, int) else int(error.code is not None)
        if error.code is not None and not isinstance(error.code, int):
            print(error.code, file=sys.stderr)
    except KeyboardInterrupt:
        sys.excepthook(*sys.exc_info())  # type: ignore[arg-type]
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        os.kill(os.getpid(), signal.SIGINT)
    except BaseException:
        sys.excepthook(*sys.exc_info())  # type: ignore[arg-type]
        status = 1
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):
            stream.flush()
    os._exit(status & 0xFF)


def _run(words: list[str]) -> None:
    from setproctitle import setproctitle

    setproctitle(" ".join((sys.executable, *words)))
    sys.orig_argv = [sys.executable, *words]
    main = types.ModuleType("__main__")
    sys.modules["__main__"] = main
    option, named, *rest = words if words[0].startswith("-") else ("", *words)
    sys.argv = [named if option != "-c" else "-c", *rest]
    sys.path[0] = {"-m": os.getcwd(), "-c": ""}.get(option, str(Path(named).parent))
    if option == "-m":
        sys.modules.pop(named, None)  # the module runs as __main__; an import gets another copy
        runpy._run_module_as_main(named)  # type: ignore[attr-defined]
    elif option == "-c":
        exec(compile(named, "<string>", "exec"), main.__dict__)
    else:
        runpy.run_path(named, run_name="__main__")


def _live(link: socket.socket) -> NoReturn:
    """The first nursery; and each copy's life, and each nursery's of a copy."""
    global _link
    _begun.update(os.environ)
    library = _Library()
    while True:
        request, descriptors = _tend(link, library)
        if request["session"]:
            os.setsid()
            request["session"] = False  # its nursery is in it, too
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        if os.fork():
            theirs.close()
            _link = socket.socket(fileno=fcntl.fcntl(ours.fileno(), fcntl.F_DUPFD_CLOEXEC, HIGH))
            _link.settimeout(PATIENCE)
            ours.close()
            _settle(request, descriptors)
            _become(request["words"])
        ours.close()
        for descriptor in descriptors:
            os.close(descriptor)
        link = theirs


def _serve(descriptor: int) -> None:
    """The first nursery's process."""
    from setproctitle import setproctitle

    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT, signal.SIGUSR1):
        signal.signal(number, signal.SIG_IGN)  # they are for a process group's commands
    setproctitle(NURSERY)
    for name in PRELOADED:
        importlib.import_module(name)
    gc.collect()
    gc.freeze()
    assert _one_thread(), "a module started a thread"
    _live(socket.socket(fileno=descriptor))


if __name__ == "__main__":
    from tests.support import forked  # the copies' modules know it by this name

    forked.install()
    forked._serve(int(sys.argv[1]))
