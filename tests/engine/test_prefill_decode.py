"""A prefill engine and a decode engine give the tokens of one engine that does both."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from tests.engine.pair_rig import SECONDS, EnginePair, pair_of, submit, unified
from tests.runner.transfers_rig import config_of
from tests.support.slow import mostly_slow
from weft.common.errors import InvalidRequest
from weft.config.flags import from_keywords
from weft.config.resolve import resolve
from weft.config.sections.all import TransferSection
from weft.disagg.transport.staging_memory import Sizes, Staged
from weft.engine.core import EngineCore
from weft.engine.disagg import rank_transfers
from weft.types import messages as m
from weft.types.sampling import TokenParams
from weft.types.transfer import OfferTransfer, TransferKey, TransferRequest

GREEDY = TokenParams(temperature=0.0, max_tokens=12)
SAMPLED = TokenParams(temperature=0.9, top_p=0.95, repetition_penalty=1.2, max_tokens=9)


@pytest.fixture
def pairs(tmp_path: Path) -> Iterator[Callable[..., EnginePair]]:
    made: list[EnginePair] = []

    def one(*arguments: Any, **more: Any) -> EnginePair:
        made.append(pair_of(tmp_path, *arguments, **more))
        return made[-1]

    yield one
    for pair in made:
        pair.close()


def prompts(count: int) -> list[list[int]]:
    return [[3 + (7 * n + 5 * i) % 90 for i in range(5 + 13 * n)] for n in range(count)]


def check(pair: EnginePair, submits: list[m.Submit], expected: dict[int, list[int]]) -> None:
    for one in submits:
        pair.submit(one)
    pair.run()
    assert {s: answer.ids for s, answer in pair.answers.items()} == expected
    pair.check_given_back()
    for core in pair.cores:
        stats = core.stats().transfers
        assert stats is not None
        assert (stats.done, stats.failed, stats.returns) == (len(submits), 0, 0)


@mostly_slow("depth", [1, 2], [2])
@pytest.mark.parametrize("blocks", [(8, 8), (8, 16), (16, 8)])
def test_tokens_are_those_of_one_engine(
    pairs: Callable[..., EnginePair], tmp_path: Path, blocks: tuple[int, int], depth: int
) -> None:
    settings = {"steps_in_flight": depth, "max_num_batched_tokens": 32}
    submits = [submit(n, ids, (GREEDY, SAMPLED)[n % 2]) for n, ids in enumerate(prompts(6))]
    expected = unified(config_of(tmp_path, "llama", 8, "unified", **settings), submits)
    pair = pairs("llama", blocks, **settings)
    check(pair, submits, expected)
    assert {tuple(answer.finish) for answer in pair.answers.values()} == {("moved", "length")}
    sent, got = (core.stats().transfers for core in pair.cores)
    assert sent is not None
    assert got is not None
    assert (sent.done, got.done, sent.failed, got.failed) == (6, 6, 0, 0)
    assert sent.sent_bytes == got.received_bytes > 0
    assert pair.prefill.stats().generation_tokens <= 6
    assert pair.decode.stats().steps <= 60


@mostly_slow("transport", ["shm", "tcp"], ["shm"])
@mostly_slow("family", ["llama", "qwen3_next", "deepseek_v4", "gpt_oss"], ["llama", "deepseek_v4"])
def test_tokens_are_those_of_one_engine_where_caches_pass_through_a_ring(
    pairs: Callable[..., EnginePair],
    tmp_path: Path,
    family: str,
    transport: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The ring holds less than one prompt, like that of a GPU, so that ranks wait for answers repeatedly."""
    file = tmp_path / "secret"
    file.write_text("sixteen bytes at least")
    file.chmod(0o600)
    settings = {"max_num_batched_tokens": 32, "transfer": transport, "group_secret": str(file)}
    submits = [submit(n, ids, (GREEDY, SAMPLED)[n % 2]) for n, ids in enumerate(prompts(6))]
    expected = unified(config_of(tmp_path, family, 8, "unified", **settings), submits)
    monkeypatch.setenv("WEFT_STAGED_POOLS", "1")
    made: list[Staged] = []

    def staged(regions: Any, copies: Any, sizes: Sizes, **sides: bool) -> Staged:
        made.append(Staged(regions, copies, Sizes(slot=4096, slots=3, inbox=1 << 16), **sides))
        return made[-1]

    monkeypatch.setattr(rank_transfers, "Staged", staged)
    pair = pairs(family, (8, 16), **settings)
    check(pair, submits, expected)
    assert [memory.outbox.free for memory in made] == [3, 0]
    stats = pair.prefill.stats().transfers
    assert stats is not None
    assert stats.sent_bytes > 3 * 4096


@pytest.mark.requirement("E26")
def test_a_bundled_model_goes_on_where_it_was_prefilled(tmp_path: Path) -> None:
    config = resolve(
        from_keywords(
            {"model": "spool-text", "dtype": "float64", "kv_cache_memory": "64M", "max_model_len": 256}
        )
    )

    def of(role: Any) -> Any:
        return msgspec.structs.replace(config, transfer=TransferSection(role=role))

    submits = [submit(n, ids, GREEDY) for n, ids in enumerate(prompts(3))]
    expected = unified(config, submits)
    pair = EnginePair(of("prefill"), of("decode"))
    try:
        assert pair.prefill.welcome(1).fingerprint == pair.decode.welcome(1).fingerprint != ""
        assert [core.welcome(1).role for core in pair.cores] == ["prefill", "decode"]
        check(pair, submits, expected)
    finally:
        pair.close()


@pytest.mark.requirement("E4")
def test_the_first_token_comes_once_from_each_end_with_its_logprobs(
    pairs: Callable[..., EnginePair], tmp_path: Path
) -> None:
    params = msgspec.structs.replace(GREEDY, logprobs=3)
    pair = pairs("llama")
    pair.submit(submit(1, prompts(3)[2], params))
    pair.run()
    answer = pair.answers[1]
    assert sorted(answer.logprobs) == list(range(12))
    assert all(len(row) == 4 for row in answer.logprobs.values())


@pytest.mark.requirement("E11")
def test_a_sequence_that_ends_with_its_first_token_opens_no_transfer(
    pairs: Callable[..., EnginePair],
) -> None:
    pair = pairs("llama")
    pair.submit(submit(1, prompts(3)[2], msgspec.structs.replace(GREEDY, max_tokens=1)))
    pair.run()
    answer = pair.answers[1]
    assert answer.finish[0] == "length"
    assert len(answer.ids) == 1
    pair.check_given_back()
    for core in pair.cores:
        stats = core.stats().transfers
        assert stats is not None
        assert (stats.done, stats.failed) == (0, 0)


@pytest.mark.requirement("E3")
def test_blocks_cached_at_the_decode_group_are_not_sent_again(pairs: Callable[..., EnginePair]) -> None:
    pair = pairs("llama")
    ids = prompts(5)[4]
    pair.submit(submit(1, ids, GREEDY))
    pair.run()
    first = pair.prefill.stats().transfers
    pair.submit(submit(2, ids, GREEDY))
    pair.run()
    second = pair.prefill.stats().transfers
    assert first is not None
    assert second is not None
    assert pair.answers[2].ids == pair.answers[1].ids
    assert 0 < second.sent_bytes - first.sent_bytes < first.sent_bytes / 2


@pytest.mark.requirement("E27")
def test_choices_of_one_prompt_have_a_transfer_each(pairs: Callable[..., EnginePair], tmp_path: Path) -> None:
    ids = prompts(4)[3]
    submits = [submit(10 + n, ids, SAMPLED, request=5, choice=n) for n in range(3)]
    expected = unified(config_of(tmp_path, "llama", 8, "unified"), submits)
    pair = pairs("llama")
    check(pair, submits, expected)


@pytest.mark.requirement("E27")
def test_full_blocks_of_a_prompt_travel_once_for_all_of_its_choices(pairs: Callable[..., EnginePair]) -> None:
    """Each further choice sends only its own tail and first token."""
    ids = prompts(4)[3]
    full, tail = len(ids) // 8 * 8, len(ids) % 8
    assert full
    assert tail

    def moved(choices: int) -> tuple[int, EnginePair]:
        pair = pairs("llama")
        for n in range(choices):
            pair.submit(submit(10 + n, ids, SAMPLED, request=5, choice=n))
        pair.run()
        pair.check_given_back()
        stats = pair.decode.stats().transfers
        assert stats is not None
        assert stats.done == choices
        return stats.received_bytes, pair

    one, _ = moved(1)
    position = one // len(ids)
    assert one == position * len(ids)
    three, pair = moved(3)
    assert three == one + 2 * tail * position
    assert pair.prefill.stats().prefix_hits == 2 * full
    assert pair.decode.stats().prefix_hits == 2 * full
    assert len({answer.ids[0] for answer in pair.answers.values()}) > 1


def test_a_continuation_has_a_transfer_like_any(pairs: Callable[..., EnginePair], tmp_path: Path) -> None:
    ids = prompts(4)[3]
    whole = unified(config_of(tmp_path, "llama", 8, "unified"), [submit(1, ids, SAMPLED)])[1]
    pair = pairs("llama")
    again = submit(1, ids, SAMPLED, emitted_ids=m.ids_to_bytes(whole[:4]), attempt=1)
    pair.submit(again)
    pair.run()
    assert pair.answers[1].tokens == {n: token for n, token in enumerate(whole) if n >= 4}


@pytest.mark.requirement("E17")
@pytest.mark.parametrize("at", ["prefill", "decode"])
@mostly_slow(
    ("turns", "mode"),
    [*((turns, "push") for turns in (0, 1, 2, 3, 5, 8)), (1, "pull"), (3, "pull")],
    [(1, "push"), (3, "push"), (3, "pull")],
)
def test_a_client_that_leaves_frees_both_ends(
    pairs: Callable[..., EnginePair], at: str, turns: int, mode: str
) -> None:
    pair = pairs("llama", max_num_batched_tokens=32, transfer_mode=mode)
    for n, ids in enumerate(prompts(4)):
        pair.submit(submit(n, ids, GREEDY))
    for _ in range(turns):
        pair.turn()
    for n in range(4):
        core = pair.prefill if at == "prefill" else pair.decode
        pair.take(core, core.finish(n))
    for _ in range(20):
        pair.turn()
        pair.decode.sleep(0.005)
    other = pair.decode if at == "prefill" else pair.prefill
    for n in range(4):
        pair.take(other, other.finish(n))
    pair.run()
    pair.check_given_back()


@pytest.mark.requirement("E21")
def test_a_role_takes_no_part_in_the_other_one(pairs: Callable[..., EnginePair], tmp_path: Path) -> None:
    pair = pairs("llama")
    one = submit(1, [3, 4, 5], GREEDY)
    with pytest.raises(InvalidRequest):
        pair.prefill.submit(msgspec.structs.replace(one, transfer=pair.parameters(1, 0, False)))
    core = EngineCore(config_of(tmp_path, "llama", 8, "unified"), progress=False)
    try:
        assert core.transfers is None
        assert core.sources == [core.grammars, core.weights]
        assert core.stats().transfers is None
        with pytest.raises(InvalidRequest):
            core.submit(msgspec.structs.replace(one, transfer=pair.parameters(1, 0, True)))
    finally:
        core.close()


@pytest.mark.parametrize("role", ["prefill", "decode"])
def test_a_group_with_a_role_serves_sequences_without_a_transfer(
    pairs: Callable[..., EnginePair], tmp_path: Path, role: str
) -> None:
    submits = [submit(n, ids, GREEDY) for n, ids in enumerate(prompts(3))]
    expected = unified(config_of(tmp_path, "llama", 8, "unified"), submits)
    assert unified(config_of(tmp_path, "llama", 8, role), submits) == expected  # type: ignore[arg-type]


FAMILIES = (
    *("mistral", "deepseek_v3", "qwen3_next", "deepseek_v4", "lfm2_moe", "nemotron_h", "falcon_h1"),
    *("kimi_linear", "llama4", "mamba2", "olmo_hybrid", "bailing_hybrid", "falcon_mamba", "jamba"),
)
"""Families with windows, latents, recurrent states of four forms, compressed entries, and chunks."""


@pytest.mark.requirement("E4")
@mostly_slow(
    "family",
    FAMILIES,
    ["deepseek_v3", "qwen3_next", "deepseek_v4"],
)
@mostly_slow("blocks", [(8, 8), (8, 16)], [(8, 16)])
def test_every_kind_of_cache_goes_over(
    pairs: Callable[..., EnginePair], tmp_path: Path, family: str, blocks: tuple[int, int]
) -> None:
    settings = {"max_num_batched_tokens": 32}
    submits = [submit(n, ids, (GREEDY, SAMPLED)[n % 2]) for n, ids in enumerate(prompts(5))]
    ids = prompts(4)[3]
    submits += [submit(10 + n, ids, SAMPLED, request=10, choice=n) for n in range(3)]
    expected = unified(config_of(tmp_path, family, 8, "unified", **settings), submits)
    check(pairs(family, blocks, **settings), submits, expected)


@pytest.mark.requirement("E6")
@mostly_slow(
    ("family", "settings"),
    [
        ("llama", {"speculative_method": "ngram", "ngram_min_length": 1}),
        ("qwen3_next", {"speculative_method": "ngram", "ngram_min_length": 1}),
        ("deepseek_v3", {"speculative_method": "mtp", "num_speculative_tokens": 2}),
        ("llama", {"enable_prefix_caching": False}),
        ("qwen3_next", {"enable_prefix_caching": False}),
        ("llama", {"kv_cache_dtype": "fp8"}),
        ("deepseek_v32", {"kv_cache_dtype": "fp8"}),
        ("deepseek_v4", {"kv_cache_dtype": "fp8", "speculative_method": "ngram", "ngram_min_length": 1}),
        ("qwen3_next", {"steps_in_flight": 2, "max_num_seqs": 2}),
        ("lfm2_moe", {"speculative_method": "ngram", "ngram_min_length": 1}),
        ("nemotron_h", {"speculative_method": "ngram", "ngram_min_length": 1}),
        ("kimi_linear", {"speculative_method": "ngram", "ngram_min_length": 1}),
        ("jamba", {"speculative_method": "ngram", "ngram_min_length": 1}),
    ],
    2,
)
def test_with_drafts_without_a_prefix_cache_in_8_bits_and_with_few_slots(
    pairs: Callable[..., EnginePair], tmp_path: Path, family: str, settings: dict[str, Any]
) -> None:
    settings = {"max_num_batched_tokens": 32, **settings}
    submits = [submit(n, ids, (GREEDY, SAMPLED)[n % 2]) for n, ids in enumerate(prompts(6))]
    expected = unified(config_of(tmp_path, family, 8, "unified", **settings), submits)
    check(pairs(family, (8, 16), **settings), submits, expected)


@mostly_slow(
    ("family", "settings"),
    [
        ("llama", {"speculative_method": "ngram", "ngram_min_length": 1}),
        ("mistral", {"max_num_seqs": 2}),
        ("deepseek_v3", {"speculative_method": "mtp", "num_speculative_tokens": 2}),
        ("qwen3_next", {"steps_in_flight": 2, "max_num_seqs": 2}),
        ("deepseek_v4", {"enable_prefix_caching": False}),
    ],
    2,
)
def test_a_cache_that_is_pulled_goes_when_its_prompt_is_computed(
    pairs: Callable[..., EnginePair],
    tmp_path: Path,
    family: str,
    settings: dict[str, Any],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    settings = {"max_num_batched_tokens": 32, **settings}
    submits = [submit(n, ids, (GREEDY, SAMPLED)[n % 2]) for n, ids in enumerate(prompts(5))]
    ids = prompts(4)[3]
    submits += [submit(10 + n, ids, SAMPLED, request=10, choice=n) for n in range(3)]
    expected = unified(config_of(tmp_path, family, 8, "unified", **settings), submits)
    pair = pairs(family, (8, 16), transfer_mode="pull", **settings)
    assert pair.prefill.transfers is not None
    request = pair.prefill.transfers._request
    asked: dict[TransferKey, list[str]] = {}

    def noted(one: TransferRequest) -> None:
        asked.setdefault(one.key, []).append(type(one).__name__)
        request(one)

    monkeypatch.setattr(pair.prefill.transfers, "_request", noted)
    check(pair, submits, expected)
    assert set(map(tuple, asked.values())) == {("OfferTransfer", "FinishTransfer")}


@pytest.mark.requirement("E29")
def test_an_offer_leaves_while_the_step_computes_that_admits_its_sequence(
    pairs: Callable[..., EnginePair], monkeypatch: pytest.MonkeyPatch
) -> None:
    pair = pairs("llama")
    core = pair.prefill
    assert core.transfers is not None
    in_flight: list[int] = []
    request = core.transfers._request

    def noted(one: TransferRequest) -> None:
        if isinstance(one, OfferTransfer):
            in_flight.append(core.scheduler.in_flight)
        request(one)

    monkeypatch.setattr(core.transfers, "_request", noted)
    pair.submit(submit(1, prompts(3)[2], GREEDY))
    pair.run()
    assert in_flight == [1]


@pytest.mark.requirement("E25")
@pytest.mark.parametrize("depth", [1, 2])
def test_layers_leave_while_the_step_computes_that_makes_them(
    pairs: Callable[..., EnginePair], monkeypatch: pytest.MonkeyPatch, depth: int
) -> None:
    """The engine learns of the receiver's reservation during the only step of the prompt.

    The transfer of a prompt of one chunk therefore overlaps with the prefill, too.
    """
    pair = pairs("llama", steps_in_flight=depth)
    assert pair.prefill.runner.transfers is not None
    transfer: Any = pair.prefill.runner.transfers._own
    begun = threading.Event()
    begin, computed = transfer.begin, transfer.computed
    waited: list[bool] = []

    def begins(*told: Any) -> None:
        begin(*told)
        begun.set()

    def computes(*told: Any) -> None:
        waited.append(begun.wait(SECONDS / 2))
        computed(*told)

    monkeypatch.setattr(transfer, "begin", begins)
    monkeypatch.setattr(transfer, "computed", computes)
    pair.submit(submit(1, prompts(3)[2], GREEDY))
    pair.run()
    assert waited
    assert all(waited)
    pair.check_given_back()
