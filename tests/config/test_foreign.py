"""Settings in vLLM's and SGLang's spelling are accepted if Weft has the same setting, otherwise refused by
name.
"""

from __future__ import annotations

import re
from typing import Any

import pytest

from weft.cli.serve.engine import engine
from weft.common.errors import ConfigError
from weft.config import foreign
from weft.config.file import parse_values
from weft.config.flags import ALIASES, SETTINGS, from_keywords, suggest


@pytest.mark.parametrize(
    ("given", "meant"),
    [
        ("--max_model_len 8", "--max-model-len 8"),
        ("--max_model_len=8_0", "--max-model-len=8_0"),
        (
            "-tp 2 -dp=3 -ep -q fp8",
            "--tensor-parallel-size 2 --data-parallel-size=3 --enable-expert-parallel --quantization fp8",
        ),
        ("--enforce-eager", "--no-decode-graphs"),
        ("--enable-log-requests", "--log-requests"),
        ("--disable-log-requests", "--no-log-requests"),
        ("-h a_b --x_y -- --a_b", "-h a_b --x-y -- --a_b"),
    ],
)
def test_arguments(given: str, meant: str) -> None:
    assert foreign.arguments(given.split()) == meant.split()


def test_speculation_of_vllm_becomes_flags() -> None:
    text = '{"method": "ngram", "num_speculative_tokens": 4, "prompt_lookup_max": 5, "prompt_lookup_min": 3}'
    expected = ["--speculative-method", "ngram", "--num-speculative-tokens", "4"]
    expected += ["--ngram-max-length", "5", "--ngram-min-length", "3"]
    assert foreign.arguments(["--speculative-config", text]) == expected
    assert foreign.arguments([f"--speculative_config={text}"]) == expected
    for given in (text, {"method": "ngram", "num_speculative_tokens": 4}):
        section = from_keywords({"speculative_config": given}).speculation
        assert (section.speculative_method, section.num_speculative_tokens) == ("ngram", 4)
    assert foreign.speculation({"method": "deepseek_mtp"}) == {"speculative_method": "mtp"}
    drafted = {"speculative_method": "draft", "speculative_model": "a/b"}
    assert foreign.speculation({"model": "a/b"}) == drafted
    assert foreign.speculation({"model": "a/b", "method": "draft_model"}) == drafted


@pytest.mark.parametrize("wrong", ["", "{", "[]", "3", '{"draft_tensor_parallel_size": 1}'])
def test_wrong_speculation_is_refused(wrong: str) -> None:
    with pytest.raises(ConfigError, match="--speculative-config"):
        foreign.arguments(["--speculative-config", wrong])


@pytest.mark.requirement("E36")
def test_events_config() -> None:
    text = '{"enable_kv_cache_events": true, "endpoint": "tcp://*:1", "replay_endpoint": "tcp://*:2", '
    text += '"topic": "kv@pod@m", "buffer_steps": 5, "publisher": "zmq", "hwm": 1, "max_queue_size": 2}'
    expected = ["--kv-events-endpoint", "tcp://*:1", "--kv-events-replay-endpoint", "tcp://*:2"]
    expected += ["--kv-events-topic", "kv@pod@m", "--kv-events-buffer", "5"]
    assert foreign.arguments(["--kv-events-config", text]) == expected
    section = from_keywords({"kv_events_config": text}).events
    assert (section.kv_events_endpoint, section.kv_events_buffer) == ("tcp://*:1", 5)
    assert foreign.events({"enable_kv_cache_events": True}) == {"kv_events_endpoint": "tcp://*:5557"}
    for off in ("{}", '{"publisher": "zmq"}', '{"enable_kv_cache_events": true, "publisher": "null"}'):
        assert foreign.arguments(["--kv-events-config", off]) == []


@pytest.mark.parametrize(
    "wrong", ["", "[]", '{"publisher": "kafka"}', '{"enable_kv_cache_events": true, "x": 1}']
)
def test_wrong_events_config_is_refused(wrong: str) -> None:
    with pytest.raises(ConfigError, match="--kv-events-config"):
        foreign.arguments(["--kv-events-config", wrong])


@pytest.mark.parametrize(
    ("name", "value", "meant"),
    [
        ("dtype", "half", "float16"),
        ("dtype", "float", "float32"),
        ("kv_cache_dtype", "fp8_e4m3", "fp8"),
        ("limit_mm_per_prompt", '{"image": 4}', 4),
        ("limit_mm_per_prompt", '{"image": 4, "video": 0}', 4),
        ("limit_mm_per_prompt", {"image": {"count": 4, "width": 9}}, 4),
        ("limit_mm_per_prompt", "image=4", 4),
        ("limit_mm_per_prompt", "4", 4),
        ("limit_mm_per_prompt", 4, 4),
    ],
)
def test_values(name: str, value: Any, meant: Any) -> None:
    assert SETTINGS[name].parse(value) == meant
    config = from_keywords({name: value})
    assert getattr(getattr(config, SETTINGS[name].section), name) == meant
    assert parse_values({name: value}, "file", "--config") == {name: meant}


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("dtype", "quarter"),
        ("kv_cache_dtype", "fp8_e5m2"),
        ("limit_mm_per_prompt", '{"video": 4}'),
        ("limit_mm_per_prompt", '{"image": 4, "audio": 1}'),
        ("limit_mm_per_prompt", '{"image": "x"}'),
        ("limit_mm_per_prompt", '{"image": {}}'),
        ("limit_mm_per_prompt", "{"),
        ("limit_mm_per_prompt", "[" * 10_000),
    ],
)
def test_values_that_mean_something_else_are_refused(name: str, value: Any) -> None:
    with pytest.raises(ConfigError, match=SETTINGS[name].flag):
        SETTINGS[name].parse(value)


def test_what_weft_lacks_is_refused_with_what_it_does() -> None:
    with pytest.raises(ConfigError, match="pipeline parallelism"):
        foreign.arguments(["-pp", "2"])
    with pytest.raises(ConfigError, match="--max-loras"):
        from_keywords({"enable_lora": True})
    with pytest.raises(ConfigError, match="use --max-num-seqs"):
        parse_values({"max-running-requests": 4}, "file", "--config")


def test_the_table_names_flags_that_exist_and_none_that_weft_has() -> None:
    known = {setting.key for setting in SETTINGS.values()} | set(ALIASES)
    known |= {f"no-{setting.key}" for setting in SETTINGS.values() if setting.kind == "bool"}
    known |= {option.opts[0].lstrip("-") for option in engine.params}
    for name, instead in foreign.INSTEAD.items():
        assert name not in SETTINGS, name
        assert set(re.findall(r"--([a-z-]+)", instead)) <= known, name
    for field in foreign.SAME.values():
        assert field.removeprefix("no_") in SETTINGS
    assert {flag[2:] for flag in foreign.SHORT.values()} <= known


@pytest.mark.parametrize(
    ("name", "meant"),
    [
        ("--root-pth", "--root-path"),
        ("--tensor-paralel-size", "--tensor-parallel-size"),
        ("--max-num-sequences", None),
        ("--cheap-path", None),
        ("-z", None),
    ],
)
def test_only_misspellings_get_a_suggestion(name: str, meant: str | None) -> None:
    known = [setting.flag for setting in SETTINGS.values()]
    expected = "" if meant is None else f" Did you mean {meant}?"
    assert foreign.unknown(name, known) == expected
    assert suggest(name, known) == expected
