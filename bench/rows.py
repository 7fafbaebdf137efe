"""The rows of the comparison: how each engine is started, as a driver and as a server, and what it needs."""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

PEERS = Path(__file__).parent / "peers"
ROOT = Path(__file__).parent.parent

#: Peer -> environment (a part of ``setup.sh``) that it runs in.
ENVIRONMENTS = {
    "vllm": "vllm",
    "vllm-zen": "vllm",
    "transformers": "transformers",
    "transformers-continuous": "transformers",
    "llamacpp": "llamacpp",
}
#: Rows without ``--engines``; vllm-zen is left to whom it concerns (AMD CPUs).
DEFAULT = ("weft", "vllm", "transformers", "transformers-continuous", "llamacpp")


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """What every engine is asked for alike."""

    model: Path
    dtype: str
    threads: int
    max_len: int
    max_seqs: int
    folder: Path
    """Where ``setup.sh`` put the peers."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One engine in one configuration."""

    name: str
    driver: tuple[str, ...]
    """Command line of the driver."""
    environment: Mapping[str, str]
    args: Mapping[str, Any] = field(default_factory=dict)
    """The ``args`` of the driver's load message."""
    server: tuple[str, ...] | None = None
    """Command line of the server on port {port}, or None where the engine has none worth comparing."""

    def load_message(self, setting: Setting) -> dict[str, Any]:
        return {
            "load": {
                "model": str(setting.model),
                "dtype": setting.dtype,
                "threads": setting.threads,
                "max_len": setting.max_len,
                "max_seqs": setting.max_seqs,
                "args": dict(self.args),
            }
        }

    def server_command(self, port: int) -> list[str]:
        assert self.server is not None
        return [part.replace("{port}", str(port)) for part in self.server]


class Missing(Exception):
    """A peer that cannot run here; the message says why and what to do."""


def keywords(arguments: Sequence[str]) -> dict[str, Any]:
    """Flags of ``weft serve`` as keywords of ``LLM``: ``--a-b 1 --no-c`` is ``{"a_b": "1", "c": False}``."""
    found: dict[str, Any] = {}
    words = list(arguments)
    while words:
        word = words.pop(0)
        if not word.startswith("--"):
            raise ValueError(f"{word!r} is not a flag; Weft arguments are flags of weft serve")
        name, given, value = word[2:].partition("=")
        if not given and words and not words[0].startswith("--"):
            value, given = words.pop(0), "="
        key = name.replace("-", "_")
        if given:
            found[key] = value
        elif key.startswith("no_"):
            found[key[3:]] = False
        else:
            found[key] = True
    return found


def weft(name: str, arguments: str, setting: Setting) -> Row:
    """Weft in this interpreter's environment, with more flags of ``weft serve``.

    It is that of this repository, or with ``--tree PATH`` among the flags that of another working tree.
    """
    words = shlex.split(arguments)
    source = ROOT
    if "--tree" in words:
        index = words.index("--tree")
        source = Path(*words[index + 1 : index + 2]).resolve()
        del words[index : index + 2]
        if not (source / "weft").is_dir():
            raise Missing(f"--tree {source} is no working tree of Weft")
    serve = (
        *(sys.executable, "-m", "weft", "serve", str(setting.model), "--port", "{port}"),
        *("--dtype", setting.dtype, "--threads", str(setting.threads)),
        *("--max-model-len", str(setting.max_len), "--max-num-seqs", str(setting.max_seqs)),
        # Stopped for other engines' turns, its front must not take the silence for a death.
        *("--engine-timeout", "86400", "--no-enable-prefix-caching", *words),
    )
    driver = (sys.executable, str(PEERS / "drive_weft.py"))
    path = os.pathsep.join(filter(None, (str(source), os.environ.get("PYTHONPATH", ""))))
    return Row(name=name, driver=driver, environment={"PYTHONPATH": path}, args=keywords(words), server=serve)


def _ready(setting: Setting, part: str) -> Path:
    folder = setting.folder / part
    if not (folder / ".ready").exists():
        raise Missing(f"not set up: bash bench/peers/setup.sh {part}")
    return folder


def transformers(name: str, setting: Setting) -> Row:
    """The reference implementation; it has no server that is meant to be compared."""
    folder = _ready(setting, "transformers")
    mode = "continuous" if name.endswith("continuous") else "static"
    driver = (str(folder / "bin/python"), str(PEERS / "drive_transformers.py"))
    return Row(name=name, driver=driver, environment=_quiet(setting), args={"mode": mode})


def vllm(name: str, setting: Setting) -> Row:
    """vLLM's CPU build as its documentation advises: bound threads, its OpenMP and tcmalloc preloaded."""
    folder = _ready(setting, "vllm")
    preload = [*sorted(folder.glob("tcmalloc/**/libtcmalloc_minimal.so.4")), folder / "lib/libiomp5.so"]
    environment = {
        **_quiet(setting),
        "LD_PRELOAD": ":".join(str(path) for path in preload if path.exists()),
        "VLLM_CPU_KVCACHE_SPACE": "2",
        "VLLM_CPU_OMP_THREADS_BIND": f"0-{setting.threads - 1}",
        "VLLM_CACHE_ROOT": str(setting.folder / f"cache-{name}"),
        "VLLM_NO_USAGE_STATS": "1",
    }
    if name == "vllm-zen":
        if not (folder / "zentorch/zentorch").exists():
            raise Missing(
                "zentorch is not set up: bash bench/peers/setup.sh vllm, on an AMD CPU with AVX-512"
            )
        environment["PYTHONPATH"] = str(folder / "zentorch")
    if "MLA" in _architecture(setting.model):
        environment["VLLM_MLA_DISABLE"] = "1"
    serve = (
        *(str(folder / "bin/python"), str(folder / "bin/vllm"), "serve", str(setting.model)),
        *("--host", "127.0.0.1", "--port", "{port}", "--dtype", setting.dtype),
        *("--max-model-len", str(setting.max_len), "--max-num-seqs", str(setting.max_seqs)),
        "--no-enable-prefix-caching",
    )
    driver = (str(folder / "bin/python"), str(PEERS / "drive_vllm.py"))
    return Row(name=name, driver=driver, environment=environment, server=serve)


def llamacpp(name: str, setting: Setting) -> Row:
    """llama.cpp's server, on the model converted once by its own converter, in the same dtype.

    A slot and its own stretch of cache for each sequence, flash attention, large prompt batches.
    """
    folder = _ready(setting, "llamacpp")
    threads, slots = str(setting.threads), setting.max_seqs
    server = (
        *(str(folder / "bin/llama-server"), "--model", str(convert(setting))),
        *("--host", "127.0.0.1", "--port", "{port}", "--threads-http", "4"),
        *("--threads", threads, "--threads-batch", threads),
        *("--parallel", str(slots), "--no-kv-unified", "--ctx-size", str(slots * setting.max_len)),
        *("--batch-size", "2048", "--ubatch-size", "512", "--flash-attn", "on"),
        *("--no-cache-prompt", "--cache-ram", "0", "--fit", "off"),
    )
    driver = (sys.executable, str(PEERS / "drive_llamacpp.py"))
    return Row(
        name=name,
        driver=driver,
        environment=_quiet(setting),
        args={"command": server, "version": (folder / "version").read_text().strip()},
        server=server,
    )


def convert(setting: Setting) -> Path:
    """The model as a GGUF file beside the peers, converted when it is not there or older than the model."""
    kind = {"bfloat16": "bf16", "float32": "f32", "float16": "f16"}.get(setting.dtype)
    if kind is None:
        raise Missing(f"no GGUF type for {setting.dtype}")
    out = setting.folder / f"{setting.model.name}-{kind}.gguf"
    weights = list(setting.model.glob("*.safetensors"))
    if out.exists() and all(out.stat().st_mtime >= path.stat().st_mtime for path in weights):
        return out
    python = setting.folder / "transformers/bin/python"
    sources = setting.folder / "llamacpp/sources"
    made = subprocess.run(
        [str(python), str(PEERS / "to_gguf.py"), str(sources), str(setting.model), str(out), kind],
        capture_output=True,
        text=True,
        timeout=900,
        check=False,
    )
    if made.returncode:
        out.unlink(missing_ok=True)
        raise Missing("its converter refused the model: " + "; ".join(made.stderr.strip().splitlines()[-2:]))
    return out


def _quiet(setting: Setting) -> dict[str, str]:
    threads = str(setting.threads)
    return {"OMP_NUM_THREADS": threads, "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}


def _architecture(model: Path) -> str:
    """``MLA`` for a model whose latent attention vLLM's CPU build has no kernel for, else nothing."""
    import json

    config = json.loads((model / "config.json").read_text())
    width = (config.get("kv_lora_rank") or 0) + (config.get("qk_rope_head_dim") or 0)
    return "MLA" if config.get("kv_lora_rank") and width != 576 else ""


def build(names: Sequence[str], weft_args: Mapping[str, str], setting: Setting) -> dict[str, Row | Missing]:
    """Every named row, or why it cannot run here. ``weft_args`` gives the flags of rows that are Weft's."""
    found: dict[str, Row | Missing] = {}
    for name in names:
        try:
            found[name] = _row(name, weft_args, setting)
        except Missing as why:
            found[name] = why
    return found


def _row(name: str, weft_args: Mapping[str, str], setting: Setting) -> Row:
    if name == "weft" or name in weft_args:
        return weft(name, weft_args.get(name, ""), setting)
    makers = {"vllm": vllm, "transformers": transformers, "llamacpp": llamacpp}
    environment = ENVIRONMENTS.get(name)
    if environment is None:
        raise Missing(f"no engine of this name; there are weft and {', '.join(sorted(ENVIRONMENTS))}")
    return makers[environment](name, setting)
