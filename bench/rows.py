"""Build the rows of the comparison: the start commands of each engine, as a driver and as a server."""

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

#: Peer -> its environment (a part of ``setup.sh``).
ENVIRONMENTS = {
    "vllm": "vllm",
    "vllm-zen": "vllm",
    "transformers": "transformers",
    "transformers-continuous": "transformers",
    "llamacpp": "llamacpp",
    "openvino": "openvino",
}
#: Suffixes of row names with quantized weights, as in ``weft-int8``.
BITS = ("int8", "int4")
ROUNDED = {"int8": "w8a8", "int4": "w4a8"}
"""Rows of Weft with activations of 8 bits. llama.cpp, OpenVINO and vLLM's int8 also round activations."""
#: Engines with quantized rows.
QUANTIZED = ("weft", "vllm", "vllm-zen", "llamacpp", "openvino")


def default(cpuinfo: str) -> tuple[str, ...]:
    """Return the default of ``--engines`` from the text of /proc/cpuinfo. AMD CPUs get vLLM with AMD's
    kernels."""
    zen = ("vllm-zen",) if "AuthenticAMD" in cpuinfo and "avx512f" in cpuinfo else ()
    return ("weft", "vllm", *zen, "transformers", "transformers-continuous", "llamacpp", "openvino")


def parted(name: str) -> tuple[str, str]:
    """Return (engine, bits): ``("llamacpp", "int8")`` for ``llamacpp-int8``. Bits are "" for the model's
    dtype."""
    base, _, bits = name.rpartition("-")
    known = (bits in BITS and base in QUANTIZED) or (base == "weft" and bits in ROUNDED.values())
    return (base, bits) if known else (name, "")


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """Hold the settings that all engines share."""

    model: Path
    dtype: str
    threads: int
    max_len: int
    max_seqs: int
    folder: Path
    """Folder in which ``setup.sh`` installed the peers."""

    @property
    def source(self) -> converted.Source:
        """Source of the model conversions for peers."""
        return converted.Source(self.model, self.dtype, self.folder)


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """Describe one engine in one configuration."""

    name: str
    driver: tuple[str, ...]
    """Command line of the driver."""
    environment: Mapping[str, str]
    args: Mapping[str, Any] = field(default_factory=dict)
    """The ``args`` of the driver's load message."""
    server: tuple[str, ...] | None = None
    """Command line of the server on port {port}; None for an engine without a comparable server."""
    model: Path | None = None
    """A converted checkpoint, or None for the setting's checkpoint."""

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
    """Return flags of ``weft serve`` as keywords of ``LLM``: {"a_b": "1", "c": False} for --a-b 1 --no-c."""
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
    """Return a Weft row in this interpreter's environment, with extra flags of ``weft serve``.

    The code is this repository, or with ``--tree PATH`` among the flags another working tree. Raise Missing
    if PATH is not a working tree.
    """
    words = shlex.split(arguments)
    source = ROOT
    if "--tree" in words:
        index = words.index("--tree")
        source = Path(*words[index + 1 : index + 2]).resolve()
        del words[index : index + 2]
        if not (source / "weft").is_dir():
            raise Missing(f"--tree {source} is not a working tree of Weft")
    serve = (
        *(sys.executable, "-m", "weft", "serve", str(setting.model), "--port", "{port}"),
        *("--dtype", setting.dtype, "--threads", str(setting.threads)),
        *("--max-model-len", str(setting.max_len), "--max-num-seqs", str(setting.max_seqs)),
        # Turns of peers suspend the engine. The API server must not count the engine as dead.
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
    """Return a row of the reference implementation. The row has no server."""
    folder = _ready(setting, "transformers")
    mode = "continuous" if name.endswith("continuous") else "static"
    driver = (str(folder / "bin/python"), str(PEERS / "drive_transformers.py"))
    return Row(name=name, driver=driver, environment=_quiet(setting), args={"mode": mode})


def vllm(name: str, setting: Setting) -> Row:
    """Return a row of vLLM's CPU build, set up as its documentation advises: bound threads, preloaded OpenMP
    and tcmalloc.
    """
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
    """Return a row of llama.cpp's server, with the model converted by llama.cpp's tools: same dtype, Q8_0 or
    Q4_K_M.

    Every sequence has a slot and a separate cache range. Flash attention is on; prompt batches are large.
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
    """Return a row of OpenVINO GenAI in process. Its HTTP server is a different product, so W4 is absent.

    Caches use the checkpoint's dtype, as in the other engines (OpenVINO's default is 8 bits).
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
    """Return ``MLA`` for a model with latent attention that vLLM's CPU build cannot run, otherwise ""."""
    config = json.loads((model / "config.json").read_text())
    width = (config.get("kv_lora_rank") or 0) + (config.get("qk_rope_head_dim") or 0)
    return "MLA" if config.get("kv_lora_rank") and width != 576 else ""


def build(names: Sequence[str], weft_args: Mapping[str, str], setting: Setting) -> dict[str, Row | Missing]:
    """Return every named row, or a Missing with the reason. ``weft_args`` has the flags of Weft rows."""
    found: dict[str, Row | Missing] = {}
    for name in names:
        try:
            found[name] = _row(name, weft_args, setting)
        except Missing as why:
            found[name] = why
    return found


def own(names: Sequence[str], given: Mapping[str, str]) -> dict[str, str]:
    """Return the flags of Weft rows: the given flags, and ``--quantization`` from the suffix of a row
    name.
    """
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
