"""One runner prefills a sequence and another decodes: tokens and logits equal those of a single runner."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch

from tests.runner.transfers_rig import KEY, Side, config_of, logprobs
from tests.support.slow import mostly_slow
from weft.cli.verify.tiny import write_family
from weft.common.errors import ConfigError, EngineDead
from weft.config.flags import from_keywords
from weft.config.resolve import resolve
from weft.disagg.protocol.group_layout import compatible, tensors_of
from weft.disagg.protocol.transfer_events import RankReport
from weft.engine.build import build_runner
from weft.engine.disagg.rank_transfers import check_transfers, dims_of, is_staged
from weft.runner import exports
from weft.types import plan as p
from weft.types.transfer import Outcome

PROMPT = [(7 * i + 3 + i * i) % 1000 for i in range(61)]
END = len(PROMPT)
CHUNKS = [0, 13, 40, 41, 61]
STEPS = 6
FAMILIES = ["llama", "mistral", "qwen3_next", "deepseek_v3", "glm_dsa", "deepseek_v4", "gpt_oss"]


def chunks(side: Side, slot: int, exports: bool, micro_batches: int = 1, drafts: int = 0) -> p.StepResult:
    """Prefill the prompt in chunks. Return the result of the last chunk."""
    ops = side.enter(slot, PROMPT, END, 0, side.tables_for(END + 32))
    for begin, end in itertools.pairwise(CHUNKS):
        if exports:
            ops.append(side.export(slot, begin, end))
        last = int(end == END)
        split = micro_batches if end - begin >= 32 or micro_batches == 1 else 1
        result = side.run(ops, prefill=[(slot, begin, end - begin, last, last * drafts)], micro_batches=split)
        ops = []
    return result


def decoded(side: Side, slot: int, steps: int = STEPS) -> list[tuple[list[int], np.ndarray]]:
    rows = ((slot, END + step, 1, 1, 0) for step in range(steps))
    return [logprobs(side.run(decode=[row])) for row in rows]


def receive(side: Side, slot: int, tables: list[list[int]], token: int) -> list[p.SlotUpdate]:
    return side.enter(slot, [*PROMPT, token], END, END, tables)


def land(sender: Side, receiver: Side) -> None:
    for side in (receiver, sender):
        report = side.next_report()
        assert isinstance(report, RankReport)
        assert (report.outcome, report.error, report.key) == (Outcome.done, None, KEY)


def spoil(side: Side) -> None:
    """Fill the caches with NaN, so that a read of an entry without a transfer shows."""
    for tensor in (t for layer in side.runner.cache for tensors in layer.values() for t in tensors):
        tensor.fill_(float("nan"))


def same(
    ours: list[tuple[list[int], np.ndarray]], reference: list[tuple[list[int], np.ndarray]], exact: bool
) -> None:
    for (ids, values), (expected, wanted) in zip(ours, reference, strict=True):
        assert ids == expected
        if exact:
            assert np.array_equal(values, wanted)
        else:
            np.testing.assert_allclose(values, wanted, rtol=0, atol=1e-9)


def open_transfer(sender: Side, receiver: Side, start: int = 0, cached: int = 0) -> list[list[int]]:
    """Open the transfer at both sides. Return the blocks reserved by the receiver."""
    tables = receiver.tables_for(END + 32)
    assert receiver.runner.transfer is not None
    assert sender.runner.transfer is not None
    bound = receiver.bound(tables, start)
    receiver.runner.transfer.expect(sender.offer(END), bound)
    has = sender.tables.get(0, [[] for _ in tables])
    sender.runner.transfer.begin(sender.offer(END), bound, sender.blocks(has), cached)
    return tables


@pytest.fixture
def make(tmp_path: Path) -> Iterator[Callable[..., list[Side]]]:
    """Yield a factory of (single runner, sender, receiver) for a family and two block sizes."""
    torch.set_num_threads(1)
    made: list[Side] = []

    def sides(family: str, blocks: tuple[int, int] = (8, 16), **more: Any) -> list[Side]:
        for role, block in (("unified", blocks[0]), ("prefill", blocks[0]), ("decode", blocks[1])):
            made.append(Side(config_of(tmp_path, family, block, role, **more), len(made)))  # type: ignore[arg-type]
        return made

    yield sides
    for side in made:
        side.close()


@mostly_slow("blocks", [(8, 16), (16, 8)], [(8, 16)])
@pytest.mark.parametrize("family", FAMILIES)
def test_decode_goes_on_from_what_another_runner_prefilled(
    make: Callable[..., list[Side]], family: str, blocks: tuple[int, int]
) -> None:
    whole, sender, receiver = make(family, blocks)
    first = chunks(whole, 0, exports=False)
    reference = decoded(whole, 0)
    spoil(receiver)
    tables = open_transfer(sender, receiver)
    token = chunks(sender, 0, exports=True)
    assert token.tokens.tolist() == first.tokens.tolist()
    sender.run(sender.save(0, END))
    land(sender, receiver)
    receiver.run(receive(receiver, 2, tables, int(token.tokens[0])))
    same(decoded(receiver, 2), reference, exact=False)


def test_in_float32_bits_are_equal_where_the_backend_is_invariant(make: Callable[..., list[Side]]) -> None:
    whole, sender, receiver = make("llama", (8, 32), dtype="float32")
    assert not whole.runner.varying
    chunks(whole, 0, exports=False)
    reference = decoded(whole, 0)
    token = chunks(sender, 0, exports=True)
    tables = open_transfer(sender, receiver)  # opened late: the exports have waited
    land(sender, receiver)
    receiver.run(receive(receiver, 1, tables, int(token.tokens[0])))
    same(decoded(receiver, 1), reference, exact=True)


@pytest.mark.parametrize("family", ["llama", "qwen3_next", "deepseek_v4"])
def test_layers_are_reported_after_both_micro_batches(
    make: Callable[..., list[Side]], family: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each layer is reported at once, whatever its size."""
    monkeypatch.setattr(exports, "ENOUGH", 1)
    whole, sender, receiver = make(family)
    chunks(whole, 0, exports=False)
    reference = decoded(whole, 0)
    spoil(receiver)
    tables = open_transfer(sender, receiver)
    token = chunks(sender, 0, exports=True, micro_batches=2)
    sender.run(sender.save(0, END))
    land(sender, receiver)
    receiver.run(receive(receiver, 2, tables, int(token.tokens[0])))
    same(decoded(receiver, 2), reference, exact=False)


@pytest.mark.parametrize("family", ["qwen3", "deepseek_v4"])
def test_the_senders_own_prefix_hit_goes_along_and_the_receivers_stays(
    make: Callable[..., list[Side]], family: str
) -> None:
    """Some positions are cached only at the sender, some only at the receiver, some at both."""
    whole, sender, receiver = make(family, (16, 16))
    chunks(whole, 0, exports=False)
    reference = decoded(whole, 0)
    chunks(sender, 3, exports=False)
    chunks(receiver, 3, exports=False)
    cached = 48
    mine = [table[: cached // pool.block_size] for table, pool in zip_pools(sender, 3)]
    rest = sender.tables_for(END + 32)
    tables = [a + b[len(a) :] for a, b in zip(mine, rest, strict=True)]
    ops = [*sender.enter(0, PROMPT, END, cached, tables), sender.export(0, cached, END)]
    start = 32
    own = [table[: start // pool.block_size] for table, pool in zip_pools(receiver, 3)]
    assert receiver.runner.transfer is not None
    assert sender.runner.transfer is not None
    there = [a + b[len(a) :] for a, b in zip(own, receiver.tables_for(END + 32), strict=True)]
    bound = receiver.bound(there, start)
    receiver.runner.transfer.expect(sender.offer(END), bound)
    sender.runner.transfer.begin(sender.offer(END), bound, sender.blocks(tables), cached)
    token = sender.run(ops, prefill=[(0, cached, END - cached, 1, 0)])
    land(sender, receiver)
    receiver.run(receive(receiver, 0, there, int(token.tokens[0])))
    same(decoded(receiver, 0), reference, exact=False)


def zip_pools(side: Side, slot: int) -> Any:
    return zip(side.tables[slot], side.runner.kv.pools, strict=True)


def test_a_chunk_of_one_token_is_exported_where_decode_steps_are_replayed(
    make: Callable[..., list[Side]],
) -> None:
    """Decode rows run beside the chunk, and captured steps came before."""
    whole, sender, receiver = make("qwen3_next", (8, 8))
    for side in (whole, sender):
        chunks(side, 3, exports=False)
        decoded(side, 3, 4)
    replayed = None if sender.runner.graphs is None else sender.runner.graphs.replayed
    for side, exported in ((whole, False), (sender, True)):
        ops = side.enter(0, PROMPT, END, 0, side.tables_for(END + 32))
        ops += [side.export(0, 0, END - 1)] if exported else []
        side.run(ops, prefill=[(0, 0, END - 1, 0, 0)], decode=[(3, END + 4, 1, 1, 0)])
        ops = [side.export(0, END - 1, END)] if exported else []
        token = side.run(ops, prefill=[(0, END - 1, 1, 1, 0)])
    tables = open_transfer(sender, receiver)
    assert sender.runner.graphs is None or sender.runner.graphs.replayed == replayed
    reference = decoded(whole, 0)
    sender.run(sender.save(0, END))
    land(sender, receiver)
    receiver.run(receive(receiver, 0, tables, int(token.tokens[0])))
    same(decoded(receiver, 0), reference, exact=False)


DRAFTS = 2


@pytest.mark.parametrize("next_k", [0, DRAFTS])
@pytest.mark.parametrize("blocks", [(8, 16), (64, 8)])
def test_a_drafters_entries_go_along(
    make: Callable[..., list[Side]], blocks: tuple[int, int], next_k: int
) -> None:
    """All drafter entries are transferred, even deferred ones: the first drafts equal those of one runner."""
    speculation = {"speculative_method": "mtp", "num_speculative_tokens": DRAFTS}
    whole, sender, receiver = make("deepseek_v3", blocks, **speculation)
    chunks(whole, 0, exports=False, drafts=next_k)
    reference = whole.run(decode=[(0, END, 1, 1, DRAFTS)])
    spoil(receiver)
    tables = open_transfer(sender, receiver)
    token = chunks(sender, 0, exports=True, drafts=next_k)
    land(sender, receiver)
    receiver.run(receive(receiver, 2, tables, int(token.tokens[0])))
    made = receiver.run(decode=[(2, END, 1, 1, DRAFTS)])
    same([logprobs(made)], [logprobs(reference)], exact=False)
    assert made.drafts.tolist() == reference.drafts.tolist()
    assert len(made.drafts) == DRAFTS


def test_an_export_on_a_rank_without_transfers_is_refused(make: Callable[..., list[Side]]) -> None:
    whole, _, _ = make("llama")
    assert whole.runner.transfer is whole.runner.endpoint is whole.runner.reports is None
    ops = whole.enter(0, PROMPT, END, 0, whole.tables_for(END + 32))
    with pytest.raises(EngineDead, match="no transfers"):
        whole.run([*ops, whole.export(0, 0, END)], prefill=[(0, 0, END, 1, 0)])


def test_tcp_transfers_caches_between_ranks_with_the_secret(
    make: Callable[..., list[Side]], tmp_path: Path
) -> None:
    secret = tmp_path / "secret"
    secret.write_text("sixteen bytes at least\n")
    secret.chmod(0o600)
    whole, sender, receiver = make("llama", group_secret=str(secret), transfer="tcp")
    assert sender.runner.endpoint is not None
    assert sender.runner.endpoint.transport == "tcp"
    chunks(whole, 0, exports=False)
    reference = decoded(whole, 0)
    tables = open_transfer(sender, receiver)
    token = chunks(sender, 0, exports=True)
    land(sender, receiver)
    receiver.run(receive(receiver, 2, tables, int(token.tokens[0])))
    same(decoded(receiver, 2), reference, exact=False)


def test_a_missing_group_secret_is_refused_before_weights_are_read(tmp_path: Path) -> None:
    config = config_of(tmp_path, "llama", 8, "prefill", transfer="tcp")
    config = msgspec.structs.replace(config, model_path=str(tmp_path / "nothing"))
    with pytest.raises(ConfigError, match="--group-secret"):
        build_runner(config, progress=False)
    with pytest.raises(ConfigError, match="--group-secret"):
        check_transfers(config)


def test_caches_on_a_gpu_are_staged_and_others_where_they_are_asked_to(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = config_of(tmp_path, "llama", 8, "prefill")
    assert not is_staged(config)
    assert is_staged(msgspec.structs.replace(config, device="cuda"))
    monkeypatch.setenv("WEFT_STAGED_POOLS", "1")
    assert is_staged(config)


@pytest.mark.requirement("E21")
def test_only_groups_with_a_role_have_threads_and_sockets(make: Callable[..., list[Side]]) -> None:
    """Each group with a role has one transfer thread; the prefill group also computes beside the engine's
    loop."""
    before = set(threading.enumerate())
    _, sender, receiver = make("llama")
    names = sorted(thread.name for thread in set(threading.enumerate()) - before)
    assert names == ["weft-device", "weft-transfer-0", "weft-transfer-0"]
    paths = [Path(side.runner.endpoint.address) for side in (sender, receiver) if side.runner.endpoint]
    assert len(paths) == 2
    assert all(path.exists() and path.parent.stat().st_mode & 0o77 == 0 for path in paths)
    for side in (sender, receiver):
        side.close()
    assert set(threading.enumerate()) <= before
    assert not any(path.parent.exists() for path in paths)


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("family", FAMILIES)
def test_a_group_describes_what_each_of_its_ranks_allocates(tmp_path: Path, family: str, ranks: int) -> None:
    config = config_of(tmp_path, family, 8, "prefill", tensor_parallel_size=ranks, threads=1)
    dims = dims_of(config, config.kv)
    assert dims.ranks == ranks
    tensors = tensors_of(dims)  # raises where a tensor does not match the rank's share of heads
    alone = config_of(tmp_path, family, 16, "decode")
    assert compatible(dims, dims_of(alone, alone.kv)) is None
    for kind, pool in zip(tensors, config.kv.pools, strict=True):
        assert [tensor.nbytes for tensor in kind] == [layout.nbytes for layout in pool.tensors(config.dtype)]


def test_recurrent_groups_with_a_role_have_snapshots_without_a_prefix_cache(tmp_path: Path) -> None:
    settings = {"model": str(write_family(tmp_path, "qwen3_next")), "load_format": "dummy", "device": "cpu"}
    settings |= {"tokenizer": "spool-text", "kv_cache_memory": "64M", "enable_prefix_caching": False}

    def snapshots(**more: Any) -> int:
        pools = resolve(from_keywords({**settings, **more})).kv.pools
        return next(pool.num_blocks for pool in pools if pool.cache.kind == "state")

    assert snapshots(role="decode") > snapshots()
