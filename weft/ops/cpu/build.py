"""Compiles ``csrc/*.cpp`` to one shared library, and finds it again. No torch is imported.

    <cache>/<base>-<compiler>/libweft_cpu.so     cache: ~/.cache/weft/ops, or WEFT_OPS_CACHE
             |      └ hash of the compiler's version
             └ hash of: torch's version, the CPU's flags, sources, compiler flags
    <cache>/objects/<hash>.o                     reused while their source, headers and compiler are the same
    <cache>/lock                                 held while building

A library appears under its name in one step, complete. Looking for one asks for the base alone, so that a
machine without a compiler can use what was built elsewhere for the same CPU; the newest of a base is taken.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import importlib.metadata
import importlib.util
import os
import platform
import re
import shutil
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass
from pathlib import Path

from weft.common import env
from weft.common.errors import WeftError
from weft.common.measurements import cache_folder

SOURCES = Path(__file__).parent / "csrc"
LIBRARY = "libweft_cpu.so"

#: -ffp-contract=off: sources say where a product and a sum are fused, and the compiler adds none.
FLAGS = (
    "-std=c++20",
    "-O3",
    "-march=native",
    "-fopenmp",
    "-fPIC",
    "-fvisibility=hidden",
    "-ffp-contract=off",
    "-fno-math-errno",
    "-fno-trapping-math",
    "-Wall",
    "-Wno-unknown-pragmas",
    "-DAT_PARALLEL_OPENMP=1",
    "-D_GLIBCXX_USE_CXX11_ABI=1",
)
_COMPILERS = ("g++", "c++", "clang++")
_INCLUDE = re.compile(r'^#include "([^"]+)"', re.MULTILINE)
_KEEP_DAYS = 30
_LAST_LINES = 30

Say = Callable[[str], None]


class BuildError(WeftError):
    """The C++ operations can't be built here; ``output`` holds the compiler's last lines, if it ran."""

    code = "build_failed"

    def __init__(self, message: str, output: str = "") -> None:
        super().__init__(message)
        self.output = output


@dataclass(frozen=True, slots=True, kw_only=True)
class Compiler:
    """A C++ compiler and what it says its version is."""

    path: str
    version: str


def find() -> Path | None:
    """The newest library built from these sources for this torch and CPU, or None.

    Only one that this user or root made: what it holds will run in this process. Raises OSError.
    """
    made = {}
    for path in cache_folder().glob(f"{base_key()}-*/{LIBRARY}"):
        with contextlib.suppress(FileNotFoundError):  # another process tidies up
            file, folder = path.stat(), path.parent.stat()
            if {file.st_uid, folder.st_uid} <= {0, os.geteuid()}:
                made[path] = file.st_mtime
    return max(made, key=lambda path: made[path], default=None)


def find_compiler() -> Compiler:
    """CXX if set, else the first of g++, c++ and clang++ on PATH. Raises BuildError."""
    named = env.get("CXX")
    for name in (named,) if named else _COMPILERS:
        path = shutil.which(name)
        if path is None:
            continue
        ran = subprocess.run([path, "--version"], capture_output=True, text=True, check=False)
        if ran.returncode == 0:
            return Compiler(path=path, version=ran.stdout.splitlines()[0] if ran.stdout else name)
    looked = f"{named!r} (CXX)" if named else ", ".join(_COMPILERS)
    raise BuildError(
        f"no C++ compiler found (looked for {looked}); install one, for instance with "
        "`apt-get install g++`, or set CXX"
    )


def base_key() -> str:
    """What a library depends on, but for the compiler."""
    digest = hashlib.sha256()
    for part in (_machine(), *FLAGS):
        digest.update(part.encode() + b"\0")
    for source in sorted(SOURCES.iterdir()):
        if source.suffix in (".cpp", ".h"):
            digest.update(source.name.encode() + b"\0" + source.read_bytes() + b"\0")
    return digest.hexdigest()[:16]


def _machine() -> str:
    """torch's version, the architecture and the CPU's features (what -march=native looks at)."""
    features = ""
    with contextlib.suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.split(":")[0].strip() in ("flags", "Features"):
                features = " ".join(sorted(line.split(":")[1].split()))
                break
    return f"torch {importlib.metadata.version('torch')} {platform.machine()} {features}"


def build(*, force: bool = False, verbose: bool = False, say: Say = lambda line: None) -> Path:
    """Builds the library unless it is there, and returns its path.

    ``force`` compiles everything again. ``say`` gets lines of progress. Raises BuildError. Processes that
    build at the same time wait for the first, and find its library.
    """
    compiler = find_compiler()
    cache = cache_folder()
    cache.mkdir(parents=True, exist_ok=True)
    with _lock(cache, say):
        key = base_key()
        target = cache / f"{key}-{_hash(compiler.version)}" / LIBRARY
        if target.exists() and not force:
            say("the C++ operations are built already")
            return target
        began = time.monotonic()
        objects = _compile_all(compiler, cache / "objects", force, verbose, say)
        _link(compiler, objects, target, verbose, say)
        _prune(cache, target)
        say(f"built the C++ operations in {time.monotonic() - began:.0f} s")
        return target


@contextlib.contextmanager
def _lock(cache: Path, say: Say) -> Iterator[None]:
    with (cache / "lock").open("w") as handle:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            say("another process is building the C++ operations: waiting for it")
            fcntl.flock(handle, fcntl.LOCK_EX)
        yield


def _hash(*parts: str) -> str:
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()[:16]


def _torch_folder() -> Path:
    spec = importlib.util.find_spec("torch")
    if spec is None or spec.origin is None:
        raise BuildError("torch is not installed, and the C++ operations are built against it")
    folder = Path(spec.origin).parent
    if not (folder / "include" / "ATen").is_dir():
        raise BuildError("this installation of torch has no C++ headers; install its published wheel")
    return folder


def _compile_all(compiler: Compiler, folder: Path, force: bool, verbose: bool, say: Say) -> list[Path]:
    """Objects of all sources, in the order of their names; as many compilers at a time as there are CPUs."""
    folder.mkdir(parents=True, exist_ok=True)
    include = _torch_folder() / "include"
    flags = [*FLAGS, "-isystem", str(include), "-isystem", str(include / "torch/csrc/api/include")]
    sources = sorted(SOURCES.glob("*.cpp"))
    objects = [
        folder / f"{_hash(compiler.version, _machine(), *flags, *_with_headers(source))}.o"
        for source in sources
    ]
    missing = [pair for pair in zip(sources, objects, strict=True) if force or not pair[1].exists()]
    if missing:
        say(f"compiling {len(missing)} files with {compiler.version}; this takes about half a minute")
    with ThreadPoolExecutor(max_workers=os.cpu_count() or 1) as pool:
        running = {
            pool.submit(_compile, compiler, flags, source, made, verbose, say): source
            for source, made in missing
        }
        for number, done in enumerate(as_completed(running), 1):
            done.result()
            say(f"  {number}/{len(missing)} {running[done].name}")
    for made in objects:
        os.utime(made)
    return objects


def _with_headers(source: Path) -> list[str]:
    """The text of a source and of the headers of ours that it includes, directly or not."""
    texts: dict[str, str] = {}
    wanted = [source.name]
    while wanted:
        name = wanted.pop()
        if name not in texts:
            texts[name] = (SOURCES / name).read_text()
            wanted += _INCLUDE.findall(texts[name])
    return [texts[name] for name in sorted(texts)]


def _compile(compiler: Compiler, flags: list[str], source: Path, made: Path, verbose: bool, say: Say) -> None:
    with _temporary(made) as partial:
        command = [compiler.path, *flags, "-c", str(source), "-o", str(partial)]
        _run(command, f"{source.name} does not compile", verbose, say)


def _link(compiler: Compiler, objects: list[Path], target: Path, verbose: bool, say: Say) -> None:
    """Links against torch's own OpenMP runtime: two in one process would each start their threads."""
    library = _torch_folder() / "lib"
    openmp = sorted([*library.glob("libgomp*.so*"), *library.parent.with_name("torch.libs").glob("libgomp*")])
    target.parent.mkdir(parents=True, exist_ok=True)
    with _temporary(target) as partial:
        command = [compiler.path, "-shared", *map(str, objects), "-o", str(partial), f"-L{library}"]
        command += ["-ltorch", "-ltorch_cpu", "-lc10", str(openmp[0]) if openmp else "-lgomp"]
        _run(command, "the C++ operations do not link", verbose, say)


@contextlib.contextmanager
def _temporary(target: Path) -> Iterator[Path]:
    """A file beside ``target`` that takes its name when the block ends well, and is removed otherwise."""
    with tempfile.TemporaryDirectory(dir=target.parent, prefix="partial-") as folder:
        partial = Path(folder) / target.name
        yield partial
        partial.replace(target)


def _run(command: list[str], failure: str, verbose: bool, say: Say) -> None:
    if verbose:
        say(" ".join(command))
    ran = subprocess.run(command, capture_output=True, text=True, check=False)
    output = (ran.stdout + ran.stderr).strip()
    if ran.returncode != 0:
        raise BuildError(failure, "\n".join(output.splitlines()[-_LAST_LINES:]))
    if verbose and output:
        say(output)


def _prune(cache: Path, keep: Path) -> None:
    """Removes what no build has touched for a month. A process that has it loaded keeps it."""
    oldest = time.time() - _KEEP_DAYS * 86400
    for path in [*cache.glob(f"*-*/{LIBRARY}"), *cache.glob("objects/*.o")]:
        with contextlib.suppress(OSError):
            if path != keep and path.stat().st_mtime < oldest:
                path.unlink()
                if path.name == LIBRARY:
                    path.parent.rmdir()
