"""Images through whole engines: groups of processes, prefill and decode apart, lost ranks, drafts, flags."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import msgspec
import pytest

from tests.e0 import rig
from tests.engine.pair_rig import EnginePair, submit, unified
from tests.engine.test_recovery import Lossy
from tests.support.seen import SeeingModels
from tests.support.slow import mostly_slow
from weft.cli.verify.verify_run import generate
from weft.common.errors import ConfigError, InvalidRequest
from weft.config.flags import from_keywords
from weft.config.resolve import resolve
from weft.config.resolved import EngineConfig, HostShare
from weft.config.sections.all import TransferSection
from weft.engine.core import EngineCore
from weft.engine.server.replicas import Replicas
from weft.types import messages as m
from weft.types.media_item import without_pixels
from weft.types.sampling import TokenParams

GREEDY = TokenParams(temperature=0.0, max_tokens=8)
SAMPLED = TokenParams(temperature=0.9, top_p=0.95, repetition_penalty=1.2, max_tokens=7)
PARTS: list[list[int | tuple[int, int]]] = [
    [5, (2, 3), 4],
    [3, (3, 3), 2, (1, 4), 6],
    [(5, 6), 3],
    [17],
    [2, (2, 2), 20, (3, 2)],
]


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> SeeingModels:
    return SeeingModels(tmp_path_factory.mktemp("images"))


def config_of(folder: Path, **more: Any) -> EngineConfig:
    settings: dict[str, Any] = {
        "model": str(folder),
        "tokenizer": "spool-text",
        "dtype": "float64",
        "device": "cpu",
        "threads": 1,
        "kv_cache_memory": "8M",
        "block_size": 8,
        "max_num_seqs": 8,
        "max_num_batched_tokens": 64,
        "max_model_len": 160,
        **more,
    }
    group = settings.pop("group", "")
    host = HostShare(ranks=3) if group else HostShare()
    return resolve(from_keywords(settings), group=group, host=host)


def asked(models: SeeingModels, name: str, first: int = 0, n: int = 1) -> list[m.Submit]:
    """One of each prompt; of every second one ``n`` choices, sampled."""
    made = []
    for number, parts in enumerate(PARTS):
        seen = models.seen(name, parts, number)
        for choice in range(n if number % 2 else 1):
            sequence = first + 10 * number + choice
            params = (GREEDY, SAMPLED)[number % 2]
            one = submit(sequence, seen.ids, params, request=first + number, choice=choice, media=seen.media)
            made.append(msgspec.structs.replace(one, seed=1000 + number))
    return made


class BlindDecode(EnginePair):
    """The end that decodes gets no pixels, as from a front."""

    def submit(self, one: m.Submit) -> None:
        send = self.decode.submit

        def blind(its: m.Submit) -> list[m.TokenEvent]:
            return send(msgspec.structs.replace(its, media=without_pixels(its.media)))

        self.decode.submit = blind  # type: ignore[method-assign]
        super().submit(one)
        self.decode.submit = send  # type: ignore[method-assign]


@pytest.mark.requirement("D20")
@mostly_slow(("depth", "chunk", "method"), [(1, 0, "none"), (2, 5, "ngram")], [(2, 5, "ngram")])
@pytest.mark.parametrize("name", ["qwen3-vl", "qwen3-5-moe-vision"])
def test_a_decode_group_gets_no_pixels(
    name: str, depth: int, chunk: int, method: str, models: SeeingModels
) -> None:
    more: dict[str, Any] = {"steps_in_flight": depth, "long_prefill_token_threshold": chunk}
    more |= {"speculative_method": method, "speculative_adaptive": False, "ngram_min_length": 1}
    config = config_of(models.folder(name), **more)
    submits = asked(models, name, n=2)
    expected = unified(config_of(models.folder(name)), submits)

    def of(role: Any) -> EngineConfig:
        return msgspec.structs.replace(config, transfer=TransferSection(role=role))

    pair = BlindDecode(of("prefill"), of("decode"))
    try:
        for one in submits:
            pair.submit(one)
        pair.run()
        assert {s: answer.ids for s, answer in pair.answers.items()} == expected
        pair.check_given_back()
        assert pair.prefill.stats().images_encoded == 6
        assert pair.decode.stats().images_encoded == 0
        graphs = pair.decode.runner.graphs
        assert method != "none" or graphs is None or graphs.replayed > 0
        bare = msgspec.structs.replace(submits[0], sequence=77, media=without_pixels(submits[0].media))
        with pytest.raises(InvalidRequest, match="do not match its grid"):
            pair.decode.submit(bare)  # it would have to compute the prompt itself
    finally:
        pair.close()


@pytest.mark.timeout(600)
def test_groups_of_processes(models: SeeingModels) -> None:
    """An engine sends images to its ranks. An API server sends pixels to groups that compute prompts."""
    name = "qwen3-vl"
    folder = models.folder(name)
    configs = [
        config_of(folder, group="prefill0", role="prefill", tensor_parallel_size=2),
        config_of(folder, group="decode0", role="decode"),
    ]
    submits = asked(models, name, n=2)
    engine = Replicas(configs)
    try:
        found = generate(engine, submits)
        stats = engine.stats_of()
        again = generate(engine, asked(models, name, first=500))
    finally:
        engine.close()
    expected = unified(config_of(folder), submits)
    assert found == expected
    assert again == {500 + n: tokens for n, tokens in expected.items() if n % 10 == 0}
    encoded = {role: one.images_encoded for role, one in stats.values()}
    assert encoded == {"prefill": 6, "decode": 0}
    seconds = {role: one.encode_seconds for role, one in stats.values()}
    assert seconds["prefill"] > 0
    assert seconds["decode"] == 0


@pytest.mark.parametrize("depth", [1, 2])
def test_ranks_that_were_lost_encode_again(depth: int, models: SeeingModels) -> None:
    name = "qwen3-5-moe-vision"
    submits = asked(models, name)
    expected = unified(config_of(models.folder(name)), submits)
    engine, runner = rig.make_engine(models.folder(name), depth=depth, chunk=7, max_num_seqs=4)
    engine.runner = Lossy(runner, ["forward", "read"], 4)  # type: ignore[assignment]
    answers = rig.run(engine, [submits])
    engine.close()
    assert {number: answer.tokens for number, answer in answers.items()} == expected
    assert engine.stats().recoveries == 2
    assert engine.stats().images_encoded > 6


def with_module(models: SeeingModels, root: Path) -> Path:
    """A configuration of Qwen3.5 with its module that predicts one token further."""
    folder = models.folder("qwen3-5-vision")
    config = json.loads((folder / "config.json").read_text())
    config["text_config"]["mtp_num_hidden_layers"] = 1
    for file in folder.glob("*.json"):
        if "index" not in file.name:
            (root / file.name).write_text(file.read_text())
    (root / "config.json").write_text(json.dumps(config))
    return root


@pytest.mark.parametrize("depth", [1, 2])
def test_the_model_s_own_drafts(depth: int, models: SeeingModels, tmp_path: Path) -> None:
    folder = with_module(models, tmp_path)
    settings: dict[str, Any] = {"load_format": "dummy", "seed": 3, "steps_in_flight": depth}
    own = {"speculative_method": "mtp", "num_speculative_tokens": 2, "speculative_adaptive": False}
    submits = asked(models, "qwen3-5-vision", n=2)
    expected = unified(config_of(folder, **settings), submits)
    core = EngineCore(config_of(folder, **settings, **own, long_prefill_token_threshold=7), progress=False)
    try:
        assert generate(core, submits) == expected
        assert generate(core, asked(models, "qwen3-5-vision", 500, 2)) == {
            500 + number: tokens for number, tokens in expected.items()
        }
        assert sum(core.stats().drafts) > 0
    finally:
        core.close()


@pytest.mark.requirement("D7")
def test_room_for_embeddings_follows_from_model_and_settings(models: SeeingModels) -> None:
    """The largest image has 50 tokens, each of 48 numbers, and twice as many behind layers."""
    folder = models.folder("qwen3-vl")
    limits = config_of(folder, limit_mm_per_prompt=3, max_encode_patches=7).kv.media
    assert limits is not None
    assert (limits.patch, limits.merge, limits.row_bytes) == (4, 2, 48 * 3 * 8)
    assert (limits.most_items, limits.encode_patches, limits.sections) == (3, 7, True)
    assert limits.cache_bytes == 512 << 20
    assert (limits.width, limits.levels, limits.host_blocks) == (48, 2, 0)
    assert limits.blocks == (512 << 20) // 73728
    held = config_of(folder, mm_cache_bytes="73728", mm_host_cache_bytes="200000").kv.media
    assert held is not None
    assert (held.blocks, held.host_blocks, held.pool_bytes) == (1, 2, 2 * 73728)
    with pytest.raises(ConfigError, match=r"--mm-cache-bytes 73727 does not hold .* at least 72K,"):
        config_of(folder, mm_cache_bytes="73727")
    with pytest.raises(ConfigError, match=r"--mm-host-cache-bytes 73727 is too small .* at least 72K,"):
        config_of(folder, mm_host_cache_bytes="73727")
    assert config_of(folder, language_model_only=True).kv.media is None
    kimi = config_of(models.folder("kimi-k25")).kv.media
    assert kimi is not None
    assert not kimi.sections
    assert kimi.frames == 4


def test_a_prompt_with_too_many_images_is_refused(models: SeeingModels) -> None:
    name = "qwen3-vl"
    core = EngineCore(config_of(models.folder(name), limit_mm_per_prompt=1), progress=False)
    try:
        with pytest.raises(InvalidRequest, match="has 2 images; at most 1 are allowed"):
            core.submit(asked(models, name)[1])
        text = EngineCore(config_of(models.folder(name), language_model_only=True), progress=False)
        with pytest.raises(InvalidRequest, match="takes no images"):
            text.submit(asked(models, name)[0])
        text.close()
    finally:
        core.close()
