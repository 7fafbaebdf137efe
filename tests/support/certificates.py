"""A certificate authority for tests, made with the openssl command."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path
from typing import NamedTuple

HAVE_OPENSSL = shutil.which("openssl") is not None
_KEY = ("-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1")


class Pair(NamedTuple):
    """Paths of a certificate and its key."""

    certificate: Path
    key: Path


class Authority:
    """An authority with files in a folder. ``certificate`` is the file that clients trust."""

    def __init__(self, folder: Path, name: str = "authority") -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._folder = folder
        self.certificate, self._key = folder / f"{name}.pem", folder / f"{name}.key"
        _openssl(name, self.certificate, self._key, "-addext", "basicConstraints=critical,CA:TRUE")

    def issue(self, name: str, password: str | None = None) -> Pair:
        """Make a certificate for 127.0.0.1 and localhost, signed by this authority, and its key."""
        made = Pair(self._folder / f"{name}.pem", self._folder / f"{name}.key")
        signed = ("-CA", str(self.certificate), "-CAkey", str(self._key))
        hosts = ("-addext", "subjectAltName=IP:127.0.0.1,DNS:localhost")
        own = ("-addext", "basicConstraints=critical,CA:FALSE")
        _openssl(name, *made, *signed, *hosts, *own, password=password)
        return made


def _openssl(name: str, certificate: Path, key: Path, *more: str, password: str | None = None) -> None:
    """Run ``openssl req -x509`` with a new key, encrypted with ``password`` if given."""
    command = ["openssl", "req", "-x509", *_KEY, "-days", "2", "-subj", f"/CN={name}", *more]
    command += ["-noenc"] if password is None else ["-passout", f"pass:{password}"]
    command += ["-keyout", str(key), "-out", str(certificate)]
    subprocess.run(command, check=True, capture_output=True)
