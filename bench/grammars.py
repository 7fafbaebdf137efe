"""Compare grammar backends: masks, compile times, and JSON schemas that are enforced, refused or violated.

python -m bench.grammars [--schemas 1000] [--name grammars]

The schemas are 1,000 schemas drawn by seed and 50 in the style of functions. Each accepted schema is walked
at random through its masks. Each is also tried with values of hypothesis-jsonschema and with texts near those
values. An accepted text must be valid (jsonschema, exact decimals, formats checked), and a valid text should
be accepted.
"""

from __future__ import annotations

import argparse
import json
import random
import re
import statistics
import sys
import tempfile
import time
import warnings
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from decimal import Decimal
from pathlib import Path
from typing import Any

import hypothesis
import numpy as np
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis.internal.conjecture.utils import many
from hypothesis_jsonschema import from_schema
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from bench import machine
from bench.grammar_schemas import Drawn, Oracle, functions, mutants
from weft.common.errors import InvalidRequest, WeftError
from weft.config.hub import BUNDLED
from weft.grammar.base import CompiledGrammar, GrammarCompiler, Matcher
from weft.grammar.registry import make_compiler
from weft.text.tokenizer import Tokenizer as WeftTokenizer
from weft.types.grammar import JsonSchema

ROOT = Path(__file__).resolve().parents[1]
STEPS = 300
_CONTROL = re.compile(r"\\u00[0-9a-f]{2}|\x7f")
r"""Matches a control character in a text: an escaped spelling below \u0100, or DEL. No backend accepts them
in strings."""
MARKUP = ["<|im_start|>", "<|im_end|>", "<think>", "</think>", "<tool_call>", "</tool_call>"]


@dataclass
class Model:
    """Hold a tokenizer and the data for random walks."""

    name: str
    folder: Path
    size: int
    ends: tuple[int, ...]

    def __post_init__(self) -> None:
        self.tokenizer = WeftTokenizer.load(self.folder)
        pieces = [self.tokenizer.token_bytes(number) for number in range(self.size)]
        self.short = np.array([0 < len(piece) <= 2 for piece in pieces])
        self.closing = np.array([len(piece) <= 3 and piece.strip() in _CLOSERS for piece in pieces])

    def encode(self, text: str) -> list[int]:
        return self.tokenizer.encode(text, add_special_tokens=False)


_CLOSERS = {b'"', b"}", b"]", b"]}", b'"}', b'"]', b"}}", b",", b":", b'":', b'",'}


@dataclass
class Tally:
    """Count the results of one backend over all schemas of one tokenizer."""

    backend: str
    compile_ms: list[float] = field(default_factory=list)
    mask_us: list[float] = field(default_factory=list)
    refused: Counter[str] = field(default_factory=Counter)
    taken: int = 0
    walks: int = 0
    walked: int = 0
    """Number of completed walks."""
    values: int = 0
    rejected: list[tuple[str, str]] = field(default_factory=list)
    """Valid values that the backend rejected: (schema, text)."""
    near: int = 0
    near_accepted: int = 0
    broken: list[tuple[str, str]] = field(default_factory=list)
    """Accepted and not valid: schema, text."""


def schemas(count: int) -> list[dict[str, Any]]:
    """Return ``count`` schemas drawn by seed, and the fifty of ``functions``."""
    return [Drawn(seed).schema() for seed in range(count)] + functions()


def tried(
    compiler: GrammarCompiler,
    model: Model,
    schema: dict[str, Any],
    values: Sequence[Any],
    seed: int,
    tally: Tally,
) -> None:
    """Try one schema with one backend. Add the results to ``tally``."""
    text = json.dumps(schema, ensure_ascii=False)
    start = time.process_time_ns()
    try:
        compiled = compiler.compile(JsonSchema(schema=text))
    except InvalidRequest as error:
        tally.refused[reason(error)] += 1
        return
    tally.compile_ms.append((time.process_time_ns() - start) / 1e6)
    tally.taken += 1
    oracle = Oracle(schema)
    # Check that the grammar never allows an invalid text: walk through the masks at random.
    rng = random.Random(seed)
    for _ in range(2):
        made = walk(compiled.matcher(), model, rng, tally)
        if made is not None and not oracle.valid(made):
            tally.broken.append((text, made))
    # Check that the grammar accepts valid values, and mutants only if they are valid.
    for value in values:
        spelled = [spelling(value, schema), spelling(value, {})]
        if not oracle.valid(spelled[0]):
            continue
        tally.values += 1
        if not any(accepts(compiled, model, one) for one in spelled):
            tally.rejected.append((text, spelled[0]))
        for near in mutants(value, rng):
            tally.near += 1
            if accepts(compiled, model, near):
                tally.near_accepted += 1
                if not oracle.valid(near):
                    tally.broken.append((text, near))


def walk(matcher: Matcher, model: Model, rng: random.Random, tally: Tally) -> str | None:
    """Return a text of random tokens that the masks allow, or None if the walk did not reach an end."""
    words = np.zeros((model.size + 31) // 32, np.int32)
    ids: list[int] = []
    tally.walks += 1
    for step in range(STEPS):
        start = time.thread_time_ns()
        matcher.fill(words)
        tally.mask_us.append((time.thread_time_ns() - start) / 1e3)
        allowed = np.unpackbits(words.view(np.uint8), bitorder="little")[: model.size].astype(bool)
        if any(allowed[end] for end in model.ends) and (step > 100 or rng.random() < 0.4):
            tally.walked += 1
            return model.tokenizer.decode(ids)
        allowed[list(model.ends)] = False
        # Prefer short and, late in the walk, closing tokens: unbiased walks seldom reach an end.
        wanted = model.closing if rng.random() < (0.3 if step < 40 else 0.9) else model.short
        choices = np.flatnonzero(allowed & wanted)
        if not len(choices) or rng.random() < (0.1 if step < 60 else 0.02):
            choices = np.flatnonzero(allowed)
        if not len(choices):
            return None if not any(allowed) else ""
        token = int(choices[rng.randrange(len(choices))])
        assert matcher.accept(token)
        ids.append(token)
    return None


def accepts(compiled: CompiledGrammar, model: Model, text: str) -> bool:
    """Return True if the grammar accepts the whole text followed by an end token."""
    matcher = compiled.matcher()
    return all(map(matcher.accept, model.encode(text))) and matcher.accept(model.ends[0])


def reason(error: WeftError) -> str:
    """Return a refusal without the parts that are specific to one schema."""
    message = error.message.split(" (at ")[0].split(";")[0].split(", or ")[0]
    return message.split(": /")[0].replace("the grammar cannot be compiled: ", "")[:90]


def _more(self: Any) -> bool:
    """Replace ``many.more``: hypothesis-jsonschema 0.23 calls it, and newer hypothesis has no such method."""
    if self._depth is None:
        self._depth = self.data.depth
    self._finish_element()
    if not self._decide():
        return False
    self.count += 1
    self._in_element = True
    self._rejected = False
    return True


if not hasattr(many, "more"):
    many.more = _more


def values_of(schema: dict[str, Any], seed: int, count: int) -> list[Any]:
    """Return up to ``count`` values from hypothesis-jsonschema; [] for an unsupported schema."""
    found: list[Any] = []

    @hypothesis.seed(seed)
    @settings(
        max_examples=count, database=None, deadline=None, phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )  # fmt: skip
    @given(from_schema(schema))
    def collect(value: Any) -> None:
        found.append(value)

    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            collect()
    except Exception:  # the library raises many types for unsatisfiable and unsupported schemas
        return found
    return found


def spelling(value: Any, schema: Any) -> str:
    """Return JSON text with keys in the order of the schema's properties, and without exponents."""
    order: dict[str, int] = {}
    for names in _listed(schema):
        for place, name in enumerate(names):
            order[name] = max(order.get(name, 0), place)

    def plain(one: Any) -> str:
        if isinstance(one, dict):
            keys = sorted(one, key=lambda key: order.get(key, 1000)) if order else list(one)
            return "{" + ",".join(f"{plain(key)}:{plain(one[key])}" for key in keys) + "}"
        if isinstance(one, list):
            return "[" + ",".join(map(plain, one)) + "]"
        if isinstance(one, float):
            return format(Decimal(repr(one)).normalize(), "f")
        return json.dumps(one, ensure_ascii=False)

    return plain(value)


def _listed(schema: Any) -> Iterator[list[str]]:
    if isinstance(schema, dict):
        if isinstance(schema.get("properties"), dict):
            extra = [name for name in schema.get("required", ()) if name not in schema["properties"]]
            yield [*schema["properties"], *extra]
        for inner in schema.values():
            yield from _listed(inner)
    elif isinstance(schema, list):
        for inner in schema:
            yield from _listed(inner)


def trained(folder: Path, size: int) -> Model:
    """Train a byte-level BPE of about ``size`` tokens on the text of this repository. Return the model."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=size,
        special_tokens=MARKUP[:2],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    texts = [
        path.read_text() for kind in ("*.py", "*.md", "*.json") for path in sorted(ROOT.glob(f"*/**/{kind}"))
    ]
    tokenizer.train_from_iterator((text[:200_000] for text in texts), trainer)
    tokenizer.add_tokens(MARKUP[2:])
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    count = tokenizer.get_vocab_size()
    return Model(f"byte-level BPE, {count:,} tokens", folder, -(-count // 64) * 64, (1,))


def bundled() -> Model:
    """The bundled model's tokenizer."""
    return Model("bundled, 1,024 tokens", BUNDLED / "spool-text", 1024, (0, 2))


def summary(tally: Tally) -> dict[str, Any]:
    """Return the figures of one backend for the result file."""
    return {
        "backend": tally.backend,
        "taken": tally.taken,
        "refused": sum(tally.refused.values()),
        "refused_by": dict(tally.refused.most_common()),
        "compile_ms": percentiles(tally.compile_ms),
        "mask_us": percentiles(tally.mask_us),
        "masks": len(tally.mask_us),
        "walks": tally.walks,
        "walks_ended": tally.walked,
        "values": tally.values,
        "wrongly_rejected": len(tally.rejected),
        "of_these_with_controls": sum(bool(_CONTROL.search(text)) for _, text in tally.rejected),
        "near_texts": tally.near,
        "near_accepted": tally.near_accepted,
        "wrongly_accepted": len(tally.broken),
        "examples_rejected": [pair for pair in tally.rejected if not _CONTROL.search(pair[1])][:20],
        "examples_accepted": tally.broken[:20],
    }


def percentiles(samples: Sequence[float]) -> dict[str, float]:
    """p50, p99 and the longest."""
    if len(samples) < 2:
        return {}
    cuts = statistics.quantiles(samples, n=100)
    return {"p50": round(cuts[49], 2), "p99": round(cuts[98], 2), "max": round(max(samples), 2)}


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--schemas", type=int, default=1000)
    parser.add_argument("--values", type=int, default=4)
    parser.add_argument("--vocabulary", type=int, default=32768)
    parser.add_argument("--name", default="grammars")
    options = parser.parse_args(arguments)
    drawn = schemas(options.schemas)
    values = [values_of(schema, seed, options.values) for seed, schema in enumerate(drawn)]
    print(f"{sum(map(len, values))} values, {time.process_time():.0f} s", file=sys.stderr)
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        for model in (bundled(), trained(Path(folder), options.vocabulary)):
            for backend in ("llguidance", "xgrammar"):
                compiler = make_compiler(backend, str(model.folder), model.size, model.ends)
                tally = Tally(backend)
                for seed, schema in enumerate(drawn):
                    tried(compiler, model, schema, values[seed], seed, tally)
                rows.append({"tokenizer": model.name, **summary(tally)})
                print(f"{model.name} {backend}: {time.process_time():.0f} s", file=sys.stderr)
    about = machine.describe()
    result = {
        "machine": f"{about['cpu']['model']}, {about['cores']} cores",
        "schemas": len(drawn),
        "rows": rows,
    }
    path = ROOT / "bench" / "results" / f"{options.name}.json"
    path.write_text(json.dumps(result, indent=1, ensure_ascii=False) + "\n")
    path.with_suffix(".md").write_text(page(result))
    print(page(result))


def page(result: dict[str, Any]) -> str:
    """Return the result page."""
    titles = [
        "tokenizer", "backend", "taken", "refused", "mask p50 / p99 / max, µs", "compile p50 / p99 / max, ms",
        "walks ended", "texts near accepted", "wrongly accepted", "valid values",
        "wrongly rejected (with control characters)",
    ]  # fmt: skip
    lines = [
        "# Grammar backends: JSON schemas",
        "",
        f"{result['machine']}; `python -m bench.grammars`; {result['schemas']:,} schemas. Times: CPU time.",
        "A walk draws tokens from the masks; texts near valid values are tried, too. Accepted texts are",
        "checked by jsonschema with exact decimals and formats.",
        "",
        "| " + " | ".join(titles) + " |",
        "|" + "---|" * len(titles),
    ]
    for row in result["rows"]:
        cells = [row["tokenizer"], row["backend"], row["taken"], row["refused"]]
        cells += [
            " / ".join(f"{value:,.1f}" for value in row[key].values()) for key in ("mask_us", "compile_ms")
        ]
        cells += [
            f"{row['walks_ended']:,} of {row['walks']:,}",
            f"{row['near_accepted']:,} of {row['near_texts']:,}",
        ]
        cells += [f"**{row['wrongly_accepted']}**", f"{row['values']:,}"]
        cells.append(f"{row['wrongly_rejected']} ({row['of_these_with_controls']})")
        lines.append("| " + " | ".join(map(str, cells)) + " |")
    lines += [
        "",
        "Refused schemas by reason (bundled tokenizer):",
        "",
        "| backend | reason | schemas |",
        "|---|---|---|",
    ]
    for row in result["rows"][:2]:
        lines += [f"| {row['backend']} | {why} | {count} |" for why, count in row["refused_by"].items()]
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    main()
