"""``weft generate`` on a tiny model."""

from __future__ import annotations

import io
from pathlib import Path

import pytest

from weft import LLM, SamplingParams
from weft.cli import generate
from weft.cli.main import main


def printed(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    with pytest.raises(SystemExit) as ended:
        main(["generate", *arguments])
    out, err = capsys.readouterr()
    assert ended.value.code == 0, err
    return out


@pytest.fixture(scope="module")
def expected(checkpoint: str) -> dict[str, str]:
    """Return the answers of the Python API."""
    params = SamplingParams(temperature=0, max_tokens=12)
    with LLM(checkpoint) as llm:
        asked = {"role": "user", "content": "hello"}
        seeded = SamplingParams(temperature=1, max_tokens=12, n=2, seed=None)
        return {
            "chat": llm.chat([asked], params, use_tqdm=False)[0].outputs[0].text,
            "plain": llm.generate("hello", params, use_tqdm=False)[0].outputs[0].text,
            "other": llm.generate("bye", params, use_tqdm=False)[0].outputs[0].text,
            "n": str(len(llm.generate("hello", seeded, use_tqdm=False)[0].outputs)),
        }


def test_it_answers_as_the_api_does(
    checkpoint: str, expected: dict[str, str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert expected["chat"] != expected["plain"]
    assert printed(capsys, checkpoint, "hello", "--max-tokens", "12") == expected["chat"] + "\n"
    assert printed(capsys, "hello", "--model", checkpoint, "--max-tokens", "12") == expected["chat"] + "\n"
    assert printed(capsys, checkpoint, "hello", "--no-chat", "--max-tokens", "12") == expected["plain"] + "\n"


def test_several_prompts_are_answered_in_order(
    checkpoint: str, expected: dict[str, str], capsys: pytest.CaptureFixture[str]
) -> None:
    out = printed(capsys, checkpoint, "hello", "bye", "--no-chat", "--max-tokens", "12")
    assert out == f"--- 1: 'hello'\n{expected['plain']}\n--- 2: 'bye'\n{expected['other']}\n"


def test_standard_input_is_a_prompt(
    checkpoint: str,
    expected: dict[str, str],
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    (tmp_path / "prompt").write_text("hello\n")
    for words in ([], ["-"]):
        with (tmp_path / "prompt").open() as stdin:
            monkeypatch.setattr("sys.stdin", stdin)
            out = printed(capsys, checkpoint, *words, "--no-chat", "--max-tokens", "12")
        assert out == expected["plain"] + "\n"


def test_an_empty_standard_input_is_no_prompt(
    checkpoint: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO("\n"))
    with pytest.raises(SystemExit) as ended:
        main(["generate", checkpoint])
    assert ended.value.code == 2
    told = f"standard input is empty, because {checkpoint!r} was read as the MODEL"
    assert capsys.readouterr().err == f"weft: {told}: run `weft generate {checkpoint} PROMPT`\n"


@pytest.mark.parametrize("terminal", [False, True])
def test_a_lone_word_that_looks_like_a_hub_name_gets_both_readings(
    terminal: bool, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    stdin = io.StringIO("")
    monkeypatch.setattr(stdin, "isatty", lambda: terminal)
    monkeypatch.setattr("sys.stdin", stdin)
    with pytest.raises(SystemExit) as ended:
        main(["generate", "hello/world"])
    assert ended.value.code == 2
    told = capsys.readouterr().err
    assert ("there is no PROMPT" if terminal else "standard input is empty") in told
    assert "'hello/world' was read as the MODEL" in told
    assert "`weft generate hello/world PROMPT`" in told
    assert "if the word is the PROMPT, `weft generate --model spool-text hello/world`" in told


def test_empty_standard_input_is_an_error(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO(""))
    with pytest.raises(SystemExit):
        main(["generate"])
    assert capsys.readouterr().err == "weft: standard input is empty: give a PROMPT\n"


def test_sampling_flags_take_effect(checkpoint: str, capsys: pytest.CaptureFixture[str]) -> None:
    flags = ["--temperature", "1", "--n", "2", "--max-tokens", "6", "--seed", "5", "--ignore-eos"]
    first = printed(capsys, checkpoint, "hello", *flags)
    assert first == printed(capsys, checkpoint, "hello", *flags)
    assert first.startswith("--- 1: 'hello'\n")
    assert first != printed(capsys, checkpoint, "hello", *flags[:-2], "6", "--ignore-eos")


def test_the_first_word_is_a_model_only_if_it_can_be_one(checkpoint: str) -> None:
    split = generate.split_words
    assert split(["spool-text", "hi"], None) == ("spool-text", ["hi"])
    assert split(["owner/name", "hi"], None) == ("owner/name", ["hi"])
    assert split([checkpoint, "a", "b"], None) == (checkpoint, ["a", "b"])
    assert split(["What is 1/2?"], None) == (None, ["What is 1/2?"])
    assert split(["hello"], None) == (None, ["hello"])
    assert split(["spool-text"], "other") == (None, ["spool-text"])
    assert split(["x" * 5000], None) == (None, ["x" * 5000])
    assert split([], None) == (None, [])


def test_control_characters_do_not_reach_a_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    text = "a\x1b[2Jb\n\tc\x07"
    assert generate._visible(text) == text
    monkeypatch.setattr("sys.stdout.isatty", lambda: True, raising=False)
    assert generate._visible(text) == "a\ufffd[2Jb\n\tc\ufffd"


def test_a_failed_request_is_one_line_and_a_status(
    checkpoint: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["generate", checkpoint, "x" * 600])
    assert ended.value.code == 2
    lines = [line for line in capsys.readouterr().err.splitlines() if line.startswith("weft: ")]
    assert len(lines) == 1


def test_a_misspelled_model_is_no_prompt(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["generate", "spool-txt", "hello"])
    out, err = capsys.readouterr()
    assert (ended.value.code, out) == (2, "")
    assert "'spool-txt' is not a model. Did you mean 'spool-text'?" in err
    assert generate.split_words(("Tom has 12 apples.", "hello"), None) == (
        None,
        ["Tom has 12 apples.", "hello"],
    )
    assert generate.split_words(("spool-txt",), "spool-text") == (None, ["spool-txt"])
