"""The scripted engine: which script plays for which sequence, and errors in scripts."""

from __future__ import annotations

import itertools
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.support.text_folders import write_tokenizer
from weft.common.clock import VirtualClock
from weft.common.errors import ConfigError, InvalidRequest, Overloaded
from weft.config.flags import from_keywords
from weft.config.resolve import resolve
from weft.config.resolved import EngineConfig
from weft.config.scripted_config import resolve_scripted
from weft.engine.scripted.script import Entry, read_script
from weft.engine.scripted.scripted import ScriptedEngine
from weft.text.model import TextModel
from weft.types import messages as m
from weft.types.sampling import TokenParams

END = 257
"""The end-of-turn token in these tests; ids below 256 are bytes."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("text")
    write_tokenizer(made, special=["<|call|>"], added=["<tool_call>"])
    return made


@pytest.fixture
def text(folder: Path) -> TextModel:
    return TextModel.load(folder)


class Rig:
    """A scripted engine with a virtual clock."""

    def __init__(self, text: TextModel, folder: Path, entries: list[dict[str, Any]], **flags: Any) -> None:
        script = folder / "script.jsonl"
        script.write_text("\n".join(map(json.dumps, entries)))
        self.clock = VirtualClock(100.0)
        self.text = text
        read = read_script(script, text.tokenizer, 300)
        self.engine = ScriptedEngine(read, text, config_of(folder, script, **flags), 300, self.clock)
        self._number = 0

    def submit(self, prompt: str = "hello", **fields: Any) -> int:
        """Submit a sequence. Return its number."""
        self._number += 1
        params = {"max_tokens": 100, "stop_ids": (END,), **fields.pop("params", {})}
        defaults = {"sequence": self._number, "request": 1000 + self._number, "seed": 0}
        ids = self.text.tokenizer.encode(prompt, parse_special=True)
        self.engine.submit(
            m.Submit(
                **{**defaults, "prompt_ids": m.ids_to_bytes(ids), "params": TokenParams(**params), **fields}
            )
        )
        return self._number

    def play(self, until: float = 1e9) -> dict[int, list[tuple[float, m.TokenEvent]]]:
        """Run until all sequences have ended, or ``until``. Return sequence -> [(seconds since the call,
        event)]."""
        got: dict[int, list[tuple[float, m.TokenEvent]]] = {}
        start = self.clock.now()
        while self.engine.has_work() and self.clock.now() - start < until:
            for event in self.engine.step():
                got.setdefault(event.sequence, []).append((round(self.clock.now() - start, 4), event))
            self.clock.advance_to(self.clock.now() + max(self.engine.wait_ms(), 1) / 1e3)
        return got

    def output(self, prompt: str = "hello", **fields: Any) -> tuple[str, str | None]:
        """Submit and run one sequence. Return (text, finish)."""
        number = self.submit(prompt, **fields)
        events = [event for _, event in self.play()[number]]
        ids = [token for event in events for token in event.token_ids]
        return self.text.tokenizer.decode(ids, skip_special_tokens=False), events[-1].finish


def config_of(folder: Path, script: Path, **flags: Any) -> EngineConfig:
    return resolve_scripted(from_keywords({"tokenizer": str(folder), "scripted": str(script), **flags}))


@pytest.fixture
def rig(text: TextModel, folder: Path) -> Any:
    return lambda *entries, **flags: Rig(text, folder, list(entries), **flags)


@pytest.mark.requirement("G20")
def test_entries_are_played_in_order_and_once_each(rig: Any) -> None:
    made = rig({"text": "one"}, {"text": "two", "repeat": 2}, {"text": "rest", "repeat": True})
    outputs = [made.output()[0] for _ in range(5)]
    assert outputs == [text + "<|im_end|>" for text in ("one", "two", "two", "rest", "rest")]


def test_an_entry_is_chosen_by_what_it_matches(rig: Any) -> None:
    made = rig(
        {"match": "weather", "text": "sun", "repeat": True},
        {"match": {"regex": r"user\n.*\d{3}"}, "text": "number"},
        {"match": {"contains": ["red", "blue"]}, "text": "colours"},
        {"match": {"request": 5}, "text": "fifth"},
        {"text": "any"},
    )
    prompts = ["the weather", "<|im_start|>user\nsay 123", "only red", "blue or red", "x", "weather?"]
    got = [made.output(prompt)[0].removesuffix("<|im_end|>") for prompt in prompts]
    assert got == ["sun", "number", "any", "colours", "fifth", "sun"]


def test_a_used_up_script_is_an_error_with_the_end_of_the_prompt(rig: Any) -> None:
    made = rig({"match": "weather", "text": "sun"})
    with pytest.raises(InvalidRequest, match="is left for prompt 1, which ends with 'hi'"):
        made.submit("hi")
    assert made.output("weather")[0] == "sun<|im_end|>"
    with pytest.raises(InvalidRequest) as caught:
        made.submit("weather")
    assert caught.value.info().code == "not_in_script"


def test_special_and_added_tokens_in_text_are_these_tokens(rig: Any) -> None:
    made = rig({"text": "a<tool_call><|call|>"})
    number = made.submit()
    ids = [token for _, event in made.play()[number] for token in event.token_ids]
    assert ids == [97, 259, 258, END]


def test_chunks_and_delays(rig: Any) -> None:
    made = rig({"text": "abcdefgh", "chunks": [1, 3], "delay_ms": 10, "wait_ms": 500})
    number = made.submit()
    events = made.play()[number]
    assert [len(event.token_ids) for _, event in events] == [1, 3, 3, 2]
    assert [when for when, _ in events] == pytest.approx([0.5, 0.51, 0.54, 0.57], abs=0.002)


def test_steps_are_a_millisecond_apart_and_carry_every_sequence_that_is_due(rig: Any) -> None:
    made = rig({"text": "abcdefgh", "repeat": True})
    numbers = [made.submit() for _ in range(3)]
    played = made.play()
    times = [when for when, _ in played[numbers[0]]]
    assert all([when for when, _ in played[number]] == times for number in numbers)
    assert all(later - earlier >= 0.001 - 1e-9 for earlier, later in itertools.pairwise(times))


@pytest.mark.parametrize(
    ("entry", "params", "output", "finish"),
    [
        ({"text": "abc"}, {}, "abc<|im_end|>", "stop"),
        ({"text": "abc"}, {"stop_ids": ()}, "abc", "stop"),
        ({"text": "abc"}, {"max_tokens": 3}, "abc", "length"),
        ({"text": "abc"}, {"max_tokens": 2}, "ab", "length"),
        ({"text": "abc", "finish": "length"}, {}, "abc", "length"),
        ({"text": "abc"}, {"stop_ids": (98, END)}, "ab", "stop"),
        ({"token_ids": [97, END, 98]}, {}, "a<|im_end|>", "stop"),
        ({"text": "abc", "finish": "error"}, {}, "abc", "error"),
        ({"text": "abcd", "chunks": 3}, {"stop_ids": (98,)}, "ab", "stop"),
        ({"text": ""}, {"stop_ids": ()}, "", "stop"),
    ],
)
def test_ends(rig: Any, entry: dict[str, Any], params: dict[str, Any], output: str, finish: str) -> None:
    assert rig(entry).output(params=params) == (output, finish)


def test_stop_ids_and_errors_follow_the_tokens(rig: Any) -> None:
    made = rig({"text": "ab"}, {"text": "ab", "finish": "error", "chunks": 9}, {"error": "overloaded"})
    first = made.submit()
    assert made.play()[first][-1][1].stop_id == END
    second = made.submit()
    events = [event for _, event in made.play()[second]]
    assert [(len(event.token_ids), event.finish) for event in events] == [(2, None), (0, "error")]
    assert events[-1].error is not None
    third = made.submit()
    (event,) = [event for _, event in made.play()[third]]
    assert event.error is not None
    assert event.error.http_status == 429


def test_the_context_ends_an_output(rig: Any) -> None:
    made = rig({"text": "abcdefgh"}, max_model_len=10)
    assert made.output("hello") == ("abcde", "length")


def test_choices_of_a_request_have_outputs_of_their_own(rig: Any) -> None:
    made = rig({"choices": [{"text": "a"}, {"text": "b", "finish": "length"}]}, {"text": "other"})
    numbers = [made.submit(request=7, choice=choice) for choice in range(3)]
    played = made.play()
    ends = [played[number][-1][1] for number in numbers]
    assert [end.finish for end in ends] == ["stop", "length", "stop"]
    assert made.output() == ("other<|im_end|>", "stop")


def test_cached_tokens_are_reported_once(rig: Any) -> None:
    made = rig({"text": "ab", "num_cached": 3, "repeat": True})
    number = made.submit()
    assert [event.num_cached for _, event in made.play()[number]] == [3, 0, 0]
    number = made.submit("hi", explain=True)
    first = made.play()[number][0][1]
    assert first.num_cached == 1
    assert first.cache_miss is not None


@pytest.mark.requirement("G20")
def test_a_sequence_begun_by_another_engine_continues(rig: Any) -> None:
    made = rig({"text": "zzz"}, {"text": "abc"})
    emitted = m.ids_to_bytes([97])
    assert made.output(emitted_ids=emitted, attempt=1) == ("bc<|im_end|>", "stop")
    assert made.output() == ("zzz<|im_end|>", "stop")
    assert made.output() == ("abc<|im_end|>", "stop")
    with pytest.raises(InvalidRequest, match="no entry"):
        made.submit(emitted_ids=m.ids_to_bytes([120]))


def test_the_readiness_of_an_engine_uses_nothing_up(rig: Any) -> None:
    made = rig({"text": "one"})
    made.submit(salt=m.READINESS_SALT, params={"max_tokens": 1})
    made.play()
    assert made.output()[0] == "one<|im_end|>"


def test_a_sequence_that_is_finished_is_played_no_more(rig: Any) -> None:
    made = rig({"text": "abc", "delay_ms": 100})
    number = made.submit()
    made.play(until=0.15)
    assert [event.finish for event in made.engine.finish(number)] == ["abort"]
    assert made.engine.finish(number) == []
    assert not made.engine.has_work()


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"params": {"logprobs": 0}}, "logprobs"),
        ({"params": {"prompt_logprobs": 2}}, "prompt_logprobs"),
        ({"pooling": "last"}, "input"),
    ],
)
def test_requests_without_a_scripted_answer_are_refused(rig: Any, fields: dict[str, Any], named: str) -> None:
    with pytest.raises(InvalidRequest, match="scripted") as caught:
        rig({"text": "one"}).submit(**fields)
    assert caught.value.param == named


def test_a_full_engine_refuses(rig: Any) -> None:
    made = rig({"text": "one", "repeat": True}, max_num_seqs=1, max_queued_requests=1)
    made.submit()
    made.submit()
    with pytest.raises(Overloaded, match="try again later"):
        made.submit()


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (
            "- text: a\n\n- text: [b]\n",
            r"script.yaml, entry 2 \(line 3\): Expected `str",
        ),
        ("- text: a\n  colour: red\n", r"entry 1 \(line 1\): Object contains unknown field `colour`"),
        ("- text: a\n  finish: later\n", r"Invalid enum value 'later' - at `\$.finish`"),
        ("- text: a\n  chunks: 0\n", r"entry 1 \(line 1\): .*>= 1.* - at `\$.chunks"),
        ("- text: a\n  token_ids: [1]\n", "give either text or token_ids"),
        ("- finish: stop\n", "give either text or token_ids"),
        ("- token_ids: [1, 300]\n", "token_ids has 300; the vocabulary is 0 to 299"),
        ("- {text: a, match: {regex: '('}}\n", "match.regex is not a valid regular expression"),
        ("- {text: a, match: ''}\n", "match must not be empty text"),
        ("- {text: a, repeat: false}\n", "repeat must be"),
        ("- {text: a, choices: [{text: b}]}\n", "with choices"),
        ("- {text: a, error: failed, finish: stop}\n", "contradict each other"),
        ("text: a\n", "must be a list of entries"),
        ("- text: 'a\n", "is not valid YAML"),
        ("", "has no entry"),
    ],
)
def test_mistakes_in_a_script_are_named(text: TextModel, tmp_path: Path, content: str, message: str) -> None:
    script = tmp_path / "script.yaml"
    script.write_text(content)
    with pytest.raises(ConfigError, match=message) as caught:
        read_script(script, text.tokenizer, 300)
    assert caught.value.param == "--scripted"


def test_mistakes_in_json_lines_are_named(text: TextModel, tmp_path: Path) -> None:
    script = tmp_path / "script.jsonl"
    script.write_text('{"text": "a"}\n\n{"text": 1}\n')
    with pytest.raises(ConfigError, match=r"script.jsonl, entry 2 \(line 3\)"):
        read_script(script, text.tokenizer, 300)
    script.write_text('{"text": "a"}\n{"text": \n')
    with pytest.raises(ConfigError, match=r"script.jsonl, line 2: not JSON"):
        read_script(script, text.tokenizer, 300)
    with pytest.raises(ConfigError, match="No such file"):
        read_script(tmp_path / "none.jsonl", text.tokenizer, 300)


def test_text_that_the_tokens_cannot_spell_is_refused(tmp_path: Path) -> None:
    import tokenizers

    made = tokenizers.Tokenizer(tokenizers.models.WordLevel({"a": 0, "?": 1}, unk_token="?"))
    made.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    made.save(str(tmp_path / "tokenizer.json"))
    script = tmp_path / "script.yaml"
    script.write_text("- text: a b\n")
    with pytest.raises(ConfigError, match="cannot spell the text: it differs at character 2"):
        read_script(script, TextModel.load(tmp_path).tokenizer, 2)


def test_yaml_and_json_lines_say_the_same(text: TextModel, tmp_path: Path) -> None:
    entries = [{"match": {"contains": ["x"]}, "choices": [{"text": "a"}, {"token_ids": [98]}], "chunks": 2}]
    (tmp_path / "s.yaml").write_text(json.dumps(entries))
    (tmp_path / "s.jsonl").write_text("\n".join(map(json.dumps, entries)))
    made: list[tuple[Entry, ...]] = [
        read_script(tmp_path / name, text.tokenizer, 300) for name in ("s.yaml", "s.jsonl")
    ]
    assert made[0] == made[1]
    assert [output.chunks for output in made[0][0].outputs] == [(2,), (2,)]


@pytest.mark.parametrize(
    "flags",
    [
        {"tensor_parallel_size": 2},
        {"data_parallel_size": 2, "enable_expert_parallel": True},
        {"prefill": 1, "decode": 1},
        {"speculative_method": "ngram"},
        {"kv_events_endpoint": "tcp://*:5557"},
    ],
)
def test_flags_that_need_a_model_are_refused(folder: Path, tmp_path: Path, flags: dict[str, Any]) -> None:
    (tmp_path / "s.jsonl").write_text('{"text": "a"}')
    with pytest.raises(ConfigError, match=r"--scripted and --.*runs no model"):
        config_of(folder, tmp_path / "s.jsonl", **flags)


def test_only_a_server_plays_scripts(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="only with `weft serve`"):
        resolve(from_keywords({"scripted": str(tmp_path)}))
    with pytest.raises(ConfigError, match=r"--scripted .*: No such file"):
        resolve_scripted(from_keywords({"scripted": str(tmp_path)}))


def test_another_tokenizer_brings_its_own_ends_and_any_context(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "s.jsonl").write_text('{"text": "a"}')
    config = config_of(folder, tmp_path / "s.jsonl", max_model_len=100_000)
    assert config.spec.eos_ids == ()
    assert config.kv.max_model_len == 100_000


def test_a_scripted_engine_imports_no_torch() -> None:
    program = "import sys, weft.engine.scripted.scripted; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", program], check=False).returncode == 0


def test_a_beat_sends_all_sequences_together(rig: Any) -> None:
    made = rig({"text": "abcd", "delay_ms": 30, "wait_ms": 10, "beat_ms": 100, "repeat": True})
    numbers = [made.submit()]
    made.clock.advance_to(made.clock.now() + 0.03)
    numbers.append(made.submit())
    played = made.play()
    times = [[when for when, _ in played[number]] for number in numbers]
    assert times[0] == times[1] == pytest.approx([0.07, 0.17, 0.27, 0.37, 0.47], abs=0.002)
