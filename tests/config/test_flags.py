"""Settings as flags, keywords and file keys."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import msgspec
import pytest

from weft.common.errors import ConfigError
from weft.config import file, flags
from weft.config.sections.all import Config
from weft.config.sections.media_section import MediaSection, check_media

ROOT = Path(__file__).resolve().parents[2]


def test_the_list_of_flags_is_frozen() -> None:
    assert (ROOT / "docs/flags.txt").read_text() == flags.listing(), (
        "regenerate it on purpose: python -m weft.config.flags > docs/flags.txt"
    )


def test_the_command_prints_the_list() -> None:
    made = subprocess.run(
        [sys.executable, "-m", "weft.config.flags"], capture_output=True, text=True, cwd=ROOT
    )
    assert made.stdout == flags.listing()


def test_every_field_is_a_setting_and_its_default_is_valid() -> None:
    fields = [
        name for section in Config.__struct_fields__ for name in getattr(Config(), section).__struct_fields__
    ]
    assert list(flags.SETTINGS) == fields
    for setting in flags.SETTINGS.values():
        assert setting.description, setting.name
        assert setting.parse(setting.default) == setting.default
        if setting.default is not None and not setting.many:
            assert setting.parse(setting.default_text) == setting.default


def test_defaults_without_keywords() -> None:
    assert flags.from_keywords({}) == Config()


def test_keywords_reach_their_sections() -> None:
    config = flags.from_keywords(
        {
            "model": "some/model",
            "max_model_len": "auto",
            "served_model_name": ["a", "b c"],
            "kv_cache_memory": 1 << 20,
            "enable_prefix_caching": False,
            "max_num_seqs": "3",
            "steps_in_flight": 1,
            "port": 0,
            "drain_timeout": 1,
            "tokenizer": None,
        }
    )
    assert config.model.model == "some/model"
    assert config.model.max_model_len == "auto"
    assert config.model.served_model_name == ("a", "b c")
    assert config.cache.kv_cache_memory == "1048576"
    assert config.cache.enable_prefix_caching is False
    assert config.scheduler.max_num_seqs == 3
    assert config.scheduler.steps_in_flight == 1
    assert config.front.port == 0
    assert config.front.drain_timeout == 1.0
    # The parsed values have the declared types of the sections.
    assert msgspec.convert(msgspec.to_builtins(config), Config) == config


@pytest.mark.parametrize(
    ("name", "value", "told"),
    [
        ("max_num_seqs", 0, "an integer of at least 1 and at most 65536"),
        ("max_num_seqs", 65537, "at most 65536"),
        ("max_num_seqs", True, "an integer"),
        ("max_num_seqs", 1.5, "an integer"),
        ("max_num_seqs", "many", "not 'many'"),
        ("max_num_seqs", None, "an integer"),
        ("max_num_seqs", "9" * 5000, "an integer"),
        ("block_size", 2000, "at most 1024"),
        ("gpu_memory_utilization", 0, "greater than 0 and at most 1"),
        ("gpu_memory_utilization", 1.01, "at most 1"),
        ("gpu_memory_utilization", float("nan"), "a number"),
        ("request_timeout", "inf", "a number greater than 0"),
        ("dtype", "int8", "one of auto, bfloat16, float16, float32, float64"),
        ("steps_in_flight", 3, "one of 0, 1, 2"),
        ("steps_in_flight", True, "one of 0, 1, 2"),
        ("max_model_len", "long", "an integer of at least 1 and at most 1073741824, or auto"),
        ("max_model_len", 0, "of at least 1"),
        ("kv_cache_memory", "4 gigs", "a size such as 512M"),
        ("kv_cache_memory", 0, "a size"),
        ("kv_cache_memory", -5, "a size"),
        ("enable_prefix_caching", "maybe", "true or false"),
        ("enable_prefix_caching", 1, "true or false"),
        ("model", "", "text"),
        ("model", 7, "text"),
        ("served_model_name", [""], "text"),
        ("served_model_name", 7, "text"),
        ("served_model_name", "", "text"),
        ("api_key", " , ", "text"),
    ],
)
def test_a_wrong_value_is_refused_with_the_name_and_the_range(name: str, value: Any, told: str) -> None:
    with pytest.raises(ConfigError) as raised:
        flags.from_keywords({name: value})
    assert raised.value.message.startswith(f"{name} must be ")
    assert told in raised.value.message
    assert raised.value.param == "--" + name.replace("_", "-")


def test_a_wrong_key_is_never_repeated() -> None:
    with pytest.raises(ConfigError) as raised:
        flags.from_keywords({"api_key": ["hunter2", 7]})
    assert "7" not in raised.value.message
    assert "hunter2" not in raised.value.message


def test_an_unknown_keyword_suggests_the_nearest() -> None:
    with pytest.raises(ConfigError, match=r"unknown setting 'max_num_seq'\. Did you mean max_num_seqs\?"):
        flags.from_keywords({"max_num_seq": 1})
    with pytest.raises(ConfigError) as raised:
        flags.from_keywords({"zzzz": 1})
    assert "Did you mean" not in raised.value.message


@pytest.mark.parametrize(
    ("text", "count"),
    [
        ("512M", 512 << 20),
        ("4G", 4 << 30),
        ("1.5GiB", 3 << 29),
        ("1gb", 1 << 30),
        ("64 K", 64 << 10),
        ("123", 123),
        (77, 77),
        ("1T", 1 << 40),
        ("100B", 100),
        ("", None),
        ("G", None),
        ("-1G", None),
        ("0", None),
        ("1e9", None),
        (True, None),
        (1.5, None),
    ],
)
def test_sizes(text: object, count: int | None) -> None:
    assert flags.parse_size(text) == count


def test_a_text_for_many_is_split_and_a_list_is_not() -> None:
    names = flags.SETTINGS["served_model_name"]
    assert names.parse("a,b c") == ("a", "b", "c")
    assert names.parse(["a,b c"]) == ("a,b c",)


def test_the_environment_sets_the_default_log_level(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WEFT_LOG_LEVEL", "WARNING")
    assert flags.from_keywords({}).front.log_level == "warning"
    assert flags.from_keywords({"log_level": "error"}).front.log_level == "error"
    monkeypatch.setenv("WEFT_LOG_LEVEL", "loud")
    with pytest.raises(ConfigError, match="WEFT_LOG_LEVEL must be one of"):
        flags.from_keywords({})


def write(folder: Path, text: str) -> Path:
    path = folder / "weft.yaml"
    path.write_text(text)
    return path


def test_a_file_takes_dashes_and_underscores(tmp_path: Path) -> None:
    text = "model: m\nmax-num-seqs: 8\nmax_model_len: 100\nserved-model-name: [a, b]\n"
    text += "enable-prefix-caching: false\nkv-cache-memory: 4G\ndrain-timeout: 1e-3\ntokenizer: null\n"
    assert file.read_values(write(tmp_path, text)) == {
        "model": "m",
        "max_num_seqs": 8,
        "max_model_len": 100,
        "served_model_name": ("a", "b"),
        "enable_prefix_caching": False,
        "kv_cache_memory": "4G",
        "drain_timeout": 0.001,
        "tokenizer": None,
    }


def test_an_empty_file_sets_nothing(tmp_path: Path) -> None:
    assert file.read_values(write(tmp_path, "# nothing\n")) == {}


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("max-num-seq: 1", "unknown key 'max-num-seq'. Did you mean max-num-seqs?"),
        ("scheduler: {max-num-seqs: 1}", "unknown key 'scheduler'"),
        ("max-num-seqs: 0", "max-num-seqs must be an integer of at least 1"),
        ("max-num-seqs: 1\nmax_num_seqs: 2", "'max_num_seqs' is given twice"),
        ("max-num-seqs: 1\nmax-num-seqs: 2", "'max-num-seqs' is given twice"),
        ("- a\n- b", "must be a flat mapping"),
        ("just words", "must be a flat mapping"),
        ("a: [1", "is not valid YAML"),
        ("port:", "port must be an integer of at least 0 and at most 65535, and the given value is empty"),
        ("port: 1\n---\nport: 2", "expected a single document in the stream, but found another document"),
        ("model: !!python/object/apply:os.system [ls]", "is not valid YAML"),
    ],
)
def test_a_wrong_file_is_refused(tmp_path: Path, text: str, told: str) -> None:
    with pytest.raises(ConfigError) as raised:
        file.read_values(write(tmp_path, text))
    assert "--config weft.yaml" in raised.value.message
    assert told in raised.value.message
    assert str(tmp_path) not in raised.value.message


def test_a_missing_or_binary_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=rf"--config {re.escape(str(tmp_path))}/no\.yaml: No such file"):
        file.read_values(tmp_path / "no.yaml")
    (tmp_path / "weft.yaml").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ConfigError, match="not UTF-8"):
        file.read_values(tmp_path / "weft.yaml")


@pytest.mark.parametrize("alias", flags.ALIASES)
def test_short_names_are_keywords_and_keys(tmp_path: Path, alias: str) -> None:
    name = flags.ALIASES[alias]
    value: Any = True if flags.SETTINGS[name].kind == "bool" else 3
    assert flags.from_keywords({alias: value}) == flags.from_keywords({name: value})
    assert flags.from_keywords({alias: value, name: value}) == flags.from_keywords({name: value})
    text = f"{alias}: {str(value).lower()}\n"
    assert file.read_values(write(tmp_path, text)) == {name: value}
    both = text + f"{name}: {str(value).lower()}\n"
    assert file.read_values(write(tmp_path, both)) == {name: value}


def test_there_are_short_names() -> None:
    assert sorted(flags.ALIASES) == ["dp", "ep", "tp"]


def test_two_names_of_one_setting_with_two_values_are_refused(tmp_path: Path) -> None:
    for keywords in ({"tp": 2, "tensor_parallel_size": 4}, {"tensor_parallel_size": 4, "tp": 2}):
        with pytest.raises(ConfigError) as raised:
            flags.from_keywords(keywords)
        assert "tp 2" in raised.value.message
        assert "tensor_parallel_size 4" in raised.value.message
    for text in ("dp: 2\ndata-parallel-size: 3\n", "data-parallel-size: 3\ndp: 2\n"):
        with pytest.raises(ConfigError) as raised:
            file.read_values(write(tmp_path, text))
        assert "--config weft.yaml" in raised.value.message
        assert "dp 2" in raised.value.message
        assert "data-parallel-size 3" in raised.value.message


def test_a_wrong_value_under_a_short_name_names_it(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"^tp must be an integer"):
        flags.from_keywords({"tp": 0})
    with pytest.raises(ConfigError, match=r"--config weft\.yaml: tp must be an integer"):
        file.read_values(write(tmp_path, "tp: 0\n"))


@pytest.mark.parametrize(
    "entry", ["https://example.org", "example.org/x", "a b", "*.*", "exa*mple.org", "a@b", ""]
)
def test_media_domains_are_hosts(entry: str) -> None:
    with pytest.raises(ConfigError, match="without a scheme or path"):
        check_media(MediaSection(allowed_media_domains=("example.org", entry)))


def test_media_domains() -> None:
    entries = (
        "*",
        "example.org",
        "*.Example.org",
        "example.org:8443",
        "8.8.8.8",
        "[2606:4700::1111]:443",
        "*:99",
    )
    check_media(MediaSection(allowed_media_domains=entries))
