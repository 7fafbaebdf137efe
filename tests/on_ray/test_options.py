"""Flags of ``weft up`` with and without ``--on ray``. Nothing starts."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest
from click.testing import CliRunner

from weft.cli.serve.up import up
from weft.common.errors import ConfigError, EngineDead
from weft.config.models.alone import named_topology
from weft.config.models.several import read_models
from weft.config.sections.all import Config, FrontSection, ParallelSection
from weft.config.topology import GroupSettings, Topology, read_topology
from weft.on_ray.offered_text import text_for_groups

TOPOLOGY = """
model: spool-text
threads: 2
groups:
  - {role: prefill}
  - {role: decode, count: 2}
"""


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--stop",), "--stop needs --on ray"),
        (("--name", "shop"), "--name needs --on ray"),
        (("--ray-address", "auto"), "--ray-address needs --on ray"),
        (("--on", "ray", "--name", "shop/prod"), "--name must have"),
    ],
)
def test_flags_of_another_place_are_refused(tmp_path: Path, arguments: tuple[str, ...], message: str) -> None:
    refused = run(tmp_path, *arguments)
    assert message in refused


def test_several_api_servers_are_refused(tmp_path: Path) -> None:
    pytest.importorskip("ray", reason="ray is not installed: pip install weft[ray]")
    assert "--fronts is not for --on ray" in run(tmp_path, "--on", "ray", "--fronts", "2", "--check")


def test_a_check_starts_nothing(tmp_path: Path) -> None:
    pytest.importorskip("ray", reason="ray is not installed: pip install weft[ray]")
    # No cluster is at the address, so a connection would fail.
    shown = run(tmp_path, "--on", "ray", "--ray-address", "127.0.0.1:1", "--check")
    lines = [line.split() for line in shown.splitlines()]
    assert lines[-3:] == [
        ["prefill0", "prefill", "2", "CPU"],
        ["decode0", "decode", "2", "CPU"],
        ["decode1", "decode", "2", "CPU"],
    ]


@pytest.mark.parametrize(
    ("file", "shown"), [("one-node", "2 CPU"), ("two-nodes", "1 CPU on each of 2 nodes")]
)
def test_examples_for_ray_are_right(file: str, shown: str) -> None:
    pytest.importorskip("ray", reason="ray is not installed: pip install weft[ray]")
    path = Path(__file__).parents[2] / "examples" / "ray" / f"{file}.yaml"
    ran = CliRunner().invoke(up, [str(path), "--on", "ray", "--check"])
    assert ran.output.splitlines()[-1].split(maxsplit=2) == ["unified0", "unified", shown]


def test_labels_choose_nodes() -> None:
    pytest.importorskip("ray", reason="ray is not installed: pip install weft[ray]")
    from weft.on_ray.server import plans_of

    def labels(given: str) -> list[dict[str, str]]:
        section = ParallelSection(ray_labels=given)
        group = GroupSettings("decode0", msgspec.structs.replace(Config(), parallel=section), "decode")
        return [plan.labels for plan in plans_of(Topology(FrontSection(), (group,)))]

    assert labels("") == [{}]
    assert labels("zone=a, disk=!hdd") == [{"zone": "a", "disk": "!hdd"}]
    for wrong in ("zone", "zone=", "=a", "zone=a=b"):
        with pytest.raises(ConfigError, match="NAME=VALUE"):
            labels(wrong)


def test_labels_of_nodes_need_ray(tmp_path: Path) -> None:
    labelled = TOPOLOGY.replace("{role: prefill}", "{role: prefill, ray-labels: zone=a}")
    assert "--ray-labels: labels choose among nodes of Ray" in run(tmp_path, "--check", topology=labelled)
    pytest.importorskip("ray", reason="ray is not installed: pip install weft[ray]")
    assert "zone=a" in run(tmp_path, "--on", "ray", "--check", topology=labelled)


def test_a_model_in_a_relative_folder_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("ray", reason="ray is not installed: pip install weft[ray]")
    monkeypatch.chdir(tmp_path)
    (tmp_path / "qwen").mkdir()
    refused = run(
        tmp_path, "--on", "ray", "--check", topology=TOPOLOGY.replace("model: spool-text", "model: ./qwen")
    )
    assert f"the same path on each node: {tmp_path}/qwen" in refused


def test_flags_reach_the_groups_and_keys_stay_here(tmp_path: Path) -> None:
    front = "front: {port: 8000, drain-timeout: 40, api-key: [sk-1], admin-key: [sk-2]}\n"
    file = tmp_path / "shop.yaml"
    file.write_text(TOPOLOGY + front)
    topology = read_topology(file, {"drain_timeout": 600.0, "log_level": "debug"})
    text = text_for_groups(str(file), topology.front)
    assert "sk-" not in text
    (tmp_path / "sent.yaml").write_text(text)
    sent = read_topology(tmp_path / "sent.yaml")
    assert sent.groups == topology.groups
    assert (sent.front.drain_timeout, sent.front.log_level) == (600.0, "debug")


MODELS = """
threads: 2
front: {port: 8000, drain-timeout: 40, api-key: [sk-1]}
models:
  text: {model: spool-text, threads: 1}
  Pairs: {model: spool-mla, aliases: [x], groups: [{role: prefill, name: p}, {role: decode, name: d}]}
"""


def test_each_of_several_models_is_a_server_of_its_own(tmp_path: Path) -> None:
    pytest.importorskip("ray", reason="ray is not installed: pip install weft[ray]")
    shown = run(tmp_path, "--on", "ray", "--check", topology=MODELS)
    assert [line.split() for line in shown.splitlines()] == [
        ["text", "as", "server", "shop-text", "on", "Ray:"],
        ["text", "unified", "1", "CPU"],
        ["Pairs", "as", "server", "shop-pairs", "on", "Ray:"],
        ["p", "prefill", "2", "CPU"],
        ["d", "decode", "2", "CPU"],
    ]
    settings, front = read_models(tmp_path / "shop.yaml", {})
    for one in settings:
        sent = tmp_path / f"{one.name}.yaml"
        sent.write_text(text_for_groups(str(tmp_path / "shop.yaml"), front, one.name))
        assert "sk-" not in sent.read_text()
        assert read_topology(sent).groups == named_topology(one).groups


def run(folder: Path, *arguments: str, topology: str = TOPOLOGY) -> str:
    """Run ``weft up``. Return its output, with the message of an error."""
    file = folder / "shop.yaml"
    file.write_text(topology)
    file.chmod(0o600)
    ran = CliRunner().invoke(up, [str(file), *arguments])
    return ran.output + str(ran.exception or "")


def test_a_cluster_that_wants_a_token_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    ray = pytest.importorskip("ray", reason="ray is not installed: pip install weft[ray]")
    from weft.on_ray.server import connect

    def refused(**_: object) -> None:
        raise ConnectionError("Failed to connect") from ray.exceptions.AuthenticationError("InvalidAuthToken")

    monkeypatch.setattr(ray, "init", refused)
    monkeypatch.setattr(ray, "is_initialized", lambda: False)
    with pytest.raises(EngineDead, match="RAY_AUTH_MODE=token"):
        connect("")
