"""Settings of Weft's own HTTP clients: keys, URLs, proxies, trusted authorities and certificates."""

from __future__ import annotations

import ssl
from typing import TypedDict
from urllib.parse import urlsplit

from weft.common.errors import ConfigError

LOCAL_HOSTS = ("localhost", "127.0.0.1", "::1")


class ClientOptions(TypedDict):
    """Options of httpx's clients and functions."""

    verify: ssl.SSLContext | bool
    trust_env: bool
    """True to use the proxies of the environment."""


def key_headers(key: str | None) -> dict[str, str]:
    """Return the header with an API key or admin key; {} without a key.

    Raise ConfigError for a key that is not valid in a header.
    """
    if not key:
        return {}
    if not (key.isascii() and key.isprintable()):
        raise ConfigError(
            "the key of the server has characters that are not printable ASCII, which an HTTP header cannot "
            "contain: copy the key again"
        )
    return {"Authorization": f"Bearer {key}"}


def check_url(url: str) -> None:
    """Raise ConfigError unless ``url`` is a URL with a host."""
    import httpx

    try:
        parts = urlsplit(url)
        found = parts.port != 0 and parts.hostname and httpx.URL(url).host
    except (httpx.InvalidURL, ValueError) as error:
        raise ConfigError(f"{url[:200]} is not a URL: {error}", param="--url") from None
    if not found:
        raise ConfigError(
            f"{url[:200]} is not a URL: give a URL such as http://127.0.0.1:8000", param="--url"
        )


def versioned_url(url: str, flag: str = "--url") -> str:
    """Return ``url`` with the ending ``/v1``. Raise ConfigError that names ``flag`` unless the scheme is http
    or https."""
    if not url.startswith(("http://", "https://")):
        raise ConfigError(
            f"{flag} must start with http:// or https://, e.g. http://127.0.0.1:8000", param=flag
        )
    return url.rstrip("/").removesuffix("/v1") + "/v1"


def is_local(url: str) -> bool:
    """Return True if the host of ``url`` is a loopback host."""
    return urlsplit(url).hostname in LOCAL_HOSTS


def client_options(url: str, client_cert: str | None = None) -> ClientOptions:
    """Return httpx's options for requests to ``url``. Arguments as for ``verification``.

    Raise ConfigError for an invalid URL, for an unusable proxy of the environment, and as ``verification``.
    """
    check_url(url)
    if not is_local(url):
        _check_proxies()
    return {"verify": verification(url, client_cert), "trust_env": not is_local(url)}


def _check_proxies() -> None:
    """Raise ConfigError for a proxy of the environment that httpx cannot use, for example SOCKS without the
    package socksio."""
    import httpx

    try:
        httpx.Client(verify=False).close()
    except (ImportError, ValueError, httpx.InvalidURL) as error:
        raise ConfigError(
            f"the proxy of the environment cannot be used ({error}): change HTTP_PROXY, HTTPS_PROXY or "
            "ALL_PROXY"
        ) from None


def verification(url: str, client_cert: str | None = None) -> ssl.SSLContext | bool:
    """Return the value of httpx's ``verify`` for ``url``: a context for https, True for other URLs.

    SSL_CERT_FILE and SSL_CERT_DIR name the trusted authorities, also for loopback hosts. ``client_cert``: PEM
    file with a certificate and its key. Raise ConfigError for an unusable file.
    """
    if not url.lower().startswith("https://"):
        return True
    import httpx

    try:
        context = httpx.create_ssl_context()
    except (OSError, ValueError) as error:
        raise ConfigError(f"SSL_CERT_FILE: the trusted authorities cannot be read ({error})") from None
    if client_cert is not None:
        _load_pair(context, client_cert)
    return context


def _load_pair(context: ssl.SSLContext, file: str) -> None:
    """Load the certificate and the key of ``file``. Raise ConfigError, also for an encrypted key."""
    encrypted = False

    def password() -> str:
        nonlocal encrypted
        encrypted = True
        return ""  # without a password function, OpenSSL prompts on the terminal

    try:
        context.load_cert_chain(file, password=password)
    except OSError as error:  # ssl.SSLError is an OSError
        reason = getattr(error, "reason", None) or error.strerror or "unknown reason"
        if encrypted:
            reason = "the key is encrypted: decrypt the key with `openssl pkey`"
        raise ConfigError(
            f"--client-cert {file}: no certificate with an unencrypted key can be read ({reason})",
            param="--client-cert",
        ) from None
