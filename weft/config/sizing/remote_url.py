"""URLs of object stores, and the packages that they require.

s3://bucket/prefix, gs://.., az://.., file:///folder    obstore (``pip install "weft[s3]"``)
mooncake://master:50051/prefix                          mooncake-transfer-engine
"""

from __future__ import annotations

import importlib.util
from urllib.parse import urlsplit

from weft.common.errors import ConfigError

FLAG = "--kv-remote"
_OBSTORE = ("s3", "s3a", "gs", "az", "abfs", "abfss", "file")


def check_url(url: str) -> None:
    """Raise ConfigError for a URL that no object store takes, or whose package is missing. No message repeats
    credentials."""
    try:
        parts = urlsplit(url)
    except ValueError:
        raise ConfigError(f"{FLAG} is no URL: use s3://BUCKET/PREFIX", param=FLAG) from None
    if "@" in parts.netloc or (parts.query and parts.scheme != "mooncake"):
        raise ConfigError(
            f"{FLAG}: the URL must not have credentials or options, because process lists and logs show the "
            "URL. Set the environment variables of the store, such as AWS_ACCESS_KEY_ID",
            param=FLAG,
        )
    if parts.scheme == "mooncake":
        package, module, install = "mooncake.store", "mooncake", "mooncake-transfer-engine"
    elif parts.scheme in _OBSTORE:
        package, module, install = "obstore", "obstore", "'weft[s3]'"
    else:
        known = ", ".join(f"{scheme}://" for scheme in (*_OBSTORE, "mooncake"))
        raise ConfigError(f"{FLAG} {url} is no URL of an object store: use one of {known}", param=FLAG)
    if parts.scheme == "file" and (parts.netloc or not parts.path.strip("/")):
        raise ConfigError(f"{FLAG} {url} names no folder of this host: use file:///FOLDER", param=FLAG)
    if not parts.netloc and parts.scheme != "file":
        raise ConfigError(f"{FLAG} {url} names no bucket: use {parts.scheme}://bucket/prefix", param=FLAG)
    if importlib.util.find_spec(module) is None:
        raise ConfigError(f"{FLAG} {url} requires the package {package}: pip install {install}", param=FLAG)
