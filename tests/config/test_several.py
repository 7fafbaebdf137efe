"""Settings of several models: topology files, command lines and folders of models, and their refusals."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import msgspec
import pytest

from tests.config.test_resolve import checkpoint
from weft.cli import main as cli
from weft.common.errors import ConfigError
from weft.config.flags import from_keywords
from weft.config.models.several import (
    from_command_line,
    has_models,
    in_folder,
    memory_budget,
    read_models,
    refuse_models,
    resolve_models,
)
from weft.config.sections.all import FrontSection
from weft.config.topology import read_topology
from weft.front.requests.models.named_model import KeyModels, seconds_of, split_keys

SMALL = "block-size: 16\nkv-cache-memory: 8M\nmax-num-seqs: 2\n"


@pytest.fixture
def folder(tmp_path: Path) -> str:
    return str(checkpoint(tmp_path))


def written(tmp_path: Path, text: str) -> Path:
    file = tmp_path / "models.yaml"
    file.write_text(text)
    return file


def resolved(file: Path, **front: Any) -> Any:
    settings, section = read_models(file, front)
    return resolve_models(settings, section)


def test_each_model_has_its_own_flags_over_the_common_ones(tmp_path: Path, folder: str) -> None:
    file = written(
        tmp_path,
        f"""
model: {folder}
{SMALL}
front: {{port: 8001, models-ttl: 60, tool-call-parser: none}}
models:
  a: {{aliases: [x, y], pin: true, ttl: 5, max-num-seqs: 4}}
  b: {{load: demand, memory: 3G, tool-call-parser: hermes, groups: [{{role: prefill}}, {{role: decode}}]}}
""",
    )
    assert has_models(file)
    a, b = resolved(file)
    assert (a.name, a.config.accepted_names, a.pin, a.ttl, a.starts) == ("a", ("x", "y"), True, 5.0, True)
    assert (b.name, b.pin, b.ttl, b.starts, b.cost) == ("b", False, 60.0, False, 3 << 30)
    assert (a.measured, b.measured) == (True, False)
    assert (a.config.scheduler.max_num_seqs, b.config.scheduler.max_num_seqs) == (4, 2)
    assert (a.section.tool_call_parser, b.section.tool_call_parser) == ("none", "hermes")
    assert [one.group for one in a.groups] == ["a"]
    assert [one.group for one in b.groups] == ["prefill0", "decode0"]
    assert a.section.port == b.section.port == 8001
    # The model of the start counts beside the two ranks of the model on demand.
    assert {one.host.ranks for one in (*a.groups, *b.groups)} == {3}
    with pytest.raises(ConfigError, match="this command takes a topology of one model"):
        read_topology(file)


@pytest.mark.parametrize(
    ("models", "message"),
    [
        ("models: []", "models must be a mapping"),
        ("models: {a: 3}", "models: a must be a mapping"),
        ("models: {a: {colour: red}}", "unknown key 'colour'"),
        ("models: {a: {port: 3}}", "'port' is a setting of the server"),
        ("models: {a: {role: decode}}", "role is a setting of a group"),
        ("models: {a: {load: later}}", "load must be start or demand"),
        ("models: {a: {ttl: 0}}", "ttl must be a number of seconds above 0"),
        ("models: {a: {ttl: .nan}}", "ttl must be a number of seconds above 0"),
        ("models: {a: {pin: 1}}", "pin must be true or false"),
        ("models: {a: {aliases: b}}", "aliases must be a list of names"),
        ("models: {a: {memory: much}}", "memory must be a size"),
        ("models: {a: {served-model-name: b}}", "the key of the model is its name"),
        ("models: {a: {}, b: {aliases: [a]}}", "two models are called a"),
        ("models: {a: {}}\ngroups: [{role: unified}]", "write groups under each model"),
        ("models: {a: {groups: []}}", "groups must be a list"),
        ("models: {a: {groups: [{role: prefill}]}}", "model a: the groups cannot serve requests"),
        ("models: {a: {}}\nfront: {vllm-metrics: true}", "--vllm-metrics is for a server of one model"),
        ("models: {a: {memory: 2G}}\nfront: {models-memory: 1G}", "model a needs 2.00 GiB"),
        (
            "models: {a: {memory: 1G, load: start}, b: {memory: 1G, load: start}}\n"
            "front: {models-memory: 1.5G}",
            "the models that load at the start need 2.00 GiB together",
        ),
    ],
)
def test_wrong_files_are_refused(tmp_path: Path, folder: str, models: str, message: str) -> None:
    file = written(tmp_path, f"model: {folder}\n{SMALL}{models}\n")
    with pytest.raises(ConfigError) as raised:
        resolved(file)
    assert message in raised.value.message


def test_a_limit_of_memory_makes_models_load_on_demand(tmp_path: Path, folder: str) -> None:
    file = written(tmp_path, f"model: {folder}\n{SMALL}models: {{a: {{}}, b: {{load: start}}}}\n")
    a, b = resolved(file, models_memory="4G")
    assert (a.starts, b.starts) == (False, True)
    assert a.ttl == math.inf
    # Weight files, 5% more, and the cache of 8 MiB.
    assert (8 << 20) * 0.9 < a.cost < (64 << 20)
    assert memory_budget(a.section) == 4 << 30


def test_a_folder_of_models(tmp_path: Path, folder: str) -> None:
    models = tmp_path / "models"
    for name in ("b", "a"):
        (models / name).mkdir(parents=True)
        (models / name / "config.json").write_text("{}")
    (models / "empty").mkdir()
    for name in ("c.gguf", "d-00001-of-00002.gguf", "d-00002-of-00002.gguf", "mmproj-c.gguf", "notes.txt"):
        (models / name).touch()
    names = [Path(one).name for one in in_folder(str(models))]
    assert names == ["a", "b", "c.gguf", "d-00001-of-00002.gguf"]
    config = from_keywords({"model": folder, "block_size": 16, "kv_cache_memory": "8M"})
    front = msgspec.structs.replace(config.front, models_dir=str(models))
    config = msgspec.structs.replace(config, front=front)
    named, found = from_command_line(config, [folder])
    # Unusable models of the folder are skipped; a named model must be usable.
    (only,) = resolve_models(named, front, found)
    assert only.name == Path(folder).name
    with pytest.raises(ConfigError, match=r"model .* has no \*.safetensors file"):
        resolve_models(found[:1], front)
    with pytest.raises(ConfigError, match="no model of --models-dir"):
        resolve_models([], front, found[:1])
    with pytest.raises(ConfigError, match="has no subfolder"):
        in_folder(str(models / "empty"))


def test_flags_of_several_models_are_refused_for_one() -> None:
    refuse_models(FrontSection(), "a server of one model")
    with pytest.raises(ConfigError, match="--models-ttl is for a server of several models"):
        refuse_models(FrontSection(models_ttl=3.0), "a server of one model")


def test_keys_may_name_models() -> None:
    keys, of_key = split_keys(
        ["plain", "a:b", "one:small", "two:small+big", ":small"], {"small": "small", "big": "large"}
    )
    assert keys == ("plain", "a:b", "one", "two", ":small")
    assert of_key == {2: ("small",), 3: ("small", "large")}
    allowed = KeyModels(of_key)
    assert [allowed.allow(key, "large") for key in range(5)] == [True, True, False, True, True]
    with pytest.raises(ConfigError, match="KEY:MODEL\\+MODEL"):
        split_keys(["one:small", "one:big"], {"small": "small", "big": "large"})


@pytest.mark.parametrize(
    ("given", "seconds"),
    [(0, 0.0), (1.5, 1.5), (-1, math.inf), ("5m", 300.0), ("-1m", math.inf), ("90", 90.0), ("2h", 7200.0)],
)
def test_keep_alive(given: Any, seconds: float) -> None:
    assert seconds_of(given) == seconds


def test_the_plan_of_several_models_is_printed_and_wrong_commands_are_refused(
    tmp_path: Path, folder: str, capsys: pytest.CaptureFixture[str]
) -> None:
    file = written(
        tmp_path, f"model: {folder}\n{SMALL}models: {{a: {{memory: 2G}}, b: {{load: demand, pin: true}}}}\n"
    )

    def run(*arguments: str) -> tuple[int, str, str]:
        with pytest.raises(SystemExit) as ended:
            cli.main(list(arguments))
        found = capsys.readouterr()
        return int(ended.value.code or 0), found.out, found.err

    status, out, _ = run("up", str(file), "--check")
    lines = out.splitlines()
    assert status == 0
    assert lines[0] == "2 models on 127.0.0.1:8000"
    assert lines[1].split() == ["a", "2.00", "GiB,", "1", "group,", "1", "rank,", "at", "the", "start"]
    assert lines[2].endswith("on demand, pinned")
    for arguments, message in (
        (("front", str(file)), "model a: engines that run alone are always loaded: remove memory"),
        (("serve", folder, folder, "--model", folder), "--model is for one model"),
        (("serve", folder, folder, "--served-model-name", "x"), "--served-model-name is for one model"),
        (("serve", folder, folder), "two models are called"),
        (("serve", folder, "--models-memory", "1G"), "--models-memory is for a server of several models"),
    ):
        status, _, error = run(*arguments)
        assert (status, message in error) == (2, True), (arguments, error)
