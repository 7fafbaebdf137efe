"""Build of ``csrc/*.cpp`` as one shared library, and lookup of built libraries. Imports no torch.

    <cache>/<base>-<compiler>/libweft_cpu.so     cache: ~/.cache/weft/ops, or WEFT_OPS_CACHE
             |      └ hash of the compiler's version
             └ hash of: torch's version, the CPU's flags, sources, compiler flags
    <cache>/objects/<hash>.o                     reused while their source, headers and compiler are the same
    <cache>/lock                                 held while building

A library appears under its name atomically and complete. A lookup uses only the base, so a machine without a
compiler can use a build from elsewhere for the same CPU. The newest library of a base wins.
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
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from weft.common import env
from weft.common.cores import usable_cores
from weft.common.measurements import cache_folder
from weft.config.devices import available_memory
from weft.ops.cpu import compilers, prebuilt
from weft.ops.cpu.compilers import BuildError, CompilerReport, Say, compile_files, precompiled, run
from weft.ops.cpu.prebuilt import LIBRARY

SOURCES = Path(__file__).parent / "csrc"

# -ffp-contract=off: the sources fuse products and sums explicitly, and the compiler must not add more.
# -DNDEBUG: as in torch's release builds. Debug checks of torch's headers would bring streams (csrc/check.h).
FLAGS = (
    "-std=c++20",
    "-O3",
    "-fopenmp",
    "-fPIC",
    "-fvisibility=hidden",
    "-ffp-contract=off",
    "-fno-math-errno",
    "-fno-trapping-math",
    "-Wall",
    "-Wno-unknown-pragmas",
    "-DNDEBUG",
    "-DAT_PARALLEL_OPENMP=1",
    "-D_GLIBCXX_USE_CXX11_ABI=1",
)
NATIVE = ("-march=native", *(prebuilt.ARM_FLAGS if platform.machine() == "aarch64" else ()))
"""Flags for the CPU of the compiling machine. A wheel uses `prebuilt.LEVELS`."""
_COMPILERS = ("g++", "c++", "clang++")
_INCLUDE = re.compile(r'^#include "([^"]+)"', re.MULTILINE)
_KEEP_DAYS = 30

SECONDS = {
    "library.cpp": 13,
    "latent.cpp": 9,
    "moe.cpp": 7.5,
    "coded.cpp": 5.5,
    "gemm.cpp": 4.5,
    "mamba1.cpp": 4.5,
    "sparse.cpp": 4,
    "attention.cpp": 4,
    "delta.cpp": 4,
    "mamba.cpp": 4,
    "low_rank.cpp": 3,
    "attend_engines.cpp": 2,
    "sampling.cpp": 2,
    "fused.cpp": 2,
    "coded_pack.cpp": 1.5,
    "collectives.cpp": 1.5,
    "compress.cpp": 1,
    "crew.cpp": 0.5,
    "transfer.cpp": 0.5,
}
"""Estimated CPU seconds of each file with g++ 12 on an EPYC with AVX2. The slowest files are compiled first.
Torch's headers take 7 s of library.cpp; no other file includes torch's headers."""
COMPILER_BYTES = 1 << 30
"""Memory per compiler in bytes. The highest measured use was 0.8 GB."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CppCompiler:
    """A C++ compiler, and the first line of its version output."""

    path: str
    version: str


def find() -> Path | None:
    """Return the newest library of the present sources, torch and CPU, or the wheel's library, or None.

    Ignores libraries in the cache that belong to other users (except root), because the library is loaded
    into the process. Raises OSError, and ConfigError for a bad WEFT_CPU_LEVEL.
    """
    made = {}
    sources = sources_digest()
    for path in cache_folder().glob(f"{base_key(sources)}-*/{LIBRARY}"):
        with contextlib.suppress(FileNotFoundError):  # another process may delete it now
            file = path.stat()
            folder = path.parent.stat()
            # Both owners count: the owner of the folder could replace the file.
            if {file.st_uid, folder.st_uid} <= {0, os.geteuid()}:
                made[path] = file.st_mtime
    if made:
        return max(made, key=lambda path: made[path])
    return prebuilt.find(sources)


def find_compiler() -> CppCompiler:
    """Return CXX if set, otherwise the first of g++, c++ and clang++ on PATH.

    Starts each candidate once for its version. Raises BuildError without a working compiler.
    """
    named = env.get("CXX")
    for name in (named,) if named else _COMPILERS:
        path = shutil.which(name)
        if path is None:
            continue
        ran = subprocess.run([path, "--version"], capture_output=True, text=True, check=False)
        if ran.returncode == 0:
            return CppCompiler(path=path, version=ran.stdout.splitlines()[0] if ran.stdout else name)
    looked = f"{named!r} (CXX)" if named else ", ".join(_COMPILERS)
    raise BuildError(
        f"no C++ compiler found (looked for {looked}); install one, for instance with "
        "`apt-get install g++`, or set CXX"
    )


def base_key(sources: str) -> str:
    """Return the hash of everything on which a library of ``sources`` depends, except the compiler."""
    digest = hashlib.sha256()
    target = _target()
    for part in (_machine(target), sources, *FLAGS, *target):
        digest.update(part.encode() + b"\0")
    return digest.hexdigest()[:16]


def sources_digest() -> str:
    """Return the hash of the names and contents of all files in ``csrc``."""
    digest = hashlib.sha256()
    for source in sorted(SOURCES.iterdir()):
        if source.suffix in (".cpp", ".h"):
            digest.update(source.name.encode() + b"\0" + source.read_bytes() + b"\0")
    return digest.hexdigest()[:16]


def _target() -> Sequence[str]:
    """Return the compiler's flags for the target CPU: this CPU, or the forced level of CPUs."""
    level = prebuilt.forced_level()
    return (*NATIVE, *prebuilt.native_flags()) if level is None else level.flags


def _machine(target: Sequence[str]) -> str:
    """Return the dependencies of machine code for ``target`` besides the flags.

    Always torch's version. For `NATIVE` also the architecture and the CPU's features, because the compiler
    reads the features from the CPU.
    """
    torch = f"torch {importlib.metadata.version('torch')}"
    if NATIVE[0] not in target:
        return torch
    return f"{torch} {platform.machine()} {' '.join(sorted(prebuilt.cpu_features()))}"


def build(
    *,
    force: bool = False,
    verbose: bool = False,
    say: Say = lambda line: None,
    show: Say | None = None,
) -> Path:
    """Build the library if missing, and return its path in the cache.

    ``force`` compiles everything again. Otherwise a suitable library of the wheel is returned without a
    build. ``say`` receives lines of progress. ``show``, if given, repeatedly receives a status line in place
    of the previous line. Libraries and objects unused for a month are removed after a build. Concurrent
    builds wait for the first build and return its library. Raises BuildError.
    """
    compiler = find_compiler()
    cache = cache_folder()
    cache.mkdir(parents=True, exist_ok=True)
    with _lock(cache, say):
        sources = sources_digest()
        key = base_key(sources)
        target = cache / f"{key}-{_hash(compiler.version)}" / LIBRARY
        if target.exists() and not force:
            say("the C++ operations are built already")
            return target
        # A suitable library of the wheel makes compiling unnecessary.
        ready = None if force else prebuilt.find(sources)
        if ready is not None:
            say(
                f"the installed wheel has the C++ operations for this CPU ({ready.parent.name}); "
                "--force compiles them anyway"
            )
            return ready
        began = time.monotonic()
        _sweep(cache)
        report = CompilerReport(say, show)
        objects = _compile_all(compiler, _target(), cache / "objects", force, verbose, report)
        _link(compiler, objects, target, verbose, say)
        _prune(cache, target)
        say(f"built the C++ operations in {time.monotonic() - began:.0f} s")
        return target


def build_for_wheel(
    folder: Path, *, verbose: bool = False, say: Say = lambda line: None, show: Say | None = None
) -> str:
    """Build a library for each of `prebuilt.levels_here` into ``folder``, write the manifest, and return the
    wheel's platform tag.

    ``verbose``, ``say`` and ``show``: see `build`. Objects stay in the cache. Waits for other builds. Raises
    BuildError and OSError.
    """
    levels = prebuilt.levels_here()
    if not levels:
        raise BuildError(f"wheels are for x86-64 and aarch64, and this machine is {platform.machine()}")
    compiler = find_compiler()
    sources = sources_digest()
    cache = cache_folder()
    cache.mkdir(parents=True, exist_ok=True)
    made = []
    with _lock(cache, say):
        _sweep(cache)
        for level in levels:
            say(f"for {level.name}:")
            report = CompilerReport(say, show)
            objects = _compile_all(compiler, level.flags, cache / "objects", False, verbose, report)
            made.append(folder / level.name / LIBRARY)
            _link(compiler, objects, made[-1], verbose, say)
    prebuilt.write_manifest(folder, sources, compiler.version)
    return prebuilt.platform_tag(made)


@contextlib.contextmanager
def _lock(cache: Path, say: Say) -> Iterator[None]:
    """Hold the lock of the cache folder; blocks, with one line to ``say``, while another process holds the
    lock.
    """
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
    """Return the folder of the installed torch. Raises BuildError without torch or without its headers."""
    spec = importlib.util.find_spec("torch")
    if spec is None or spec.origin is None:
        raise BuildError("torch is not installed, and the C++ operations are built against it")
    folder = Path(spec.origin).parent
    if not (folder / "include" / "ATen").is_dir():
        raise BuildError("this installation of torch has no C++ headers; install its published wheel")
    return folder


def _compile_all(
    compiler: CppCompiler,
    target: Sequence[str],
    folder: Path,
    force: bool,
    verbose: bool,
    report: CompilerReport,
) -> list[Path]:
    """Return the objects of all sources for the CPUs of ``target``; compile missing objects.

    Finished objects stay in the cache, even if another source does not compile. Raises BuildError.
    """
    folder.mkdir(parents=True, exist_ok=True)
    include = _torch_folder() / "include"
    headers = ["-isystem", str(include), "-isystem", str(include / "torch/csrc/api/include")]
    flags = [*FLAGS, *target]
    paths = object_paths(compiler, target, folder)
    sources, objects = list(paths), list(paths.values())
    missing = [pair for pair in zip(sources, objects, strict=True) if force or not pair[1].exists()]
    if missing:
        processes = processes_for(len(missing))
        report.say(_announcement([source for source, _ in missing], processes, compiler))
        command = [compiler.path, *flags, *headers]
        # Compiling the headers takes as long as reading the headers in three files.
        few = len(missing) < 4 or "clang" in compiler.version
        shared = None if few else SOURCES / "precompiled.h"
        say: Say = report.say if verbose else lambda line: None
        with precompiled(command, shared, folder, say) as first:
            compile_files([*command, *first], missing, processes, verbose, report)
    # Mark all objects as used, so `_prune` keeps them.
    for made in objects:
        os.utime(made)
    return objects


def object_paths(compiler: CppCompiler, target: Sequence[str], folder: Path) -> dict[Path, Path]:
    """Return the path of each source's object in ``folder``. The slowest sources come first."""
    machine = _machine(target)
    # The key has torch's version and not the path of torch's headers, so that environments share objects.
    return {
        source: folder / f"{_hash(compiler.version, machine, *FLAGS, *target, *_with_headers(source))}.o"
        for source in sorted(SOURCES.glob("*.cpp"), key=_seconds, reverse=True)
    }


def _seconds(source: Path) -> float:
    return SECONDS.get(source.name, max(SECONDS.values()))


def _announcement(sources: Sequence[Path], processes: int, compiler: CppCompiler) -> str:
    """Return the line for the user before compiling, with an estimate of the seconds."""
    seconds = [_seconds(source) for source in sources]
    wall = max(max(seconds), sum(seconds) / processes)
    return (
        f"compiling {len(sources)} file{'s' * (len(sources) != 1)} with {processes} "
        f"process{'es' * (processes != 1)} of {compiler.version}, once for this machine; "
        f"on as many free cores of an EPYC this takes about {wall:.0f} s"
    )


def processes_for(files: int) -> int:
    """Return the number of parallel compilers: one per core, limited by memory."""
    memory = available_memory()
    room = files if memory is None else memory // COMPILER_BYTES
    return max(1, min(files, usable_cores(), room))


def _with_headers(source: Path) -> list[str]:
    """Return the texts of a source and of all local headers that the source includes, in order of name."""
    texts: dict[str, str] = {}
    wanted = [source.name]
    while wanted:
        name = wanted.pop()
        if name not in texts:
            texts[name] = (SOURCES / name).read_text()
            wanted += _INCLUDE.findall(texts[name])
    return [texts[name] for name in sorted(texts)]


def _link(compiler: CppCompiler, objects: list[Path], target: Path, verbose: bool, say: Say) -> None:
    """Link a library against torch's own OpenMP runtime: a second runtime would start its own threads.
    libstdc++ is shared too, even if the compiler would link a static one.

    The file ``target`` is replaced when complete. With ``verbose``, ``say`` gets the command. Raises
    BuildError.
    """
    library = _torch_folder() / "lib"
    openmp = sorted([*library.glob("libgomp*.so*"), *library.parent.with_name("torch.libs").glob("libgomp*")])
    target.parent.mkdir(parents=True, exist_ok=True)
    with compilers.temporary(target) as partial:
        command = [compiler.path, "-shared", *map(str, objects), "-o", str(partial), f"-L{library}"]
        command += ["-ltorch", "-ltorch_cpu", "-lc10", str(openmp[0]) if openmp else "-lgomp"]
        command += _shared_runtime(compiler)
        run(command, "the C++ operations do not link", verbose, say)


def _shared_runtime(compiler: CppCompiler) -> list[str]:
    """Return the path of the compiler's shared libstdc++ for the link, or nothing if the compiler has none.

    Some compilers are wrappers that add ``-static-libstdc++``. A second libstdc++ in the process shares the
    ids of locale facets with torch's libstdc++, but not the facets: a stream of the library then crashes.
    """
    name = "libstdc++.so.6"
    asked = subprocess.run(
        [compiler.path, f"-print-file-name={name}"], capture_output=True, text=True, check=False
    )
    path = Path(asked.stdout.strip())
    return [str(path)] if asked.returncode == 0 and path.name == name and path.is_file() else []


def _sweep(cache: Path) -> None:
    """Remove the leftovers of killed builds. The caller must hold the lock."""
    for path in [*cache.glob("*-*/partial-*"), *cache.glob("objects/partial-*")]:
        shutil.rmtree(path, ignore_errors=True)


def _prune(cache: Path, keep: Path) -> None:
    """Remove libraries and objects unused for a month, except ``keep``. Loaded libraries stay usable."""
    oldest = time.time() - _KEEP_DAYS * 86400
    for path in [*cache.glob(f"*-*/{LIBRARY}"), *cache.glob("objects/*.o")]:
        with contextlib.suppress(OSError):
            if path != keep and path.stat().st_mtime < oldest:
                path.unlink()
                if path.name == LIBRARY:
                    path.parent.rmdir()
