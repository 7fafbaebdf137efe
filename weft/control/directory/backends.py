"""The directory that ``--directory`` names."""

from __future__ import annotations

from weft.common.errors import ConfigError
from weft.control.directory.cached import CachedDirectory
from weft.control.directory.folder import FolderDirectory
from weft.control.directory.kubernetes import KubernetesGroups
from weft.control.directory.polled import PolledDirectory, PortDirectory
from weft.control.directory.record import DirectoryReader, DirectoryWriter

_ENGINES = "the path of a folder, or `port` to publish at the group's own HTTP port (--port)"
_FRONTS = (
    "the path of a folder, http://HOST:PORT,.. for the HTTP ports of groups, or kubernetes:SERVICE for the "
    "pods of a headless Service"
)


def directory_for_engine(place: str, has_port: bool) -> DirectoryWriter:
    """Return the directory at ``place`` for a group that publishes. ``has_port``: True if the group has an
    HTTP port. Raise ConfigError."""
    if place == "port":
        if not has_port:
            raise ConfigError("--directory port: give --port, where API servers ask", param="--port")
        return PortDirectory()
    return _folder(place, _ENGINES)


def directory_for_front(place: str, key: str = "") -> DirectoryReader:
    """Return the directory at ``place`` for an API server, which reads. ``key``: admin key of the groups.
    Raise ConfigError."""
    if place == "port":
        raise ConfigError(f"--directory port is for engines; use {_FRONTS}", param="--directory")
    if place.startswith("http://"):
        urls = [url.strip().rstrip("/") for url in place.split(",")]
        return PolledDirectory(lambda: urls, key)
    if place.startswith("kubernetes:"):
        service, _, namespace = place.removeprefix("kubernetes:").partition("/")
        return PolledDirectory(KubernetesGroups(service, namespace).urls, key)
    return CachedDirectory(_folder(place, _FRONTS))


def _folder(place: str, known: str) -> FolderDirectory:
    if not place:
        raise ConfigError(f"give --directory, or set WEFT_DIRECTORY: {known}", param="--directory")
    scheme, colon, rest = place.partition(":")
    if not colon or "/" in scheme:
        return FolderDirectory(place)
    if scheme == "folder":
        return FolderDirectory(rest)
    raise ConfigError(
        f"--directory {place}: unknown kind of directory {scheme!r}; use {known}", param="--directory"
    )
