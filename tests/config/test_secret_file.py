"""The file of ``--group-secret`` is read before anything starts, and only its owner may have access."""

from __future__ import annotations

import os
import tempfile
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
    config = config_of(advertise="127.0.0.1", kv_cache_memory="8MiB", group_secret=str(tmp_path / "secret"))
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
    ("mode", "owner", "user", "accepted"),
    [
        (0o440, 0, 10001, True),  # a secret volume of Kubernetes with fsGroup
        (0o400, 0, 10001, True),
        (0o444, 0, 10001, False),
        (0o640, 0, 10001, False),
        (0o460, 0, 10001, False),
        (0o550, 0, 10001, False),
        (0o440, 10001, 10001, False),
        (0o440, 10002, 10001, False),
        (0o440, 0, 0, False),
    ],
)
def test_root_may_lend_a_secret_to_a_group(
    mode: int, owner: int, user: int, accepted: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = write_secret(tmp_path)
    due = file.read_text().encode()
    real = os.stat_result((0o100000 | mode, 1, 1, 1, owner, 10001, len(due), 0, 0, 0))
    monkeypatch.setattr(Path, "stat", lambda self, **_: real)
    monkeypatch.setattr(os, "geteuid", lambda: user)
    if accepted:
        assert read_secret(str(file)) == due
    else:
        with pytest.raises(ConfigError, match=r"other users of this host.*chmod 600"):
            read_secret(str(file))


@pytest.mark.skipif(os.geteuid() != 0, reason="only root makes a file of root and becomes another user")
def test_a_process_of_another_user_reads_a_secret_of_root() -> None:
    """The whole path with real files: owner root, group 10001, mode 0440, and a process of user 10001."""
    with tempfile.TemporaryDirectory() as made:  # tmp_path lies in folders that only this user can enter
        folder = Path(made)
        folder.chmod(0o711)
        file = write_secret(folder)
        os.chown(file, 0, 10001)
        file.chmod(0o440)
        assert status_of_another_user(file) == 0


def status_of_another_user(file: Path) -> int:
    """Return 0 if a process of user and group 10001 can read the secret in ``file``."""
    if (child := os.fork()) == 0:
        status = 1
        try:
            os.setgroups([10001])
            os.setgid(10001)
            os.setuid(10001)
            status = 0 if read_secret(str(file)) else 2
        finally:
            os._exit(status)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


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
