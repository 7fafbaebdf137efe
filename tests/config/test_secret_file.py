"""The file of ``--group-secret`` is read before anything starts, and only its owner may have access."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.faults.rig import config_of
from tests.support.secret import write_secret
from weft.common.errors import ConfigError
from weft.config.secret_file import LEAST_BYTES, check_secrets, read_secret, warn_of_readable_keys

TCP = {"role": "prefill", "transfer": "tcp", "kv_cache_memory": "8MiB"}


def test_groups_that_speak_over_tcp_need_a_secret(tmp_path: Path) -> None:
    check_secrets([config_of()])
    check_secrets([config_of(**{**TCP, "transfer": "shm"})])
    with pytest.raises(ConfigError, match=r"--transfer tcp requires --group-secret FILE.*openssl rand"):
        check_secrets([config_of(), config_of(**TCP)])
    check_secrets([config_of(**TCP, group_secret=str(write_secret(tmp_path)))])


def test_a_secret_that_cannot_serve_is_refused_with_a_way_out(tmp_path: Path) -> None:
    hosts = {"nnodes": 2, "rdzv": "127.0.0.1:5799", "data_parallel_size": 2, "kv_cache_memory": "8MiB"}
    config = config_of(**hosts, group_secret=str(tmp_path / "secret"))
    with pytest.raises(ConfigError, match=r"can't be read .No such file or directory.: make one"):
        check_secrets([config])
    file = write_secret(tmp_path, "x" * (LEAST_BYTES - 1))
    with pytest.raises(ConfigError, match="at least 16 bytes"):
        check_secrets([config])
    file.write_text("x" * LEAST_BYTES)
    check_secrets([config])
    for mode in (0o640, 0o604, 0o620):
        file.chmod(mode)
        with pytest.raises(ConfigError, match=r"other users of this host.*chmod 600"):
            read_secret(str(file))


@pytest.mark.parametrize(
    ("content", "secret"),
    [
        ("api-key: [one]\nport: 1\n", True),
        ("admin_key: one\n", True),
        ("front: {api-key: one}\ngroups: [{role: unified}]\n", True),
        ("port: 1\nserved-model-name: api-key\n", False),
        ("", False),
    ],
)
def test_keys_that_others_can_read_are_told(
    content: str, secret: bool, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    file = tmp_path / "weft.yaml"
    file.write_text(content)
    for mode, told in ((0o600, False), (0o644, secret), (0o620, secret)):
        file.chmod(mode)
        caplog.clear()
        warn_of_readable_keys(str(file))
        assert bool(caplog.records) == told, oct(mode)
        assert all(f"chmod 600 {file}" in record.getMessage() for record in caplog.records)
        assert "one" not in caplog.text.replace(str(file), "")
    warn_of_readable_keys(None)
