"""The directory that ``--directory`` names."""

from __future__ import annotations

from weft.common.errors import ConfigError
from weft.control.directory.folder import FolderDirectory
from weft.control.directory.record import Directory

_KNOWN = "folder:PATH, or the path of a folder"


def open_directory(place: str) -> Directory:
    """Return the directory at ``place``: the path of a folder, or a name with a scheme. Raise ConfigError."""
    if not place:
        raise ConfigError(f"give --directory, or set WEFT_DIRECTORY: {_KNOWN}", param="--directory")
    scheme, colon, rest = place.partition(":")
    if not colon or "/" in scheme:
        return FolderDirectory(place)
    if scheme == "folder":
        return FolderDirectory(rest)
    raise ConfigError(
        f"--directory {place}: unknown kind of directory {scheme!r}; use {_KNOWN}", param="--directory"
    )
