"""TLS of the API server: checks of the files, and the context of the server's connections.

``server_context`` reads all files. A server calls the function at the start: a wrong file then ends the start
with an error that names the flag. The server calls the function again for changed files.
"""

from __future__ import annotations

import ssl
from pathlib import Path
from typing import NoReturn

from weft.common.errors import ConfigError
from weft.config.sections.front_section import FrontSection

_BEGIN_CERTIFICATE = b"-----BEGIN CERTIFICATE-----"
_END_KEY = b"PRIVATE KEY-----"


def tls_files(front: FrontSection) -> tuple[str, ...]:
    """Return the paths of all TLS files of the server; empty for plain HTTP."""
    named = (front.ssl_certfile, front.ssl_keyfile, front.ssl_ca_certs)
    return tuple(path for path in named if path is not None)


def check_tls_flags(front: FrontSection) -> None:
    """Check how the TLS flags combine, without the files. Raise ConfigError with the name of a flag."""
    if front.ssl_certfile is None:
        # Without a certificate the server speaks plain HTTP, so every other TLS flag is a mistake.
        for flag, value in (
            ("--ssl-keyfile", front.ssl_keyfile),
            ("--ssl-keyfile-password", front.ssl_keyfile_password),
            ("--ssl-ca-certs", front.ssl_ca_certs),
            ("--ssl-cert-reqs", front.ssl_cert_reqs or None),
        ):
            if value is not None:
                _refuse("--ssl-certfile", f"{flag} requires --ssl-certfile FILE, the server's certificate")
    elif front.ssl_cert_reqs and front.ssl_ca_certs is None:
        _refuse(
            "--ssl-ca-certs", "--ssl-cert-reqs requires --ssl-ca-certs FILE, the authorities of the clients"
        )
    elif front.ssl_ca_certs is not None and not front.ssl_cert_reqs:
        _refuse(
            "--ssl-cert-reqs",
            "--ssl-ca-certs checks nothing without --ssl-cert-reqs: 2 requires a certificate of every "
            "client, 1 checks the certificates of clients that send one",
        )


def server_context(front: FrontSection) -> ssl.SSLContext | None:
    """Return a new context with the certificate, the key and the client authorities; None for plain HTTP.

    Raise ConfigError with the flag of a missing or wrong file.
    """
    check_tls_flags(front)
    if front.ssl_certfile is None:
        return None
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.set_alpn_protocols(["http/1.1"])
    _load_key_pair(context, front)
    if front.ssl_ca_certs is not None:
        _load_authorities(context, front.ssl_ca_certs)
        context.verify_mode = ssl.VerifyMode(front.ssl_cert_reqs)
        # A resumed session skips the check of the client's certificate, so an authority that left the file
        # would stay trusted. Python cannot switch off the session cache of TLS 1.2.
        context.minimum_version = ssl.TLSVersion.TLSv1_3
        context.options |= ssl.OP_NO_TICKET
        context.num_tickets = 0
    return context


def _load_authorities(context: ssl.SSLContext, path: str) -> None:
    """Load the authorities of the clients. Raise ConfigError."""
    _read("--ssl-ca-certs", path, _BEGIN_CERTIFICATE)
    try:
        context.load_verify_locations(cafile=path)
    except ssl.SSLError:
        _refuse("--ssl-ca-certs", f"--ssl-ca-certs: {path} has an invalid certificate")
    except OSError as error:  # the file has vanished since the read above
        _refuse("--ssl-ca-certs", f"--ssl-ca-certs: {path} cannot be read ({error.strerror})")


def _load_key_pair(context: ssl.SSLContext, front: FrontSection) -> None:
    """Load the server's certificate and key. Raise ConfigError."""
    certificate = front.ssl_certfile or ""
    text = _read("--ssl-certfile", certificate, _BEGIN_CERTIFICATE)
    if front.ssl_keyfile is not None:
        _read("--ssl-keyfile", front.ssl_keyfile, _END_KEY)
    elif _END_KEY not in text:
        _refuse("--ssl-keyfile", f"--ssl-keyfile is required: {certificate} has no private key")
    key = front.ssl_keyfile or certificate
    encrypted = False

    def password() -> str:
        nonlocal encrypted
        encrypted = True
        # Without this function OpenSSL would ask at the terminal.
        if front.ssl_keyfile_password is None:
            _refuse(
                "--ssl-keyfile-password",
                f"--ssl-keyfile: the key in {key} is encrypted: give --ssl-keyfile-password, or decrypt the "
                "key",
            )
        return front.ssl_keyfile_password

    try:
        context.load_cert_chain(certificate, key, password)
    except ssl.SSLError as error:
        if error.reason == "KEY_VALUES_MISMATCH":
            _refuse(
                "--ssl-keyfile",
                f"--ssl-keyfile: the key in {key} does not match the certificate in {certificate}",
            )
        if encrypted:  # OpenSSL gives no reason after a wrong password
            _refuse("--ssl-keyfile-password", f"--ssl-keyfile-password does not decrypt the key in {key}")
        _refuse(
            "--ssl-certfile",
            f"--ssl-certfile, --ssl-keyfile: OpenSSL cannot use {certificate} with the key in {key} "
            f"({error.reason or 'unknown reason'})",
        )
    except OSError as error:  # a file has vanished since the reads above
        _refuse(
            "--ssl-certfile",
            f"--ssl-certfile, --ssl-keyfile: {certificate} and {key} cannot be read ({error.strerror})",
        )


def _read(flag: str, path: str, mark: bytes) -> bytes:
    """Return the content of a PEM file. Raise ConfigError for a missing file, or a file without ``mark``."""
    try:
        content = Path(path).read_bytes()
    except OSError as error:
        _refuse(flag, f"{flag}: {path} cannot be read ({error.strerror})")
    if mark not in content:
        what = "certificate" if mark == _BEGIN_CERTIFICATE else "private key"
        _refuse(flag, f"{flag}: {path} has no {what} in PEM format")
    return content


def _refuse(flag: str, message: str) -> NoReturn:
    raise ConfigError(message, param=flag) from None
