"""Identity of a log, stored in ``log.json``.

The identity of a log, ``log.json``: whether a directory is a log, and the making of one.
"""

from __future__ import annotations

import contextlib
import json
import os
import uuid
from dataclasses import dataclass
from pathlib import Path

from wald.errors import Damaged, InvalidInput, NotFound, NotPermitted, UnsupportedFormat
from wald.files.disk import Disk
from wald.files.layout import TEMPORARY, Root, require_no_link
from wald.files.safe_open import read_regular
from wald.format.names import parse_segment_name

FORMAT_VERSION = 1
_FOLDERS = ("segments", "routes", "ledger", "quarantine", "recovery")


@dataclass(frozen=True, slots=True)
class Identity:
    """What ``log.json`` says."""

    log_id: bytes
    created: str


def read_identity(root: Root) -> Identity:
    """The identity of the log in ``root``.

    Every program begins with it, so none goes on where a directory of the log is elsewhere.

    Raises:
        NotFound: there is no log.
        NotPermitted: this user may not read it.
        UnsupportedFormat: it was written by a newer wald.
        Damaged: ``log.json`` is not readable, or a directory of the log is a symbolic link.
    """
    require_folders(root)
    try:
        text = read_regular(root.identity)
    except (FileNotFoundError, NotADirectoryError):
        raise _no_log(root.path) from None
    except PermissionError as error:
        raise NotPermitted.of(error) from error
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
            f"{root.identity}: not the identity of a log ({error})",
            case="identity-unreadable",
            root=root.path,
        ) from error


def require_folders(root: Root) -> None:
    """
    Raises:
        Damaged: a directory of the log is a symbolic link.
    """
    for folder in _FOLDERS:
        require_no_link(root.path / folder)


def _no_log(path: Path) -> NotFound:
    """Return the error for a path at which there is no log."""
    is_lost = _has_lost_its_identity(Root(path))
    is_free = not path.exists() or _may_become_a_log(path)
    return NotFound(
        f"{path}: there is no log here",
        case="identity-missing" if is_lost else "no-log" if is_free else "not-a-log",
        root=path,
    )


def _has_lost_its_identity(root: Root) -> bool:
    """Whether segments are there, and no restore was about to make a log of them."""
    if root.unfinished_identity.exists() or not root.segments.is_dir():
        return False
    return any(parse_segment_name(name) for name in os.listdir(root.segments))


def check_root(path: Path) -> None:
    """Check that ``path`` is a log, or can be made one.

    Raises:
        InvalidInput: the path is not a directory, or holds files that are not a log's.
        Damaged: there are segments, and nothing says which log they belong to.
        WaldError: as :func:`read_identity`, of a log that is there.
    """
    if path.exists() and not path.is_dir():
        raise InvalidInput(f"{path}: not a directory", case="not-a-directory")
    root = Root(path)
    if root.identity.exists():
        read_identity(root)
    elif _has_lost_its_identity(root):
        raise Damaged(
            f"{root.identity}: missing, though {root.segments} holds segments", case="identity-unreadable", root=path
        )
    elif path.is_dir() and not _may_become_a_log(path):
        raise InvalidInput(f"{path}: not empty, and not a log", case="not-empty")


def create_root(path: Path, disk: Disk, *, now: str) -> Root:
    """Make ``path`` a root if it is not one yet; what exists is left as it is.

    Raises:
        InvalidInput: the path is not a directory, or holds files that are not a log's.
        Damaged: there are segments, and nothing says which log they belong to.
    """
    check_root(path)
    root = Root(path)
    make_directories(root, disk)
    if not root.identity.exists():
        disk.sync_names_above(path)
        # Last, and in one step: a root without it is one whose making was interrupted, and is made again.
        with contextlib.suppress(FileExistsError):  # two daemons started at once: the log has one identity
            disk.replace(root.identity, encode_identity(uuid.uuid4(), now=now), exclusive=True)
    read_identity(root)
    return root


def make_directories(root: Root, disk: Disk) -> None:
    """Make the directory of a log, and those in it; what exists is left as it is."""
    disk.make_directory(root.path)
    for folder in _FOLDERS:
        require_no_link(root.path / folder)
        disk.make_directory(root.path / folder)


def encode_identity(log_id: uuid.UUID, *, now: str) -> bytes:
    """The content of ``log.json``."""
    return json.dumps({"log": str(log_id), "format": FORMAT_VERSION, "created": now}).encode() + b"\n"


def require_root(path: Path) -> None:
    """
    Raises:
        NotFound: there is no log at ``path``, nor what is left of one.
    """
    root = Root(path)
    if not (root.identity.exists() or root.segments.exists()):
        raise NotFound(
            f'{path}: there is no log here, and on_missing_root = "refuse" forbids creating one',
            case="no-log-to-open",
            root=path,
        )


def _may_become_a_log(path: Path) -> bool:
    return path.is_dir() and not any(map(_foreign, os.listdir(path)))


def _foreign(name: str) -> bool:
    """Not ours, and not what a fresh file system, an interrupted making or systemd's socket leaves behind."""
    return name not in (*_FOLDERS, "lost+found", "wald.sock") and not name.endswith(TEMPORARY)
