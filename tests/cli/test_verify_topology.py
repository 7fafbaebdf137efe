"""``weft verify --topology``, and ``--prefill --decode``: real groups, and the report on wrong groups."""

from __future__ import annotations

import re
from typing import Any

import pytest

from tests.cli.test_up import EXAMPLES
from tests.cli.test_verify import verified
from weft.cli.verify import verify_topology
from weft.types.messages import EngineStats, TransferStats

FEW = ["--prompts", "4", "--tokens", "6"]
DEFAULT = ("1p1d",)


@pytest.mark.requirement("D24", "E24")
@pytest.mark.parametrize(
    "name",
    [
        pytest.param(file.stem, marks=[] if file.stem in DEFAULT else [pytest.mark.grid])
        for file in sorted(EXAMPLES.glob("*.yaml"))
        if "two-hosts" not in file.stem
    ],
)
def test_examples_give_the_tokens_of_the_engine_alone(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    status, out = verified(capsys, "--topology", str(EXAMPLES / f"{name}.yaml"), *FEW)
    assert status == 0, out
    assert "4 of 4 prompts equal to the engine alone" in out
    if "encode" in name or "1e" in name or "2e" in name:
        assert re.search(r"^encode0: \d+ images encoded, \d+ embedding transfers done, 0 failed, ", out, re.M)
        assert re.search(
            r"^(prefill|unified)0: .* embedding transfers done, 0 failed, \d+ bytes rec", out, re.M
        )
        assert " 0 bytes" not in out
    elif name != "unified-x2":
        assert "prefill0: 74 prompt tokens, 4 KV transfers done, 0 failed, " in out or "prefill1: " in out
        assert "decode0: " in out
        assert " 0 bytes" not in out
    assert out.endswith("verify: passed\n")


@pytest.mark.grid
def test_the_short_form_gives_the_tokens_of_transformers(
    checkpoint: str, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("transformers", reason="needs the transformers package")
    roles = ["--prefill", "1", "--decode", "1", "--block-size", "4"]
    status, out = verified(capsys, checkpoint, "--reference", checkpoint, *roles, *FEW)
    assert status == 0, out
    assert "greedy tokens in float64: 4 of 4 prompts equal to transformers" in out


@pytest.mark.requirement("E24")
@pytest.mark.grid
@pytest.mark.timeout(1200)
def test_every_family_moves(capsys: pytest.CaptureFixture[str]) -> None:
    roles = ["--prefill", "1", "--decode", "1", "--block-size", "8", "--max-num-seqs", "4"]
    status, out = verified(capsys, "--families", *roles, *FEW)
    assert status == 0, out
    assert out.count("4 of 4 prompts equal to the engine alone") == len(verify_topology.FAMILIES)


def test_different_tokens_are_reported_with_margins(
    checkpoint: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The groups' fourth token of every prompt is another one."""
    expected: list[list[int]] = []
    real = verify_topology._one_by_one

    def kept(*arguments: Any) -> Any:
        made = real(*arguments)
        expected.extend(made)
        return made

    def wrong(*_: Any) -> Any:
        return [[*ids[:3], (ids[3] + 1) % 200, *ids[4:]] for ids in expected], True

    monkeypatch.setattr(verify_topology, "_one_by_one", kept)
    monkeypatch.setattr(verify_topology, "_groups_answer", wrong)
    roles = ["--prefill", "1", "--decode", "1", "--prompts", "2", "--tokens", "6"]
    status, out = verified(capsys, checkpoint, *roles)
    assert status == 1
    greedy, sampled, total, verdict = out.splitlines()
    assert greedy.startswith("prompt 0, token 3 differs: groups ")
    assert "with margin" in greedy
    assert greedy.endswith("DEFECT")
    assert sampled.startswith("prompt 1, token 3 (sampled) differs: groups ")
    assert sampled.endswith("DEFECT")
    assert total == "tokens in float64: 0 of 2 prompts equal to the engine alone"
    assert verdict == "verify: FAILED"


def moved(done: int, bytes: int) -> EngineStats:
    return EngineStats(transfers=TransferStats(done=done, received_bytes=bytes))


def test_groups_without_work_fail_the_comparison() -> None:
    whole = ("unified", EngineStats(generation_tokens=3))
    idle = ("unified", EngineStats())
    sent = EngineStats(embedding_transfers=TransferStats(done=1, sent_bytes=9))
    for stats, named in (
        ({"p": ("prefill", moved(1, 9)), "d": ("decode", moved(1, 9)), "u": idle}, []),
        ({"p": ("prefill", moved(0, 0)), "d": ("decode", moved(1, 0))}, ["p", "d"]),
        ({"a": whole, "b": idle}, ["b"]),
        ({"p": ("prefill", EngineStats()), "d": ("decode", moved(1, 9))}, ["p"]),
        ({"a": whole, "e": ("encode", EngineStats())}, ["e"]),
        ({"a": whole, "e": ("encode", sent)}, []),
    ):
        assert list(verify_topology._idle(stats, images=True)) == named  # type: ignore[arg-type]
    text = {"a": whole, "e": ("encode", EngineStats())}
    assert list(verify_topology._idle(text, images=False)) == []  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (
            ["--topology", "1p1d", "--block-size", "8"],
            "--block-size and --topology exclude each other: write --block-size in 1p1d.yaml",
        ),
        (["--topology", "two-hosts"], "two-hosts.yaml has several hosts"),
        (["--topology", "none"], "none.yaml: "),
        (["spool-text", "--prefill", "1"], "--prefill 1 requires --decode"),
        (["spool-text"], "verify needs a comparison"),
        (["spool-text", "--families"], "--topology or --prefill and --decode"),
        (["--topology", "1p1d", "--families", "--reference", "x"], "leave --reference out"),
    ],
)
def test_impossible_comparisons_start_no_process(
    arguments: list[str], told: str, capsys: pytest.CaptureFixture[str]
) -> None:
    names = [
        str(EXAMPLES / f"{one}.yaml") if arguments[n - 1] == "--topology" else one
        for n, one in enumerate(arguments)
    ]
    status, err = verified(capsys, *names)
    assert status == 2
    assert told in err
