"""The table of tested pairs, as a page."""

from __future__ import annotations

import re
from pathlib import Path

NAMES = {
    "policy": "mixed steps",
    "chunk": "chunked prefill",
    "prefix": "prefix cache",
    "depth": "two steps in flight",
    "draft": "speculation",
    "preempt": "preemption",
    "logprobs": "logprobs",
    "n": "n > 1",
    "penalties": "penalties",
    "stop": "stop strings",
    "kv": "fp8 KV",
    "lora": "adapters",
    "images": "images",
    "hits": "embedding hits",
    "room": "little room for embeddings",
    "overlap": "overlap",
    "dispatch": "other dispatch",
    "beside": "uneven replicas",
}
#: More precise names of features between groups.
GROUP_NAMES = {
    **NAMES,
    "blocks": "other block size",
    "ranks": "other TP",
    "preempt": "eviction at decode",
    "encoders": "images encoded by other groups",
}
HEADING = "# Prefill and decode in groups of their own"
REPLICA_HEADING = "# Images on replicas that share experts"
DISK_HEADING = "# KV on disk"
SLEEP_HEADING = "# After a sleep"
"""Starts of the second part of the page and of all later parts."""
ALONE = [
    "# Which features work together",
    "",
    "All of the features below work together. This page is for developers who change a feature. A test",
    "run writes the tables.",
    "",
    "These combinations are refused at the start, with the reason:",
    "",
    "| combination | page |",
    "|---|---|",
    "| the generic backend with MTP, `--deterministic` or images | [generic](generic.md) |",
    "| a draft model with a recurrent state; a draft model with experts under "
    "`--enable-expert-parallel` | [speculation](speculation.md) |",
    "| adapters of routers and of DeepSeek V4's attention | [adapters](lora.md) |",
    "| images of Gemma 3 and of the larger models of Gemma 4 with `--attention-backend flashinfer` | "
    "[architecture](architecture.md#images) |",
    "| latent experts (Nemotron 3 Super) with `--enable-expert-parallel` | "
    "[attention](attention.md#state-mixers) |",
    "| models that load on demand with `weft front` or Ray | [several models](guides/several-models.md) |",
    "| the KV cache on disk, in host memory or in an object store, in an encode group | "
    "[KV cache on disk](tiers.md) |",
    "| `return_routed_experts` with `stream` or `thinking_token_budget`; routed experts of models of the "
    "generic backend | [training loops](guides/training-loops.md#routed-experts) |",
    "| latent attention, recurrent states, images, quantized weights or several ranks in `weft train` | "
    "[train](guides/train.md) |",
    "",
    "Each cell counts the cases of `tests/composition` in which both features were active. Counters show",
    "the activity; settings alone do not count. In each case every sequence got the same tokens, text and",
    "logprobs as alone, in float64. Families with images run these prompts in one batch:",
    "",
    "* text alone, one image, and several images of odd sizes;",
    "* the same image after another text;",
    "* images of several turns.",
    "",
    "`tests/composition/test_whole_images.py` runs Gemma 3, Gemma 4, Mistral Small 3.x, Ministral 3,",
    "InternVL and Llama 4 with images and many features at once: in one group, and in prefill, decode and",
    "encode groups. Gemma 4 also runs with frames of videos, whose placeholder is another token. Frames of",
    "InternVL are tiles. `tests/composition/test_joined_videos.py` does the same with videos of Qwen2-VL and",
    "Qwen2.5-VL, whose frame groups share rope positions, and with videos of Kimi K2.5, whose frames are",
    "averaged.",
    "",
    "`tests/e0/test_routes.py` runs routed experts and logprobs of the whole vocabulary with chunks, prefix",
    "hits, preemption, two steps in flight, drafts, overlap and every layout of ranks.",
    "",
    "`pytest tests/composition/test_pairs.py -m grid --write-composition` writes this part.",
]
ON_REPLICAS = [
    REPLICA_HEADING,
    "",
    "Two replicas share their routed experts (DP 2 x EP 2). Both replicas have prompts with images, or one",
    "replica has text alone or no prompts (uneven replicas). Cells have the meaning of the first part. In",
    "each case the tokens and logprobs equal those of each sequence alone on one rank, in float64.",
    "`pytest tests/composition/test_replicas.py -m grid --write-composition` writes this part.",
]

BETWEEN_GROUPS = [
    HEADING,
    "",
    "One group prefills, and another group decodes ([transfer.md](transfer.md)). Each cell counts",
    "the cases in which the feature was active. The cases of a form of attention contain every",
    "pair of values of every two features. In each case:",
    "",
    "* the cache of every sequence was transferred;",
    "* every sequence got the same tokens, text and logprobs as alone, in float64;",
    "* all blocks were free again at both ends.",
    "",
    "Where several ranks compute prompts with images, steps have two micro-batches (overlap).",
    "`tests/cli/test_encode.py` tests replicas that share experts, with encode groups.",
    "",
    "`pytest tests/composition/test_groups.py -m grid --write-composition` writes this part.",
]
ON_DISK = [
    DISK_HEADING,
    "",
    "A first engine stores the blocks of all prompts on disk, and a second engine loads the blocks",
    "([tiers.md](tiers.md)). Each cell counts the cases in which the feature was active in the second",
    "engine and loads saved prompt tokens. The cases of a form of attention contain every value of every",
    "feature. In each case, every sequence got the same tokens, text and logprobs as alone from both",
    "engines, in float64.",
    "",
    "`pytest tests/composition/test_disk.py -m grid --write-composition` writes this part.",
]
AFTER_SLEEP = [
    SLEEP_HEADING,
    "",
    "An engine answers the prompts, sleeps, wakes up, and answers the prompts again. The sleep has level 2:",
    "the weights go, too. Each cell counts the cases in which the feature was active. The cases of a form of",
    "attention contain every value of every feature. In each case, every sequence got the same tokens, text",
    "and logprobs as alone, in float64.",
    "",
    "`pytest tests/composition/test_sleep.py -m grid --write-composition` writes this part.",
]


def write_part(path: Path, part: int, lines: list[str]) -> None:
    """Write one part of the page, counted from 0. Keep the other parts."""
    text = path.read_text(encoding="utf-8")
    starts = "|".join(map(re.escape, (HEADING, REPLICA_HEADING, DISK_HEADING, SLEEP_HEADING)))
    parts = re.split(f"^(?={starts})", text, flags=re.MULTILINE)
    parts[part : part + 1] = ["\n".join(lines)]
    path.write_text("\n\n".join(one.strip() for one in parts) + "\n", encoding="utf-8")


class Table:
    """For each pair of features, the families in which a case had both features active."""

    def __init__(self, features: dict[str, list[str]], head: list[str]) -> None:
        """Make an empty table. ``features``: family -> its features; ``head``: the lines before the
        tables."""
        self._features, self._head = features, head
        self._cases: dict[tuple[str, frozenset[str]], int] = {}

    def ran(self, family: str, pair: tuple[str, str]) -> None:
        """Record that a case of ``family`` passed with both features of ``pair`` active."""
        key = (family, frozenset(pair))
        self._cases[key] = self._cases.get(key, 0) + 1

    def lines(self) -> list[str]:
        """Return the lines of the part. Raise AssertionError if a cell is empty."""
        lines = list(self._head)
        for family in self._features:
            lines += ["", f"## {family.capitalize()}", "", *self._grid(family)]
        return lines

    def _grid(self, family: str) -> list[str]:
        features = self._features[family]
        columns = features[1:]
        lines = ["| | " + " | ".join(NAMES[c] for c in columns) + " |", "|---" * (len(columns) + 1) + "|"]
        for number, row in enumerate(features[:-1]):
            cells = []
            for column in columns:
                if features.index(column) <= number:
                    cells.append("")
                    continue
                count = self._cases.get((family, frozenset((row, column))), 0)
                assert count, f"no case of {family} had {row} and {column} at work"
                cells.append(str(count))
            lines.append(f"| {NAMES[row]} | " + " | ".join(cells) + " |")
        return lines


class GroupTable:
    """For each feature and family, how often the feature was active, between groups or beside a KV disk."""

    def __init__(self, features: dict[str, list[str]], head: list[str], names: dict[str, str]) -> None:
        """Make an empty table. ``features``: family -> its features; ``head``: the lines before the table;
        ``names``: feature -> its name on the page."""
        self._features, self._head, self._names = features, head, names
        self._cases: dict[tuple[str, str], int] = {}

    def ran(self, family: str, engaged: set[str]) -> None:
        """Record that a case of ``family`` passed with the features ``engaged``."""
        for feature in engaged:
            self._cases[family, feature] = self._cases.get((family, feature), 0) + 1

    def lines(self) -> list[str]:
        """Return the lines of the part. Raise AssertionError if a cell is empty."""
        families = list(self._features)
        rows = list(dict.fromkeys(feature for each in self._features.values() for feature in each))
        lines = [
            *self._head,
            "",
            "| | " + " | ".join(families) + " |",
            "|---" * (len(families) + 1) + "|",
        ]
        for row in rows:
            cells = []
            for family in families:
                count = self._cases.get((family, row), 0)
                assert count or row not in self._features[family], f"no case of {family} had {row} at work"
                cells.append(str(count) if row in self._features[family] else "-")
            lines.append(f"| {self._names[row]} | " + " | ".join(cells) + " |")
        return lines
