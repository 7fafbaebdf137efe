"""Embeddings, scores and classes of a checkpoint: labels, and the layout of sentence-transformers.

A checkpoint that classifies names an architecture ``...ForSequenceClassification`` and has the matrix
``score.weight``. A generating checkpoint can classify by the logits of chosen tokens
(``classifier_from_token``, in config.json or in --hf-overrides).
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

import msgspec

from weft.common.errors import ConfigError
from weft.common.lfs import read_model_text
from weft.config.families.facts import Facts, read_json
from weft.config.sections.all import ModelSection
from weft.config.spec import ModelSpec
from weft.types.pooled import ClassifySpec, PooledSpec

CLASSIFIES = "ForSequenceClassification"
MOST_LABELS = 1 << 16
OVERRIDES = (
    "architectures",
    "classifier_from_token",
    "is_original_qwen3_reranker",
    "method",
    "num_labels",
    "id2label",
    "problem_type",
    "is_matryoshka",
    "matryoshka_dimensions",
)
"""Fields of config.json that --hf-overrides may set."""
TASK_FIELDS = frozenset(OVERRIDES) - {"architectures"}
"""Fields of config.json without effect on the layers."""

_PROBLEMS: dict[Any, Literal["", "regression", "single", "multi"]] = {
    None: "",
    "regression": "regression",
    "single_label_classification": "single",
    "multi_label_classification": "multi",
}
_MODES: dict[str, Literal["last", "mean", "cls"]] = {
    "pooling_mode_lasttoken": "last",
    "pooling_mode_mean_tokens": "mean",
    "pooling_mode_cls_token": "cls",
    "lasttoken": "last",
    "mean": "mean",
    "cls": "cls",
}
_TWO_WAY = "from_2_way_softmax"


def overrides_of(model: ModelSection) -> dict[str, Any]:
    """Return the fields of --hf-overrides. Raise ConfigError unless the value is a JSON object."""
    flag = "--hf-overrides"
    try:
        found = json.loads(model.hf_overrides or "{}")
    except (ValueError, RecursionError):
        raise ConfigError(f"{flag} is not valid JSON", param=flag) from None
    if not isinstance(found, dict):
        raise ConfigError(f"{flag} must be a JSON object", param=flag)
    return found


def with_overrides(config: dict[str, Any], overrides: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields of config.json with the fields of --hf-overrides. Raise ConfigError for a field that
    the flag cannot set."""
    for name in overrides:
        if name not in OVERRIDES:
            raise ConfigError(
                f"--hf-overrides cannot set {name!r}; the flag can set: {', '.join(OVERRIDES)}",
                param="--hf-overrides",
            )
    merged = {**config, **overrides}
    named = overrides.get("architectures")
    # Tokens classify with the checkpoint's own head, so the architecture stays that of config.json.
    if named is not None and merged.get("classifier_from_token"):
        merged["architectures"] = config.get("architectures")
    if "num_labels" in overrides and "id2label" not in overrides:
        merged.pop("id2label", None)
    return merged


def classify_spec(facts: Facts, folder: Path, *, classifies: bool) -> ClassifySpec | None:
    """Return the labels of the checkpoint; None for a checkpoint that does not classify.

    ``classifies``: True for an architecture with the matrix ``score.weight``. Raise ConfigError.
    """
    tokens = facts.get("classifier_from_token")
    if tokens:
        return _by_tokens(facts, folder, tokens)
    if not classifies:
        return None
    problem = facts.get("problem_type")
    if problem not in _PROBLEMS:
        raise facts.fail("problem_type", f"{problem!r} is not supported; there are: {', '.join(_named())}")
    return ClassifySpec(names=_labels(facts), problem=_PROBLEMS[problem])


def _named() -> list[str]:
    return [name for name in _PROBLEMS if name]


def _labels(facts: Facts) -> tuple[str, ...]:
    """Return the name of each label, in order. Raise ConfigError."""
    names = facts.get("id2label")
    if names is None:
        count = facts.integer("num_labels", 2, high=MOST_LABELS)
        return tuple(f"LABEL_{number}" for number in range(count))
    wrong = facts.fail("id2label", "must map the numbers 0, 1, .. to names")
    if not isinstance(names, dict) or not 1 <= len(names) <= MOST_LABELS:
        raise wrong
    try:
        named = {int(number): str(name) for number, name in names.items()}
    except ValueError:
        raise wrong from None
    if sorted(named) != list(range(len(named))):
        raise wrong
    return tuple(named[number] for number in range(len(named)))


def _by_tokens(facts: Facts, folder: Path, tokens: Any) -> ClassifySpec:
    """Return the labels of a checkpoint that classifies by the logits of ``tokens``. Raise ConfigError."""
    if not isinstance(tokens, list) or not all(isinstance(token, str) for token in tokens):
        raise facts.fail("classifier_from_token", "must be a list of tokens, as strings")
    reranks = facts.flag("is_original_qwen3_reranker", False)
    method = facts.get("method")
    if method not in (None, _TWO_WAY, "no_post_processing"):
        raise facts.fail("method", f"{method!r} is not supported; use {_TWO_WAY} or no_post_processing")
    two_way = reranks or method == _TWO_WAY
    if two_way and len(tokens) != 2:
        raise facts.fail("classifier_from_token", "must be two tokens, the token for no first")
    known = _token_ids(folder)
    missing = [token for token in tokens if token not in known]
    if missing:
        raise facts.fail(
            "classifier_from_token",
            f"has {missing[0]!r}, which is no token of the checkpoint's tokenizer.json",
        )
    return ClassifySpec(
        names=("LABEL_0",) if two_way else tuple(tokens),
        tokens=tuple(known[token] for token in tokens),
        difference=two_way,
        instructed=reranks,
    )


def check_classes(spec: ModelSpec) -> ModelSpec:
    """Return ``spec``. Raise ConfigError if the model has no logits for the tokens of its classes."""
    tokens = () if spec.classify is None else spec.classify.tokens
    if not tokens:
        return spec
    if not spec.head:
        raise ConfigError(
            f"classifier_from_token: {spec.architecture} has no output head here, so tokens have "
            "no logits; remove the field from config.json and --hf-overrides",
            param="--hf-overrides",
        )
    if max(tokens) >= spec.vocab_size:
        raise ConfigError(
            f"classifier_from_token: token {max(tokens)} is outside of the model's vocabulary of "
            f"{spec.vocab_size}; choose other tokens",
            param="--hf-overrides",
        )
    return spec


def _token_ids(folder: Path) -> dict[str, int]:
    """Return the id of each token in ``tokenizer.json``; {} for another kind of tokenizer."""
    found = read_json(folder, "tokenizer.json") or {}
    model, added = found.get("model"), found.get("added_tokens")
    vocab = model.get("vocab") if isinstance(model, dict) else None
    known = (
        {name: number for name, number in vocab.items() if type(number) is int}
        if isinstance(vocab, dict)
        else {}
    )
    for token in added if isinstance(added, list) else []:
        if isinstance(token, dict) and type(token.get("id")) is int:
            known[str(token.get("content"))] = token["id"]
    return known


def pooled_spec(facts: Facts, folder: Path) -> PooledSpec:
    """Return the embeddings of the checkpoint, by ``modules.json`` and by the fields for shorter vectors.
    Raise ConfigError for unreadable files."""
    dimensions = facts.integers("matryoshka_dimensions")
    if any(number < 1 for number in dimensions):
        raise facts.fail("matryoshka_dimensions", "must be positive integers")
    cut = PooledSpec(
        any_dimension=facts.flag("is_matryoshka", False) and not dimensions,
        dimensions=tuple(sorted(dimensions)),
    )
    modules = _modules(folder)
    if modules is None:
        return cut
    mode: Literal["last", "mean", "cls"] = "last"
    normalize = False
    for kind, path in modules:
        if kind == "Normalize":
            normalize = True
        elif kind == "Pooling":
            read, refused = _pooling_mode(folder, path)
            if refused:
                return PooledSpec(refused=refused)
            mode = read
        elif kind != "Transformer":
            return PooledSpec(
                refused=f"modules.json has a module {kind}, which Weft does not compute; set --pooling to "
                "serve vectors without the module"
            )
    return msgspec.structs.replace(cut, mode=mode, normalize=normalize)


def _modules(folder: Path) -> list[tuple[str, str]] | None:
    """Return (kind, folder) of each module in ``modules.json``; None without the file. Raise ConfigError."""
    path = folder / "modules.json"
    if not path.is_file():
        return None
    wrong = ConfigError("modules.json must hold a list of modules with type and path", param="--model")
    try:
        listed = json.loads(read_model_text(path, "--model"))
    except (ValueError, RecursionError):
        raise wrong from None
    if not isinstance(listed, list):
        raise wrong
    modules = []
    for one in listed:
        if not isinstance(one, dict) or not isinstance(one.get("type"), str):
            raise wrong
        modules.append((one["type"].rpartition(".")[2], str(one.get("path", ""))))
    return modules


def _pooling_mode(folder: Path, path: str) -> tuple[Literal["last", "mean", "cls"], str]:
    """Return (mode, reason of a refusal or "") of the pooling module in ``path``. Raise ConfigError."""
    # The path comes from the checkpoint: never leave the folder.
    if Path(path).name != path:
        raise ConfigError(f"modules.json names {path[:100]!r}, outside the model folder", param="--model")
    config = read_json(folder / path, "config.json") or {}
    stated = config.get("pooling_mode")
    chosen = (
        [stated]
        if isinstance(stated, str)
        else [name for name, on in config.items() if name.startswith("pooling_mode_") and on is True]
    )
    if len(chosen) == 1 and chosen[0] in _MODES:
        return _MODES[chosen[0]], ""
    return "last", (
        f"{path}/config.json asks for {' and '.join(map(str, chosen)) or 'no pooling'}; Weft pools by "
        f"{', '.join(name for name in _MODES if name.startswith('pooling_'))}; set --pooling to choose one"
    )
