"""Names of tensors in published checkpoints, as patterns: N stands for the number of a layer or of an expert.

``tensor_names.json`` has a list for each architecture, with its source: the index of a published checkpoint,
a converter that reads or writes published checkpoints (Megatron-Bridge, conversion scripts of transformers),
or the conversion mapping of transformers, which says how published names differ from module names.

    python -m tests.support.tensor_names                       write the lists of the conversion mapping again
    python -m tests.support.tensor_names INDEX CASE SOURCE     add the list of model.safetensors.index.json
"""

from __future__ import annotations

import json
import re
import sys
import tempfile
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import msgspec

FILE = Path(__file__).with_name("tensor_names.json")
MAPPING = "the conversion mapping of transformers"
WRAPPED: dict[str, tuple[str, str, str]] = {
    "mistral3": ("mistral-full", "Mistral3ForConditionalGeneration", "mistral"),
    "ministral3-vision": ("ministral3", "Mistral3ForConditionalGeneration", "ministral3"),
    "gemma3-vision": ("gemma3", "Gemma3ForConditionalGeneration", "gemma3_text"),
    "gemma4-vision": ("gemma4-inputs", "Gemma4ForConditionalGeneration", "gemma4_text"),
    "internvl-vision": ("qwen2-layer-types-yarn", "InternVLForConditionalGeneration", "qwen2"),
    "llama4-vision": ("llama4", "Llama4ForConditionalGeneration", "llama4_text"),
}
"""Text model of an architecture with a tower: name -> (case, architecture, ``model_type``)."""
_NUMBER = re.compile(r"(?<=\.)\d+(?=\.)")
_LAYER = re.compile(r"^(.*?layers\.N\.)?(.+)$")


class Names(msgspec.Struct, frozen=True, omit_defaults=True):
    """The names of one checkpoint."""

    source: str
    names: dict[str, str]
    """Beginning of the names -> ends of the names, separated by spaces."""
    config: dict[str, Any] = {}
    """Fields of config.json that differ from the case."""

    def patterns(self) -> list[str]:
        """Return all names, with N for numbers."""
        return [begin + end for begin, ends in self.names.items() for end in ends.split()]


def load() -> dict[str, Names]:
    """Return name of the configuration -> names of the checkpoint."""
    return msgspec.json.decode(FILE.read_bytes(), type=dict[str, Names])


def grouped(names: Iterable[str]) -> dict[str, str]:
    """Return the patterns of ``names``, grouped by their beginning up to the number of the layer."""
    found: dict[str, list[str]] = {}
    for pattern in sorted({_NUMBER.sub("N", name) for name in names}):
        matched = _LAYER.match(pattern)
        assert matched is not None
        found.setdefault(matched[1] or "", []).append(matched[2])
    return {begin: " ".join(ends) for begin, ends in found.items()}


def expanded(pattern: str, layers: int, experts: int) -> Iterator[str]:
    """Yield the names of ``pattern`` for all layers and experts."""
    begin, *rest = pattern.split(".N.", 1)
    if not rest:
        yield pattern
        return
    for number in range(layers):
        for end in expanded(f".{rest[0]}", max(1, experts), 1):
            yield f"{begin}.{number}{end}"


def config_of(name: str) -> dict[str, Any]:
    """Return config.json of a tiny model: a case of tests/models, or the text model below a tower."""
    from tests.models.conftest import CASES, config_for
    from tests.support.vision_models import CASES as SEEING
    from tests.support.vision_models import config_for as seeing_config

    if name in SEEING:
        return seeing_config(name)
    case, architecture, kind = WRAPPED.get(name, (name, "", ""))
    assert case in CASES, case
    text = config_for(case)
    if not architecture:
        return text
    own = {"architectures": [architecture], "tie_word_embeddings": text.get("tie_word_embeddings", False)}
    return {**own, "vision_config": {"hidden_size": 8}, "text_config": {**text, "model_type": kind}}


def _saved(name: str) -> list[str]:
    """Return the names that transformers saves for a tiny model."""
    from safetensors import safe_open

    from tests.models.conftest import CASES, make_checkpoint
    from tests.support.vision_models import save_tiny

    case, architecture, _ = WRAPPED.get(name, (name, "", ""))
    with tempfile.TemporaryDirectory() as place:
        if case in CASES:
            make_checkpoint(case, Path(place))
        else:
            save_tiny(case, Path(place), lambda model: None)
        (path,) = Path(place).glob("*.safetensors")
        with safe_open(str(path), "pt") as file:
            names = list(file.keys())
    if architecture == "Gemma4ForConditionalGeneration":
        return [one.replace("model.", "model.language_model.", 1) for one in names]
    return [f"language_model.{one}" for one in names] if architecture else names


def main() -> None:
    """Write the file."""
    from tests.models.conftest import CASES
    from tests.support.vision_models import CASES as SEEING

    found = load() if FILE.exists() else {}
    if sys.argv[1:]:
        index, case, source, *fields = sys.argv[1:]
        names = json.loads(Path(index).read_text())["weight_map"]
        found[case] = Names(source, grouped(names), json.loads(fields[0]) if fields else {})
    else:
        found = {name: one for name, one in found.items() if one.source != MAPPING}
        known = {(architecture_of(name), json.dumps(one.names)) for name, one in found.items()}
        for name in (*CASES, *SEEING, *WRAPPED):
            if name in found:
                continue
            names = grouped(_saved(name))
            key = (architecture_of(name), json.dumps(names))
            if key not in known:
                known.add(key)
                found[name] = Names(MAPPING, names)
    ordered = {name: found[name] for name in sorted(found)}
    FILE.write_bytes(msgspec.json.format(msgspec.json.encode(ordered), indent=1) + b"\n")


def architecture_of(name: str) -> str:
    """Return the architecture of a tiny model."""
    return str(config_of(name)["architectures"][0])


if __name__ == "__main__":
    main()
