"""Topology files: their content, refusals before the start, and how groups share a host."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import pytest

from tests.config.test_resolve import GIB, MIB, checkpoint
from tests.support.secret import write_secret
from tests.support.seen import SeeingModels
from weft.common.errors import ConfigError
from weft.config import devices, topology
from weft.config.alone import group_alone
from weft.config.flags import from_keywords
from weft.config.gpus import gpu_environment
from weft.config.group_settings import host_settings
from weft.config.hosts import engines_on, replica_spans
from weft.config.resolved import EngineConfig
from weft.config.topology import (
    Topology,
    face,
    read_topology,
    resolve_groups,
    serves,
    short_form,
)
from weft.engine.ranks.ranks import threads_each
from weft.types import frames


@pytest.fixture
def written(tmp_path: Path) -> Any:
    """Return a function that writes a topology file: the model line, then ``text``."""

    def write(text: str, *, model: bool = True) -> Path:
        file = tmp_path / "topology.yaml"
        head = f"model: {checkpoint(tmp_path)}\nblock-size: 16\n" if model else ""
        file.write_text(head + text)
        return file

    return write


@pytest.fixture(scope="module")
def seeing(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Return a small vision checkpoint."""
    return str(SeeingModels(tmp_path_factory.mktemp("seeing")).folder("qwen3-vl"))


def resolved(file: Path) -> dict[str, EngineConfig]:
    return {group.group: group for group in resolve_groups(read_topology(file))}


def test_groups_have_roles_names_and_flags_of_their_own(written: Any) -> None:
    file = written(
        "front: {port: 8123, fronts: 2}\n"
        "max-num-seqs: 4\n"
        "groups:\n"
        "  - {role: prefill, count: 2, tp: 2}\n"
        "  - {role: decode, max_num_seqs: 8, decode-watermark: 0.1}\n"
        "  - {role: decode, count: 2}\n"
        "  - {role: decode, count: 2, name: spare}\n"
        "  - {name: all}\n"
    )
    found = read_topology(file, {"port": 0})
    assert (found.front.port, found.front.fronts) == (0, 2)
    names = ["prefill0", "prefill1", "decode0", "decode1", "decode2", "spare0", "spare1", "all"]
    assert [group.name for group in found.groups] == names
    of = {group.name: group.config for group in found.groups}
    assert [of[name].transfer.role for name in ("prefill1", "decode2", "spare1", "all")] == [
        "prefill",
        "decode",
        "decode",
        "unified",
    ]
    assert of["prefill1"].parallel.tensor_parallel_size == 2
    assert of["decode0"].parallel.tensor_parallel_size == 1
    assert [of[name].scheduler.max_num_seqs for name in ("prefill0", "decode0", "decode1")] == [4, 8, 4]
    assert of["decode0"].transfer.decode_watermark == 0.1


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("groups: []", "topology.yaml must be a mapping with a list of groups"),
        ("[1]", "topology.yaml must be a mapping with a list of groups"),
        ("groups: [decode]", r"groups\[0\] must be a mapping"),
        ("groups: [{role: decoder}]", r"groups\[0\]: role must be one of decode, encode, prefill, unified"),
        ("groups: [{count: 0}]", r"groups\[0\]: count must be an integer of at least 1"),
        ("groups: [{count: true}]", r"groups\[0\]: count must be an integer"),
        ("groups: [{name: A b}]", r"groups\[0\]: name must have at most 24 characters of a-z"),
        ("groups: [{cuont: 2}]", r"groups\[0\]: unknown key 'cuont'. Did you mean count\?"),
        ("groups: [{max-num-seq: 2}]", r"groups\[0\]: unknown key 'max-num-seq'. Did you mean max-num-seqs"),
        ("groups: [{max-num-seqs: no}]", r"groups\[0\]: max-num-seqs must be an integer"),
        ("groups: [{tp: 2, tensor-parallel-size: 1}]", r"are the same setting: give one of them"),
        ("groups: [{count: 2, count: 3}]", "'count' is given twice"),
        ("groups: [{port: 1}]", r"groups\[0\]: 'port' is a setting of the server: write 'port' under front"),
        ("groups: [{prefill: 1}]", r"groups\[0\]: 'prefill' is not allowed in a topology: list groups"),
        ("groups: [{encode: 1}]", r"groups\[0\]: 'encode' is not allowed in a topology: list groups"),
        ("groups: [{node-rank: 1}]", "unknown key 'node-rank'. Weft has no such setting: set `hosts`"),
        ("role: decode\ngroups: [{}]", "role is a setting of a group: write role under groups"),
        ("grups: [{}]\ngroups: [{}]", "unknown key 'grups'. Did you mean groups"),
        ("front: [1]\ngroups: [{}]", "front must be a mapping"),
        ("front: {prot: 1}\ngroups: [{}]", "front: unknown key 'prot'. Did you mean port"),
        ("front: {tp: 1}\ngroups: [{}]", "front: unknown key 'tp'"),
        ("groups: [{name: a}, {name: a}]", "two groups are called 'a'"),
        ("groups: [{count: 1024}, {}]", "1025 groups are more than the maximum of 1024"),
    ],
)
def test_what_is_wrong_with_a_file(written: Any, text: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        read_topology(written(text, model=False))


@pytest.mark.requirement("E1")
@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            "groups: [{role: prefill}]",
            "role prefill need at least one group with role decode",
        ),
        (
            "groups: [{role: decode}]",
            "role decode need at least one group with role prefill",
        ),
        (
            "groups: [{role: encode, count: 2}]",
            "encode groups need a unified group, or a prefill and a decode group",
        ),
        (
            "groups: [{role: encode}, {role: prefill}]",
            "role prefill need at least one group with role decode",
        ),
        (
            "groups: [{}, {dtype: float64}]",
            "can never work together: --dtype is bfloat16 in unified0",
        ),
        (
            "groups: [{role: decode}, {role: prefill, model: spool-text}]",
            "decode0 and prefill0 .* --model is",
        ),
        ("groups: [{}, {num-hidden-layers-override: 1}]", "--num-hidden-layers-override is None in unified0"),
        ("groups: [{}, {kv-cache-dtype: fp8}]", "--kv-cache-dtype is auto in unified0 and fp8 in unified1"),
        ("groups: [{}, {transfer: tcp}]", "--transfer is auto in unified0 and tcp in unified1"),
        (
            "groups: [{}, {max-model-len: 4096}]",
            "group unified1: --max-model-len 4096 is more than",
        ),
    ],
)
def test_groups_that_cannot_work(written: Any, text: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        resolved(written(text))


def test_settings_that_need_not_be_alike(written: Any) -> None:
    groups = resolved(
        written("groups: [{role: prefill, tp: 2, block-size: 32}, {role: decode, max-model-len: 100}]")
    )
    assert face(tuple(groups.values())).kv.max_model_len == 100
    assert face(tuple(groups.values())).group == "decode0"


def test_memory_and_cores_are_divided_among_all_groups(written: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Caches of all groups together fit the memory that the weights leave for one group."""
    monkeypatch.setattr(devices, "available_memory", lambda: 12 * MIB)
    (alone,) = resolved(written("groups: [{max-num-seqs: 4096}]")).values()
    pair = "[{role: prefill, tp: 2}, {role: decode, count: 2}]"
    groups = resolved(written(f"max-num-seqs: 4096\ngroups: {pair}"))
    sizes = [pool.nbytes(one.dtype) for one in groups.values() for pool in one.kv.pools]
    assert sizes[0] * 2 + sizes[1] + sizes[2] <= alone.kv.pools[0].nbytes(alone.dtype)
    assert sizes[1] == sizes[2] > MIB
    assert {threads_each(one, 8) for one in groups.values()} == {2}
    with pytest.raises(ConfigError, match=r"group decode0: --kv-cache-memory 8M .* for each of 2 ranks"):
        resolved(written("groups: [{role: prefill}, {role: decode, kv-cache-memory: 8M}]"))


def test_far_more_ranks_than_cores_are_refused(written: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(topology, "usable_cores", lambda: 1)
    resolved(written("groups: [{count: 4}]"))
    with pytest.raises(ConfigError, match="5 ranks of 5 groups are too many for the 1 CPU cores"):
        resolved(written("groups: [{count: 5}]"))


def test_gpus_go_to_groups_in_order(written: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(devices, "gpu_memory", lambda: 80 * GIB)

    def seen(text: str, *gpus: str) -> list[str]:
        monkeypatch.setattr(devices, "gpus", lambda: gpus)
        return [
            gpu_environment(group, rank)["CUDA_VISIBLE_DEVICES"]
            for group in resolved(written(f"groups: {text}")).values()
            for rank in range(group.parallel.layout.ranks)
        ]

    assert seen("[{tp: 2}, {}]", "4", "5", "6") == ["4", "5", "6"]
    assert seen("[{count: 3}]", "4", "5") == ["4", "5", "4"]

    def blocks(text: str, *gpus: str) -> int:
        monkeypatch.setattr(devices, "gpus", lambda: gpus)
        monkeypatch.setattr(devices, "gpu_memory", lambda: GIB)
        return resolved(written(f"max-num-seqs: 4096\ngroups: {text}"))["unified0"].kv.pools[0].num_blocks

    assert blocks("[{count: 2}]", "0") < 0.6 * blocks("[{count: 2}]", "0", "1")


@pytest.mark.requirement("E1")
def test_the_short_form() -> None:
    assert short_form(from_keywords({})) is None
    found = short_form(from_keywords({"prefill": 1, "decode": 2, "port": 0, "max_num_seqs": 3}))
    assert found is not None
    assert [group.name for group in found.groups] == ["prefill0", "decode0", "decode1"]
    assert [group.config.transfer.role for group in found.groups] == ["prefill", "decode", "decode"]
    assert {group.config.scheduler.max_num_seqs for group in found.groups} == {3}
    with pytest.raises(
        ConfigError, match="--role decode applies to a single group: use --prefill P --decode D"
    ):
        short_form(from_keywords({"role": "decode"}))
    for settings in ({"decode": 1}, {"prefill": 2}):  # see test_transfers.py
        assert short_form(from_keywords(settings)) is None


def _images(found: Topology) -> dict[str, tuple[bool, bool]]:
    """Return group -> (True if it loads a tower, True if it takes embeddings)."""
    return {
        name: (not config.model.language_model_only, config.transfer.take_embeddings)
        for name, config, _ in found.groups
    }


def test_only_groups_that_encode_load_the_tower(written: Any) -> None:
    found = read_topology(
        written("groups: [{role: encode, count: 2}, {role: prefill}, {role: decode}, {role: unified}]")
    )
    assert _images(found) == {
        "encode0": (True, False),
        "encode1": (True, False),
        "prefill0": (False, True),
        "decode0": (False, False),
        "unified0": (False, True),
    }
    none = read_topology(written("groups: [{role: prefill}, {role: decode}]"))
    assert _images(none) == {"prefill0": (True, False), "decode0": (True, False)}


@pytest.mark.parametrize(
    ("text", "towers"),
    [
        ("groups: [{role: encode}, {language-model-only: false}]", {"encode0", "unified0"}),
        ("language-model-only: false\ngroups: [{role: encode}, {}]", {"encode0", "unified0"}),
        ("language-model-only: true\ngroups: [{role: encode}, {}]", {"encode0"}),
        ("groups: [{role: encode, language-model-only: true}, {}]", set()),  # which is refused later
    ],
)
def test_a_file_can_keep_towers_of_others(written: Any, text: str, towers: set[str]) -> None:
    found = _images(read_topology(written(text)))
    assert {name for name, (tower, _) in found.items() if tower} == towers
    assert found["unified0"][1]


@pytest.mark.parametrize(
    ("text", "takes", "tower"),
    [
        ("groups: [{role: encode}, {take-embeddings: false}]", False, True),
        ("take-embeddings: false\ngroups: [{role: encode}, {}]", False, True),
        ("take-embeddings: false\ngroups: [{role: encode}, {take-embeddings: true}]", True, False),
        ("groups: [{role: encode}, {take-embeddings: false, language-model-only: true}]", False, False),
    ],
)
def test_a_file_can_keep_groups_from_taking_embeddings(
    written: Any, text: str, takes: bool, tower: bool
) -> None:
    """Such a group encodes images itself, as in a file without encode groups."""
    assert _images(read_topology(written(text)))["unified0"] == (tower, takes)


@pytest.mark.parametrize("role", ["decode", "encode"])
def test_only_groups_that_compute_prompts_take_embeddings(written: Any, role: str) -> None:
    """A common setting applies to the other groups; the group's own setting is an error (``resolve``)."""
    common = written(f"take-embeddings: true\ngroups: [{{role: encode}}, {{}}, {{name: one, role: {role}}}]")
    assert not _images(read_topology(common))["one"][1]
    own = written(f"groups: [{{role: encode}}, {{}}, {{name: one, role: {role}, take-embeddings: true}}]")
    assert _images(read_topology(own))["one"][1]


def test_the_short_form_with_groups_that_encode() -> None:
    found = short_form(from_keywords({"prefill": 1, "decode": 1, "encode": 2}))
    assert found is not None
    assert _images(found) == {
        "prefill0": (False, True),
        "decode0": (False, False),
        "encode0": (True, False),
        "encode1": (True, False),
    }
    assert {group.config.transfer.encode for group in found.groups} == {0}
    found = short_form(from_keywords({"encode": 1}))
    assert found is not None
    assert _images(found) == {"unified0": (False, True), "encode0": (True, False)}
    found = short_form(from_keywords({"encode": 1}), towers=True)
    assert found is not None
    assert _images(found) == {"unified0": (True, True), "encode0": (True, False)}
    assert short_form(from_keywords({"encode": 1, "prefill": 1})) is None  # which is refused later


def test_experts_of_other_groups_are_no_matter_of_one_that_encodes(written: Any) -> None:
    found = read_topology(
        written(
            "enable-expert-parallel: true\ngroups: [{role: encode}, {}, {role: encode, name: own, ep: true}]"
        )
    )
    assert {name: config.parallel.enable_expert_parallel for name, config, _ in found.groups} == {
        "encode0": False,
        "unified0": True,
        "own": True,
    }


@pytest.mark.parametrize(
    ("text", "images"),
    [
        ("groups: [{role: encode, tp: 2}, {}]", True),
        ("groups: [{role: encode}, {role: prefill}, {role: decode}]", True),
        ("groups: [{role: encode}, {language-model-only: false}]", True),
        ("groups: [{role: prefill}, {role: decode}]", True),
        ("groups: [{}]", True),
        ("language-model-only: true\ngroups: [{role: prefill}, {role: decode}]", False),
        ("language-model-only: true\ngroups: [{}]", False),
    ],
)
def test_fronts_take_images_where_somebody_encodes_them(
    seeing: str, written: Any, text: str, images: bool
) -> None:
    groups = resolved(written(f"model: {seeing}\ntokenizer: spool-text\nblock-size: 16\n{text}", model=False))
    shown = face(tuple(groups.values()))
    assert shown.transfer.role in ("unified", "decode")
    assert (shown.spec.vision is not None) == images
    assert shown.kv.max_model_len == 512


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("groups: [{role: encode}, {dtype: float64}]", "unified0 and encode0 .* --dtype is float64"),
        (
            "groups: [{role: encode, language-model-only: true}, {}]",
            "group encode0: --role encode loads only",
        ),
        (
            "groups: [{role: encode, model: spool-text}, {}]",
            "group encode0: --role encode: .* no vision tower",
        ),
        ("groups: [{role: encode, tokenizer: spool-text}, {tokenizer: null}]", "tokenizer"),
    ],
)
def test_groups_that_cannot_encode_for_others(seeing: str, written: Any, text: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        resolved(written(f"model: {seeing}\nblock-size: 16\n{text}", model=False))


def test_a_model_without_a_tower_has_nothing_to_encode(written: Any) -> None:
    with pytest.raises(ConfigError, match=r"group encode0: .*vision"):
        resolved(written("groups: [{role: encode}, {}]"))


def test_which_roles_serve() -> None:
    assert serves({"unified", "encode"})
    assert serves({"prefill", "decode", "encode"})
    assert not serves({"encode"})
    assert not serves({"encode", "prefill"})
    assert serves({"unified"})
    assert serves({"prefill", "decode"})
    assert not serves({"prefill"})
    assert not serves({"decode"})
    assert serves({"decode"}, "local")
    assert not serves({"prefill"}, "local")


def test_a_group_over_hosts_runs_alone(written: Any, tmp_path: Path) -> None:
    write_secret(tmp_path)
    file = written(
        f"group-secret: {tmp_path}/secret\nkv-cache-memory: 8M\n"
        "groups:\n  - {name: both, tp: 2, hosts: 2}\n  - {name: near}\n"
    )
    found = read_topology(file)
    with pytest.raises(ConfigError, match="group both: hosts 2: run `weft engine FILE --group NAME`"):
        resolve_groups(found)
    zero, one = (group_alone(found, "both", f"10.0.0.{index}", None, index) for index in (0, 1))
    assert [(config.host.index, config.host.ranks) for config in (zero, one)] == [(0, 1), (1, 1)]
    assert host_settings(zero) == host_settings(one)
    pools = [msgspec.structs.replace(pool, num_blocks=pool.num_blocks + 1) for pool in one.kv.pools]
    larger = msgspec.structs.replace(one, kv=msgspec.structs.replace(one.kv, pools=tuple(pools)))
    assert larger.kv != one.kv
    assert host_settings(zero) == host_settings(larger)
    assert host_settings(zero)["version of frames"] == str(frames.VERSION)
    assert [engines_on(one.parallel, index) for index in (0, 1)] == [[0], []]
    assert replica_spans(one.parallel, 0)
