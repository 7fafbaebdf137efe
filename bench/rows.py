"""The rows of the comparison: how each engine is started, as a driver and as a server, and what it needs."""

from __future__ import annotations

import json
import os
import shlex
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from bench import converted
from bench.converted import Missing

PEERS = Path(__file__).parent / "peers"
ROOT = Path(__file__).parent.parent

#: Peer -> environment (a part of ``setup.sh``) that it runs in.
ENVIRONMENTS = {
    "vllm": "vllm",
    "vllm-zen": "vllm",
    "transformers": "transformers",
    "transformers-continuous": "transformers",
    "llamacpp": "llamacpp",
    "openvino": "openvino",
}
#: Weights in fewer bits: a row's name with one of these behind it, as ``weft-int8``.
BITS = ("int8", "int4")
ROUNDED = {"int8": "w8a8", "int4": "w4a8"}
"""Weft with activations in 8 bits as well, beside peers with as many bits: llama.cpp, OpenVINO and vLLM's
int8 round activations by default."""
#: Who has such rows.
QUANTIZED = ("weft", "vllm", "vllm-zen", "llamacpp", "openvino")


def default(cpuinfo: str) -> tuple[str, ...]:
    """Rows without ``--engines``, from the text of /proc/cpuinfo: AMD's kernels for vLLM on AMD's CPUs."""
    zen = ("vllm-zen",) if "AuthenticAMD" in cpuinfo and "avx512f" in cpuinfo else ()
    return ("weft", "vllm", *zen, "transformers", "transformers-continuous", "llamacpp", "openvino")


def parted(name: str) -> tuple[str, str]:
    """``llamacpp-int8`` is ``("llamacpp", "int8")``; a row in the model's own dtype has an empty second."""
    base, _, bits = name.rpartition("-")
    known = (bits in BITS and base in QUANTIZED) or (base == "weft" and bits in ROUNDED.values())
    return (base, bits) if known else (name, "")


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

    @property
    def source(self) -> converted.Source:
        """What peers' own forms of the model are made from."""
        return converted.Source(self.model, self.dtype, self.folder)


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
    model: Path | None = None
    """The checkpoint in a form of its own, or None for the setting's."""

    def load_message(self, setting: Setting) -> dict[str, Any]:
        return {
            "load": {
                "model": str(self.model or setting.model),
                "dtype": setting.dtype,
                "threads": setting.threads,
                "max_len": setting.max_len,
                "max_seqs": setting.max_seqs,
                "args": dict(self.args),
            }
        }


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
    name, bits = parted(name)
    model = setting.model
    if bits:
        model = converted.compressed(setting.source, bits, folder / "bin/python")
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
        *(str(folder / "bin/python"), str(folder / "bin/vllm"), "serve", str(model)),
        *("--host", "127.0.0.1", "--port", "{port}", "--dtype", setting.dtype),
        *("--max-model-len", str(setting.max_len), "--max-num-seqs", str(setting.max_seqs)),
        "--no-enable-prefix-caching",
    )
    driver = (str(folder / "bin/python"), str(PEERS / "drive_vllm.py"))
    named = f"{name}-{bits}" if bits else name
    return Row(name=named, driver=driver, environment=environment, server=serve, model=model)


def llamacpp(name: str, setting: Setting) -> Row:
    """llama.cpp's server, on the model converted once by its own tools: in the same dtype, Q8_0 or Q4_K_M.

    A slot and its own stretch of cache for each sequence, flash attention, large prompt batches.
    """
    folder = _ready(setting, "llamacpp")
    threads, slots = str(setting.threads), setting.max_seqs
    server = (
        *(str(folder / "bin/llama-server"), "--model", str(converted.gguf(setting.source, parted(name)[1]))),
        *("--host", "127.0.0.1", "--port", "{port}"),
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


def openvino(name: str, setting: Setting) -> Row:
    """OpenVINO GenAI's continuous batching in process; its HTTP server is another product, so W4 has none.

    Caches stay in the dtype (its default is 8 bits), as those of the other engines.
    """
    folder = _ready(setting, "openvino")
    precision = {"bfloat16": "bf16", "float32": "f32", "float16": "f16"}.get(setting.dtype)
    if precision is None:
        raise Missing(f"no precision of OpenVINO's for {setting.dtype}")
    exported = converted.openvino(setting.source, parted(name)[1])
    properties = {"INFERENCE_PRECISION_HINT": precision, "KV_CACHE_PRECISION": precision}
    driver = (str(folder / "bin/python"), str(PEERS / "drive_openvino.py"))
    args = {"folder": str(exported), "properties": properties}
    return Row(name=name, driver=driver, environment=_quiet(setting), args=args)


def _quiet(setting: Setting) -> dict[str, str]:
    threads = str(setting.threads)
    return {"OMP_NUM_THREADS": threads, "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}


def _architecture(model: Path) -> str:
    """``MLA`` for a model whose latent attention vLLM's CPU build has no kernel for, else nothing."""
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


def own(names: Sequence[str], given: Mapping[str, str]) -> dict[str, str]:
    """Rows that are Weft's with their flags: those given, and those that a name says."""
    said = {name: f"--quantization {bits}" for name in names for _, bits in [parted(name)] if bits}
    return {name: flags for name, flags in said.items() if parted(name)[0] == "weft"} | dict(given)


def _row(name: str, weft_args: Mapping[str, str], setting: Setting) -> Row:
    if name == "weft" or name in weft_args:
        return weft(name, weft_args.get(name, ""), setting)
    makers: dict[str, Callable[[str, Setting], Row]] = {
        "vllm": vllm,
        "transformers": transformers,
        "llamacpp": llamacpp,
        "openvino": openvino,
    }
    environment = ENVIRONMENTS.get(parted(name)[0])
    if environment is None:
        there = ", ".join(sorted(ENVIRONMENTS))
        raise Missing(f"no engine of this name; there are weft and {there}, some with -int8 or -int4 behind")
    return makers[environment](name, setting)
