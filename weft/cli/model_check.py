"""``weft models --check``: facts of one checkpoint, from its small files and the headers of its weights."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from weft.common.errors import WeftError
from weft.config import hub
from weft.config.cache_layout import block_bytes
from weft.config.families.weight_files import check_weight_files, safetensors_files
from weft.config.media import MediaFacts
from weft.config.resolve import check_checkpoint, choose_device, choose_dtype, read_spec, resolve
from weft.config.sections.all import Config
from weft.config.sharding import local_spec
from weft.config.sizing.cache_sizes import planned_weights
from weft.config.sizing.media_limits import most_tokens
from weft.config.sizing.memory import hit_unit, show_bytes, state_bytes, tower_bytes
from weft.config.spec import DTYPE_BYTES, ModelSpec
from weft.text.image_tokens import image_rules
from weft.text.model import TextModel

T = TypeVar("T")
TOKENS = 1000
"""Tokens of the reported KV cache."""


class Memory(msgspec.Struct, kw_only=True):
    """Bytes of one rank: the whole model, or a share with --tensor-parallel-size."""

    weights: int
    """All weights in their format in memory, the parts below included."""
    embeddings: int
    """The token table, and the output head if the head is not tied."""
    tower: int
    kv_per_1000_tokens: int
    """Entries that grow with the context."""
    kv_of_windows: int
    """Entries of full windows, for one sequence."""
    state_per_sequence: int


class Report(msgspec.Struct, kw_only=True):
    """Facts of one checkpoint. Facts behind a refusal may be missing."""

    model: str
    served: bool = True
    refused: list[str] = []
    """Reasons, each with what to change."""
    architecture: str | None = None
    implementation: str | None = None
    dtype: str | None = None
    quantization: str | None = None
    """Method of the checkpoint, or the chosen method."""
    context: int | None = None
    """Maximum tokens of prompt and output together."""
    memory: Memory | None = None
    tokenizer: str | None = None
    template: str | None = None
    images: str | None = None
    """Items and tokens of an image, and the token of an image in the chat template."""
    output: str | None = None
    """Parts of the output that Weft separates."""
    tasks: list[str] = []
    notes: list[str] = []
    """Tasks that the checkpoint does not have, with the reason."""


def check_model(config: Config) -> Report:
    """Return the facts of the model of ``config``, as ``weft serve`` resolves ``config`` on this machine.

    Downloads small files of a hub model, and no weights. Raise ConfigError if the model does not exist.
    """
    model = config.model
    report = Report(model=model.model)
    path = hub.resolve_model_path(model.model, model.revision, load_format="dummy")
    load_format = "auto" if safetensors_files(Path(path)) else "dummy"
    found = msgspec.structs.replace(model, model=path, revision=None, load_format=load_format)
    config = msgspec.structs.replace(config, model=found)
    tokenizer = _tried(report, lambda: hub.resolve_tokenizer_path(model.tokenizer, path)) or path
    # The steps of ``resolve``, one by one: a report has the reasons of all steps.
    _tried(report, lambda: check_checkpoint(found, path, tokenizer))
    _tried(report, lambda: check_weight_files(Path(path), load_format))
    spec = _tried(report, lambda: read_spec(config, path))
    resolved = None if report.refused else _tried(report, lambda: resolve(config))
    if spec is not None:
        _describe(report, spec, config, path)
    if resolved is not None:
        report.context = resolved.kv.max_model_len
    _read_text(report, spec, tokenizer)
    report.served = not report.refused
    return report


def _tried(report: Report, step: Callable[[], T]) -> T | None:
    """Return the result of ``step``; None, with the reason in the report, for a refusal."""
    try:
        return step()
    except WeftError as error:
        if error.message not in report.refused:
            report.refused.append(error.message)
        return None


def _describe(report: Report, spec: ModelSpec, config: Config, path: str) -> None:
    """Add the model, the memory of one rank and the tasks to ``report``."""
    model, layout = config.model, config.parallel.layout
    device = choose_device(config.runner)
    dtype = choose_dtype(model, spec, device, path)
    published = None if spec.quantized is None else spec.quantized.method
    report.architecture = spec.architecture
    report.implementation = "transformers" if spec.implementation != "weft" else f"weft ({spec.family})"
    report.dtype, report.context = dtype, spec.max_position
    report.quantization = published if model.quantization == "none" else model.quantization
    table = -(-spec.vocab_size // layout.tensor) * spec.hidden
    head = table * (DTYPE_BYTES[dtype] if model.quantization == "none" else 1)
    local = local_spec(spec, layout)
    full = [cache for cache in local.caches if cache.kind != "state" and not cache.window]
    windows = [cache for cache in local.caches if cache.window]
    unit = hit_unit(local, config.cache.block_size)
    report.memory = Memory(
        weights=planned_weights(spec, dtype, device, model, config.parallel),
        embeddings=head if spec.tied else table * DTYPE_BYTES[dtype] + head * spec.head,
        tower=0 if spec.vision is None else tower_bytes(spec.vision, dtype),
        kv_per_1000_tokens=sum(block_bytes(cache, unit, dtype) for cache in full) * TOKENS // unit,
        kv_of_windows=sum(block_bytes(cache, unit, dtype) * cache.window // unit for cache in windows),
        state_per_sequence=state_bytes(local, dtype, 1),
    )
    _add_tasks(report, spec)


def _add_tasks(report: Report, spec: ModelSpec) -> None:
    """Add the tasks of the model to ``report``, and the reasons for missing tasks to its notes."""
    if spec.head:
        report.tasks.append("generate")
    else:
        report.notes.append("no text: the checkpoint has no output head")
    if spec.pooled.refused:
        report.notes.append(f"no embeddings: {spec.pooled.refused}")
    else:
        report.tasks.append(f"embed ({spec.pooled.mode})")
    if spec.classify is None:
        report.tasks.append("score (cosine)")
    else:
        report.tasks += ["score"] * (spec.classify.labels == 1)
        report.tasks.append(f"classify ({spec.classify.labels})")
    if spec.vision is not None:
        report.tasks.append("images")


def _read_text(report: Report, spec: ModelSpec | None, path: str) -> None:
    """Add tokenizer, chat template and output parser to ``report``."""
    facts = None if spec is None or spec.vision is None else spec.vision.media
    images, hidden = image_rules(facts, 1)
    text = _tried(report, lambda: TextModel.load(path, images=images, hidden=hidden))
    if text is None:
        return
    report.tokenizer = f"{text.tokenizer.vocab_size} tokens, ends: {_names(text)}"
    report.template = "none" if text.chat.source is None else text.chat.problem or "read"
    if facts is not None:
        report.images = _images(text, facts)
    parts = {"reasoning": text.output.tells_reasoning, "tool calls": text.output.tells_calls}
    report.output = ", ".join(name for name, there in parts.items() if there) or "text alone"


def _images(text: TextModel, facts: MediaFacts) -> str:
    """Return the line on images: the cost of an image, and the token of an image in the chat template."""
    tokens = f"at most {most_tokens(facts)} tokens"
    if facts.tiles is not None:
        tokens = f"at most {facts.most_views} tiles of {most_tokens(facts)} tokens"
    name = text.tokenizer.token_text(facts.placeholder if facts.shown is None else facts.shown)
    image = {"type": "image_url", "image_url": {"url": "data:,"}}
    try:
        # Only the placeholder is counted: the file is not read.
        text.chat.encode([{"role": "user", "content": [image]}])
    except WeftError:
        return f"{tokens}; the chat template does not write {name} for an image, so images get 400"
    return f"{tokens}; {name} in the chat template"


def _names(text: TextModel) -> str:
    names = [text.tokenizer.token_text(one) for one in text.end_ids]
    return " ".join(name or str(one) for name, one in zip(names, text.end_ids, strict=True)) or "none"


def lines_of(report: Report) -> list[str]:
    """Return the report as lines of text."""
    rows: list[tuple[str, Any]] = [
        ("architecture", report.architecture),
        ("implementation", report.implementation),
        ("dtype", report.dtype),
        ("quantization", report.quantization),
        ("context", None if report.context is None else f"{report.context} tokens"),
    ]
    if (memory := report.memory) is not None:
        rows += [
            ("weights", show_bytes(memory.weights)),
            ("  embeddings", show_bytes(memory.embeddings)),
            ("  vision tower", memory.tower and show_bytes(memory.tower)),
            ("KV per 1,000 tokens", show_bytes(memory.kv_per_1000_tokens)),
            ("KV of windows", memory.kv_of_windows and show_bytes(memory.kv_of_windows)),
            ("state per sequence", memory.state_per_sequence and show_bytes(memory.state_per_sequence)),
        ]
    rows += [
        ("tokenizer", report.tokenizer),
        ("chat template", report.template),
        ("images", report.images),
        ("separated output", report.output),
        ("tasks", ", ".join(report.tasks)),
        *(("note", one) for one in report.notes),
        *(("refused", one) for one in report.refused),
    ]
    shown = [f"{name + ':':21}{value}" for name, value in rows if value]
    verdict = "Weft serves this model." if report.served else "Weft does not serve this model."
    return [f"{report.model}: {verdict}", *(f"  {line}" for line in shown)]
