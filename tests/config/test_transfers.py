"""Settings of groups with roles, and the fingerprint that decides if two groups serve the same model."""

from __future__ import annotations

import json
import struct
from pathlib import Path
from typing import Any

import msgspec
import pytest

from tests.config.test_resolve import checkpoint, refused, resolved
from weft.common.errors import ConfigError
from weft.config import devices, transfers
from weft.config.fingerprint import fingerprint
from weft.config.flags import from_keywords
from weft.config.group_settings import compare, shared_settings
from weft.config.media import MediaFacts
from weft.config.sections.all import TransferSection
from weft.config.spec import VisionSpec
from weft.config.transfers import check_installed, proves_secret
from weft.engine.disagg.rank_transfers import transports_of


@pytest.fixture(autouse=True)
def machine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(devices, "gpu_memory", lambda: None)
    monkeypatch.setattr(devices, "available_memory", lambda: 8 << 30)


@pytest.fixture
def folder(tmp_path: Path) -> str:
    made = checkpoint(tmp_path)
    weights(tmp_path, [b"a" * 4096, b"b" * 4096])
    return made


def weights(folder: Path, tensors: list[bytes]) -> None:
    """Write a safetensors file with the given tensors."""
    header, at = {}, 0
    for number, data in enumerate(tensors):
        facts = {"dtype": "U8", "shape": [len(data)], "data_offsets": [at, at + len(data)]}
        header[f"t{number}"] = facts
        at += len(data)
    packed = json.dumps(header).encode()
    file = folder / "model.safetensors"
    file.write_bytes(struct.pack("<Q", len(packed)) + packed + b"".join(tensors))


HOSTS = {"hosts": 2, "group_secret": "file"}


def test_a_group_with_a_role_may_be_on_another_host(folder: str) -> None:
    config = resolved(folder, role="decode", advertise="10.0.0.2", group_secret="file")
    assert transports_of(config) == ("shm", "tcp")


@pytest.mark.parametrize(
    ("value", "names", "secret"),
    [
        ("auto", ("shm",), False),
        ("shm", ("shm",), False),
        ("tcp", ("tcp",), True),
        ("shm,tcp", ("shm", "tcp"), True),
        ("tcp, shm", ("tcp", "shm"), True),
        ("shm,nixl,tcp", ("shm", "tcp"), True),
    ],
)
def test_one_transport_or_a_list_in_order_of_preference(
    folder: str, monkeypatch: pytest.MonkeyPatch, value: str, names: tuple[str, ...], secret: bool
) -> None:
    monkeypatch.setattr(transfers, "NIXL_MODULES", ("no_such_module",))
    config = resolved(folder, role="decode", transfer=value)
    assert transports_of(config) == names
    assert proves_secret(value) is secret
    with pytest.raises(ConfigError, match="not installed"):
        check_installed("nixl")


def test_a_list_has_nixl_where_nixl_is_installed(folder: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(transfers, "NIXL_MODULES", ("json",))
    config = resolved(folder, role="decode", transfer="shm,nixl,tcp")
    assert transports_of(config) == ("shm", "nixl", "tcp")


@pytest.mark.parametrize("value", ["shm,shm", "auto,tcp", "shm,", "tcp,mooncake", ","])
def test_a_bad_list_is_refused(folder: str, value: str) -> None:
    assert "at most once, and no other name" in refused(folder, role="decode", transfer=value)


def test_shared_memory_alone_may_be_chosen_on_several_hosts(folder: str) -> None:
    """Pairs of engines without shared memory find out when they meet."""
    config = resolved(folder, role="decode", advertise="10.0.0.2", transfer="shm", group_secret="file")
    assert transports_of(config) == ("shm",)


def test_the_role_of_a_group_is_in_its_configuration(folder: str) -> None:
    config = resolved(folder, role="decode", transfer="tcp")
    assert (config.transfer.role, config.transfer.transfer) == ("decode", "tcp")
    assert resolved(folder).transfer == TransferSection()


@pytest.mark.requirement("E1")
@pytest.mark.parametrize(
    ("settings", "names"),
    [
        ({"prefill": 2}, ("--prefill 2", "--decode")),
        ({"decode": 2}, ("--decode 2", "--prefill")),
        ({"role": "prefill", "prefill": 1, "decode": 1}, ("--role prefill", "--prefill 1", "--decode 1")),
        ({"role": "decode", **HOSTS, "tensor_parallel_size": 2}, ("--role", "--hosts 2", "several groups")),
    ],
)
def test_settings_that_contradict_each_other_are_refused(
    folder: str, settings: dict[str, Any], names: tuple[str, ...]
) -> None:
    message = refused(folder, **settings)
    assert all(name in message for name in names), message


@pytest.mark.requirement("E1")
def test_an_unknown_key_is_an_error_that_names_the_right_one() -> None:
    with pytest.raises(ConfigError, match="transfer_timeout"):
        from_keywords({"transfer_timout": 3.0})


def test_ranks_of_one_group_have_one_role(folder: str) -> None:
    ours, theirs = (shared_settings(resolved(folder, role=role)) for role in ("prefill", "decode"))
    with pytest.raises(ConfigError, match=r"transfer.role \(--role\)"):
        compare(ours, theirs, "the head", "rank 1")


class TestFingerprint:
    @pytest.mark.requirement("E2")
    def test_how_a_group_divides_the_model_does_not_matter(self, folder: str) -> None:
        one = fingerprint(resolved(folder, role="prefill"))
        assert len(one) == 32
        for settings in (
            {"tensor_parallel_size": 2},
            {"block_size": 32},
            {"max_model_len": 128, "max_num_seqs": 3},
            {"enable_prefix_caching": False},
        ):
            assert fingerprint(resolved(folder, role="decode", **settings)) == one, settings

    def test_what_the_caches_are_made_of_does(self, folder: str) -> None:
        config = resolved(folder)
        seen = {fingerprint(config)}
        for settings in (
            {"dtype": "float32"},
            {"kv_cache_dtype": "fp8"},
            {"quantization": "int8"},
            {"num_hidden_layers_override": 2},
            {"load_format": "dummy"},
            {"load_format": "dummy", "seed": 3},
        ):
            seen.add(fingerprint(resolved(folder, **settings)))
        assert len(seen) == 7

    def test_a_tower_beside_them_does_not(self, folder: str) -> None:
        """A group with a tower hands caches to a group with --language-model-only."""
        config = resolved(folder)
        media = MediaFacts(
            kind="area", patch=4, temporal=2, merge=2, mean=(0.5,) * 3, std=(0.5,) * 3, placeholder=1
        )
        vision = VisionSpec(
            kind="qwen3_vl",
            hidden=8,
            layers=1,
            heads=1,
            intermediate=8,
            activation="gelu",
            output=config.spec.hidden,
            side=2,
            media=media,
        )
        seeing = msgspec.structs.replace(config.spec, vision=vision)
        assert fingerprint(msgspec.structs.replace(config, spec=seeing)) == fingerprint(config)

    @pytest.mark.requirement("E2")
    def test_so_does_each_tensor_of_the_weights(self, folder: str) -> None:
        config = resolved(folder)
        before = fingerprint(config)
        weights(Path(folder), [b"a" * 4096, b"b" * 4096])
        assert fingerprint(config) == before
        weights(Path(folder), [b"a" * 4096, b"c" * 4096])
        assert fingerprint(config) != before
        weights(Path(folder), [b"a" * 4096, b"b" * 4097])
        assert fingerprint(config) != before

    def test_a_copy_at_another_place_is_the_same_model(self, folder: str, tmp_path: Path) -> None:
        config = resolved(folder)
        other = tmp_path / "copy"
        other.mkdir()
        for name in ("config.json", "model.safetensors"):
            (other / name).write_bytes((Path(folder) / name).read_bytes())
        assert fingerprint(msgspec.structs.replace(config, model_path=str(other))) == fingerprint(config)

    def test_a_file_that_is_no_safetensors_is_sampled(self, folder: str) -> None:
        config = resolved(folder)
        file = Path(folder) / "model.safetensors"
        file.write_bytes(b"\xff" * 100_000)
        before = fingerprint(config)
        file.write_bytes(b"\xff" * 50_000 + b"\x00" * 50_000)
        assert fingerprint(config) != before
