"""Identity of a log (``log.json``) and creation of logs."""

from __future__ import annotations

import contextlib
import json
import os
import uuid
from pathlib import Path
from typing import NamedTuple

from wald.errors import Damaged, InvalidInput, NotFound, NotPermitted, UnsupportedFormat
from wald.files.disk import Disk
from wald.files.layout import TEMPORARY, Root, require_no_link
from wald.files.safe_open import read_regular
from wald.format.names import parse_segment_name

FORMAT_VERSION = 1
_DIRECTORIES = ("segments", "routes", "ledger", "quarantine", "recovery")


class Identity(NamedTuple):
    """Contents of ``log.json``."""

    log_id: bytes
    created: str


def read_identity(root: Root) -> Identity:
    """Read a log's identity. Raise Damaged if a directory is a symbolic link."""
    require_no_links(root)
    try:
        text = read_regular(root.identity)
    except (FileNotFoundError, NotADirectoryError):
        has_lost_identity = _has_lost_identity(root)
        may_become_log = not root.path.exists() or _may_become_log(root.path)
        raise NotFound(
            f"{root.path}: there is no log here",
            case="identity-missing" if has_lost_identity else "no-log" if may_become_log else "not-a-log",
            root=root.path,
        ) from None
    except PermissionError as error:
        raise NotPermitted.from_error(error) from error
    except OSError as error:
        raise Damaged(f"{root.identity}: {error.strerror}", case="root-unreadable", root=root.path) from error
    try:
        fields = json.loads(text)
        version = int(fields["format"])
        if version > FORMAT_VERSION:
            raise UnsupportedFormat(
                f"{root.identity}: format {version} is newer than the {FORMAT_VERSION} this program knows",
                case="newer-format",
            )
        return Identity(uuid.UUID(fields["log"]).bytes, str(fields["created"]))
    except (ValueError, KeyError, TypeError, AttributeError, OverflowError, RecursionError) as error:
        raise Damaged(
            f"{root.identity}: the identity of the log cannot be decoded ({error})",
            case="identity-unreadable",
            root=root.path,
        ) from error


def require_no_links(root: Root) -> None:
    for name in _DIRECTORIES:
        require_no_link(root.path / name)


def require_root(root: Root) -> None:
    if not (root.identity.exists() or root.segments.exists()):
        raise NotFound(
            f'{root.path}: there is no log here, and on_missing_root = "refuse" forbids creating one',
            case="no-log-to-open",
            root=root.path,
        )


def check_root(path: Path) -> None:
    """Raise an error unless ``path`` is a log or can become one."""
    if path.exists() and not path.is_dir():
        raise InvalidInput(f"{path}: not a directory", case="not-a-directory")
    root = Root(path)
    if root.identity.exists():
        read_identity(root)
    elif _has_lost_identity(root):
        raise Damaged(
            f"{root.identity}: is missing, but {root.segments} has segments", case="identity-unreadable", root=path
        )
    elif path.is_dir() and not _may_become_log(path):
        raise InvalidInput(f"{path}: the directory is not empty and not a log", case="not-empty")


def create_root(path: Path, disk: Disk, *, now: str) -> Root:
    """Create a log, or complete an interrupted creation. Idempotent."""
    check_root(path)
    root = Root(path)
    make_directories(root, disk)
    if not root.identity.exists():
        disk.sync_names_above(path)
        # Last and atomically: without an identity, the next start repeats the creation.
        with contextlib.suppress(FileExistsError):  # another daemon was faster
            disk.replace(root.identity, encode_identity(uuid.uuid4(), now=now), exclusive=True)
    read_identity(root)
    return root


def make_directories(root: Root, disk: Disk) -> None:
    disk.make_directory(root.path)
    for name in _DIRECTORIES:
        require_no_link(root.path / name)
        disk.make_directory(root.path / name)


def encode_identity(log_id: uuid.UUID, *, now: str) -> bytes:
    return json.dumps({"log": str(log_id), "format": FORMAT_VERSION, "created": now}).encode() + b"\n"


def _has_lost_identity(root: Root) -> bool:
    """Return True if a root without log.json has segments, except from an unfinished restore."""
    if root.unfinished_identity.exists() or not root.segments.is_dir():
        return False
    return any(parse_segment_name(name) for name in os.listdir(root.segments))


def _may_become_log(path: Path) -> bool:
    """Return True if all names are from a new file system, systemd or an interrupted creation."""
    expected = (*_DIRECTORIES, "lost+found", "wald.sock")
    return path.is_dir() and all(name in expected or name.endswith(TEMPORARY) for name in os.listdir(path))
