"""Images on replicas that share experts (DP 2 x EP 2), with every feature, in float64.

Tokens equal those of each sequence alone. Each form of attention with images and routed experts is tested.
The full cases cover every pair of values; ``-m slow`` covers each value once, with two cases by default.
``docs/composition.md`` has the results of a full run. ``tests/cli/test_encode.py`` tests such replicas
with embeddings of encode groups.
"""

from __future__ import annotations

import itertools
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.composition.table import Table
from tests.e0.rig import MAX_LEN, Answer, make_engine, run, spec_of, submit
from tests.e1.rig import force_preemptions
from tests.support.expert_groups import Replica, on_layout
from tests.support.pairwise import covering, few_of, name
from tests.support.seen import SeeingModels, Seen
from weft.config.sections.all import MediaSection, SpeculationSection
from weft.config.sizing.media_limits import media_limits, most_tokens
from weft.engine.core import EngineCore
from weft.types.layout import Layout
from weft.types.messages import Submit
from weft.types.plan import Encode, MoveMedia
from weft.types.sampling import TokenParams

FAMILIES = {
    "experts, deepstack": "qwen3-vl-moe",
    "experts, delta": "qwen3-5-moe-vision",
    "experts, latent": "kimi-k25",
}
#: Feature -> values. The reference has the first value.
FEATURES: dict[str, list[Any]] = {
    "policy": ["exclusive", "mixed"],
    "chunk": [0, 7],
    "prefix": [False, True],
    "depth": [1, 2],
    "draft": ["none", "ngram"],
    "preempt": [False, True],
    "logprobs": [False, True],
    "n": [1, 2],
    "penalties": [False, True],
    "room": ["ample", "little", "host"],
    "overlap": ["off", "prefill", "all"],
    "dispatch": ["auto", "low-latency", "gather"],
    "beside": ["images", "text", "nothing"],
}
"""``room``: memory for embeddings. ``beside``: what the other replica computes."""
OUTPUT = 8
FILLER = [3] * 30
LAYOUT = Layout(data=2, expert=True)


def shown() -> list[str]:
    """Return the features in the table: features of the prompts, and features set by cases."""
    return ["images", "hits", *FEATURES]


class Images:
    """Prompts of each family, and the answers of an engine of one rank that runs one sequence at a time."""

    def __init__(self, root: Path) -> None:
        self._models = SeeingModels(root)
        self.prompts = cache(self._prompts)
        self.answer = cache(self._answer)

    def folder(self, family: str) -> Path:
        return self._models.folder(FAMILIES[family])

    def _prompts(self, family: str) -> list[Seen]:
        def seen(parts: list[int | tuple[int, int]], seed: int) -> Seen:
            return self._models.seen(FAMILIES[family], parts, seed)

        first = seen([12, (2, 3), 4], 1)
        other = first.with_images_of(seen([12, (2, 3), 4], 11))
        return [
            first,
            other,  # the same tokens, another image
            seen([3, (3, 3), 2, (1, 4), 6], 2),
            seen([(5, 6), 3], 3),
            seen([9, (2, 3), 1], 1),  # the first image behind another text
            seen([17], 4),
            first.then([7, 8, 9], seen([2, (2, 2), 3], 5)),
            other.then([7, 8, 9], seen([2, (2, 2), 3], 5)),
        ]

    def params(self, number: int, penalties: bool, logprobs: bool) -> TokenParams:
        """Return the sampling parameters; every second prompt is greedy."""
        return TokenParams(
            temperature=0.9 * (number % 2),
            top_p=0.95,
            max_tokens=OUTPUT,
            repetition_penalty=1.3 if penalties else 1.0,
            logprobs=2 if logprobs else -1,
        )

    def submit(
        self, family: str, number: int, case: dict[str, Any], choice: int = 0, first: int = 0
    ) -> Submit:
        """Return one sequence. ``first`` is added to the number of the sequence."""
        seen = self.prompts(family)[number]
        params = self.params(number, case["penalties"], case["logprobs"])
        sequence = first + 2 * number + choice
        return submit(sequence, seen.ids, params, request=number, choice=choice, media=seen.media)

    def _answer(self, family: str, number: int, choice: int, penalties: bool) -> Answer:
        engine, _ = make_engine(self.folder(family), caching=False, max_num_seqs=1)
        one = self.submit(family, number, {"penalties": penalties, "logprobs": True}, choice)
        answers = run(engine, [[one]])
        engine.close()
        return answers[one.sequence]

    def room(self, family: str, room: str) -> MediaSection:
        """Return the limits: "little" has space for the largest image, "host" has three more in host
        memory."""
        if room == "ample":
            return MediaSection()
        spec = spec_of(self.folder(family))
        limits = media_limits(spec, "float64", MAX_LEN, MediaSection())
        assert limits is not None
        assert spec.vision is not None
        block = limits.block_rows * limits.row_bytes
        least = limits.blocks_of(most_tokens(spec.vision.media)) * block
        more = {"mm_host_cache_bytes": str(3 * least)} if room == "host" else {}
        return MediaSection(mm_cache_bytes=str(least), max_encode_patches=1, **more)


@pytest.fixture(scope="module")
def images(tmp_path_factory: pytest.TempPathFactory) -> Images:
    return Images(tmp_path_factory.mktemp("replicas"))


def arrivals(images: Images, family: str, case: dict[str, Any]) -> list[list[list[Submit]]]:
    """Return the requests of each replica, by turn.

    A second turn of a conversation comes after the answer to the first turn, at the same replica.
    """
    of = {"images": [1, 3, 7], "text": [5], "nothing": []}[case["beside"]]
    turns: list[list[list[Submit]]] = []
    for numbers in ([0, 2, 4, 5, 6], of):
        early: list[list[Submit]] = []
        if case["preempt"] and numbers:
            much = TokenParams(temperature=0.0, max_tokens=60)
            early.append([submit(900, FILLER, much, request=900, priority=-1)])
        late: list[list[Submit]] = []
        for number in numbers:
            choices = range(2 if case["n"] == 2 and number % 2 == 0 else 1)
            whole = [images.submit(family, number, case, choice) for choice in choices]
            (late if number in (6, 7) else early).append(whole)
        turns.append([*early, *[[]] * (60 if late else 0), *late])
    return turns


OF_FAMILIES = [(family, case) for family in FAMILIES for case in covering(FEATURES)]
FEW = few_of([(family, {"family": family, **case}) for family, case in OF_FAMILIES])
CASES = [
    pytest.param(
        family,
        {feature: case[feature] for feature in FEATURES},
        marks=[] if number < 1 else [pytest.mark.slow],
        id=f"{family}-{name(case)}",
    )
    for number, (family, case) in enumerate(FEW)
]
CASES += [
    pytest.param(*one, marks=pytest.mark.grid, id=f"{one[0]}-{name(one[1])}-of its form")
    for one in OF_FAMILIES
]


@pytest.mark.requirement("D24")
@pytest.mark.parametrize(("family", "case"), CASES)
def test_tokens_on_replicas_that_share_experts(
    family: str, case: dict[str, Any], images: Images, replica_table: Table
) -> None:
    replicas = on_layout(
        LAYOUT,
        images.folder(family),
        arrivals(images, family, case),
        overlap=case["overlap"],
        dispatch=case["dispatch"],
        depth=case["depth"],
        policy=case["policy"],
        caching=case["prefix"],
        chunk=case["chunk"],
        blocks=16 if case["preempt"] else 256,
        max_num_seqs=4 if case["preempt"] else 12,
        each_turn=_preempt_some if case["preempt"] else None,
        media=images.room(family, case["room"]),
        speculation=SpeculationSection(
            speculative_method=case["draft"],
            num_speculative_tokens=2,
            speculative_adaptive=False,
            ngram_min_length=1,
        ),
    )
    for replica in replicas:
        for sequence, answer in replica.answers.items():
            if sequence == 900:
                continue
            number, choice = divmod(sequence, 2)
            alone = images.answer(family, number, choice, case["penalties"])
            assert (answer.tokens, answer.ends) == (alone.tokens, alone.ends), (number, choice)
            assert bool(answer.logprobs) == case["logprobs"]
            for made, expected in zip(answer.logprobs, alone.logprobs, strict=False):
                assert made[0] == expected[0]
                assert torch.allclose(torch.tensor(made[1]), torch.tensor(expected[1]), atol=1e-5)
    engaged = _engaged(case, replicas)
    wanted = {feature for feature, values in FEATURES.items() if case[feature] != values[0]}
    missing = sorted({"images", *wanted} - engaged)
    assert not missing, f"did not engage: {missing}"
    for pair in itertools.combinations(sorted(engaged), 2):
        replica_table.ran(family, pair)


def _preempt_some(engine: EngineCore, turn: int) -> None:
    """Preempt some sequences, beside preemptions for lack of blocks."""
    if turn < 30:
        force_preemptions(engine, turn)


def _engaged(case: dict[str, Any], replicas: list[Replica]) -> set[str]:
    """Return the features that were active."""
    stats = [replica.stats for replica in replicas]
    plans = [plan for replica in replicas for plan in replica.plans]
    ops = [op for plan in plans for op in plan.ops]
    encoded = [op for op in ops if isinstance(op, Encode)]
    lifted = sum(isinstance(op, MoveMedia) and op.up for op in ops)
    assert len({one.steps for one in stats}) == 1, "replicas take steps together"
    assert len(encoded) == sum(one.images_encoded for one in stats)
    answers = {number: one for replica in replicas for number, one in replica.answers.items()}
    found = {
        "images": bool(encoded),
        "hits": any(one.image_hits for one in stats),
        "policy": case["policy"] == "mixed" and any(one.mixed_steps for one in stats),
        "chunk": case["chunk"] > 0 and any((plan.prefill.sample == 0).any() for plan in plans),
        "prefix": case["prefix"] and any(one.prefix_hits for one in stats),
        "depth": max(replica.deepest for replica in replicas) == 2,
        "draft": any(sum(one.drafts) for one in stats),
        "preempt": any(one.preemptions for one in stats),
        "logprobs": any(one.logprobs for one in answers.values()),
        "n": any(number % 2 for number in answers if number < 900),
        "penalties": case["penalties"],
        "room": lifted > 0 if case["room"] == "host" else case["room"] == "little" and _again(replicas),
        "overlap": any(replica.overlapped for replica in replicas),
        "dispatch": case["dispatch"] != "auto",
        "beside": case["beside"] != "images",
    }
    return {feature for feature, there in found.items() if there}


def _again(replicas: list[Replica]) -> bool:
    """Return True if a replica encoded an image twice, for lack of space."""
    for replica in replicas:
        shown = [op.pixels for plan in replica.plans for op in plan.ops if isinstance(op, Encode)]
        if len(set(shown)) < len(shown):
            return True
    return False
