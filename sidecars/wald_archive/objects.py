"""Destinations of bags, and the names in them. A name contains the route and the first sequence in 20 digits.

A destination is a directory on any mounted file system, or an object store that fsspec can address. A file is
created, written from start to end in large pieces, synced, and never touched again: no rename and no overwriting. That
suits a tape (LTFS) as well as a disk. An object is written whole, and appears at the end or not at all. A file of an
interrupted run is compared with the new data: in a directory its missing end is appended, and any difference is
refused.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from textwrap import shorten
from typing import Any

from wald.errors import DiskFailure, InvalidInput, Refused, WaldError
from wald.files.disk import Disk
from wald.files.layout import require_no_link
from wald.format.batch import Buffer
from wald.format.names import DIGITS

PAYLOAD = "data"
MANIFEST = "manifest.json"
DIGEST_SUFFIX = ".sha256"
_LEFT_BY_DESKTOPS = frozenset({"Thumbs.db", "desktop.ini", ".DS_Store", ".directory", "@eaDir"})
_BAG = re.compile(rf"([0-9]{{{DIGITS}}})-([0-9]{{{DIGITS}}})")


@dataclass(frozen=True, slots=True, order=True)
class BagName:
    """Name of a bag, which holds the records of a route packed by one run."""

    route: str
    first: int
    last: int

    def __str__(self) -> str:
        """Return its directory below the destination.

        >>> str(BagName("web", 1, 250))
        'web/00000000000000000001-00000000000000000250'
        """
        return f"{self.route}/{self.first:0{DIGITS}d}-{self.last:0{DIGITS}d}"


def parse_bag_name(route: str, folder: str) -> BagName | None:
    match = _BAG.fullmatch(folder)
    return BagName(route, int(match[1]), int(match[2])) if match else None


def is_left_by_desktop(name: str) -> bool:
    """Return True if desktops or NAS systems put files of this name into every directory that they display.

    >>> is_left_by_desktop("Thumbs.db"), is_left_by_desktop("._manifest.json"), is_left_by_desktop("notes.txt")
    (True, True, False)
    """
    return name in _LEFT_BY_DESKTOPS or name.startswith("._")


def bundle_stem(route: str, first: int) -> str:
    """Return a bundle's name without its compression suffix; the directory in the tar has the same name."""
    return f"{route}-{first:0{DIGITS}d}"


def digest_line(sha256: str, name: str) -> bytes:
    return f"{sha256}  {name}\n".encode()


WRITE_BYTES = 1 << 20  # minimum, except at the end of a file: small writes make tapes stop and start
READ_BYTES = 1 << 20

# Appends to a file that is being written; raises Refused if an existing file has other bytes there.
Write = Callable[[Buffer], None]


@dataclass(frozen=True, slots=True)
class Listing:
    """Names in a directory."""

    folders: Sequence[str] = ()
    files: Sequence[str] = ()


class Directory:
    """Directory, created when the first file is written.

    Names are relative to it, with slashes; ``address`` is its absolute path, as in the ledger.
    """

    def __init__(self, path: Path, disk: Disk) -> None:
        self._path = Path(os.path.abspath(path))
        if self._path.exists() and not self._path.is_dir():
            raise InvalidInput(f"{self._path}: not a directory", hint="name a directory that exists or can be created")
        self._disk = disk
        self.address = str(self._path)

    def full_name(self, name: str) -> str:
        return str(self._path / name)

    def listing(self, folder: str) -> Listing:
        """List ``folder``; empty if it does not exist."""
        try:
            entries = list(os.scandir(self._path / folder))
        except (FileNotFoundError, NotADirectoryError):
            return Listing()
        folders = [entry.name for entry in entries if entry.is_dir(follow_symlinks=False)]
        return Listing(sorted(folders), sorted({entry.name for entry in entries} - set(folders)))

    def length(self, name: str) -> int:
        return os.stat(self._path / name).st_size

    def read(self, name: str) -> Iterator[bytes]:
        """Yield the contents of a file in pieces; raise FileNotFoundError if it does not exist."""
        with open(self._path / name, "rb", buffering=0) as file:
            while data := file.read(READ_BYTES):
                yield data

    @contextmanager
    def writing(self, name: str) -> Iterator[Write]:
        """Write a file; after the block it is complete and synced, unless the block raised.

        Raise Damaged if a symbolic link below the destination leads elsewhere.
        """
        path = self._path / name
        for above in path.relative_to(self._path).parents[:-1]:
            require_no_link(self._path / above)
        self._disk.make_directory(path.parent)
        file = _Growing(path, self._disk)
        try:
            yield file.write
            file.finish()
        finally:
            self._disk.close(file.descriptor)

    def sync_folder(self, folder: str) -> None:
        """Make the names in ``folder`` durable, and in all folders from it up to the destination."""
        path = self._path / folder
        while path.is_relative_to(self._path):
            self._disk.sync_directory(path)
            path = path.parent
        self._disk.sync_names_above(self._path)


class _Growing:
    """File that only grows at its end; existing content is compared with what is written."""

    def __init__(self, path: Path, disk: Disk) -> None:
        self._path = path
        self._disk = disk
        self._end = self._found = 0
        self._pending: list[Buffer] = []
        self._pending_bytes = 0
        try:
            self.descriptor = disk.create(path)
        except FileExistsError:
            self.descriptor = disk.open(path)
            self._found = os.fstat(self.descriptor).st_size

    def write(self, data: Buffer) -> None:
        self._pending.append(data)
        self._pending_bytes += len(data)
        if self._pending_bytes >= WRITE_BYTES:
            self._flush()

    def finish(self) -> None:
        self._flush()
        if self._found > self._end:
            raise _differs(str(self._path), self._end)
        self._disk.sync(self.descriptor)
        # So that reading back reads the device instead of the cache.
        os.posix_fadvise(self.descriptor, 0, 0, os.POSIX_FADV_DONTNEED)

    def _flush(self) -> None:
        data = b"".join(self._pending)
        self._pending.clear()
        self._pending_bytes = 0
        known = min(len(data), max(0, self._found - self._end))
        if known:
            there = os.pread(self.descriptor, known, self._end)
            if (same := first_difference(there, data[:known])) is not None:
                raise _differs(str(self._path), self._end + same)
        if known < len(data):
            self._disk.write(self.descriptor, [memoryview(data)[known:]], self._end + known)
        self._end += len(data)


def first_difference(one: Buffer, other: Buffer) -> int | None:
    """Return the offset of the first different byte, or of the end of the shorter one; None if they are equal."""
    if one == other:
        return None
    pairs = zip(one, other, strict=False)
    return next((offset for offset, (a, b) in enumerate(pairs) if a != b), min(len(one), len(other)))


def _differs(name: str, offset: int) -> Refused:
    return Refused(
        f"{name}: offset {offset}: a file of this name exists with different content; it is not overwritten",
        hint=f"archive to another place: --dest DIR; or, if a crash has left it, rm {name}",
    )


_FILE = "file://"
_REASON_MAX = 200  # characters; without Java, pyarrow names every place where it looked for a library


class ObjectStore:
    """Object store with the methods of :class:`Directory`; raises InvalidInput if no installed package can reach it."""

    def __init__(self, address: str) -> None:
        self.address = address.rstrip("/")
        try:
            import fsspec.core

            # No cache of listings: other processes may write there.
            self._files, self._prefix = fsspec.core.url_to_fs(self.address, use_listings_cache=False)
        except Exception as error:  # ImportError, ValueError, or whatever a store raises without its library
            text = shorten(str(error), _REASON_MAX, placeholder=" …") or type(error).__name__
            hint = "use a directory, where the store may be mounted, or s3://BUCKET/PREFIX"
            if isinstance(error, ImportError):
                hint = (
                    "install the package that this names for the same Python, or mount the store and name the directory"
                )
                if address.startswith(("s3://", "s3a://")):
                    hint = "in a clone of wald: pip install '.[s3]'"
            raise InvalidInput(f"{address}: {text}", hint=hint) from error

    def full_name(self, name: str) -> str:
        return f"{self.address}/{name}"

    def listing(self, folder: str) -> Listing:
        with _naming_errors(self.full_name(folder)):
            try:
                entries = self._files.ls(self._key(folder), detail=True)
            except FileNotFoundError:
                return Listing()
        names: dict[str, list[str]] = {"directory": [], "file": []}
        for entry in entries:
            name = str(entry["name"]).rstrip("/").rsplit("/", 1)[-1]
            names["directory" if entry["type"] == "directory" else "file"].append(name)
        return Listing(sorted(names["directory"]), sorted(names["file"]))

    def length(self, name: str) -> int:
        with _naming_errors(self.full_name(name)):
            return int(self._files.info(self._key(name))["size"])

    def read(self, name: str) -> Iterator[bytes]:
        with _naming_errors(self.full_name(name)), self._files.open(self._key(name), "rb") as file:
            while data := file.read(READ_BYTES):
                yield data

    @contextmanager
    def writing(self, name: str) -> Iterator[Write]:
        full_name = self.full_name(name)
        with _naming_errors(full_name):
            exists = self._files.exists(self._key(name))
        if exists:
            compared = _Compared(full_name, self.read(name))
            yield compared.write
            compared.finish()
            return
        with _naming_errors(full_name, writing=True):
            file = self._create(self._key(name))

        def write(data: Buffer) -> None:
            with _naming_errors(full_name, writing=True):
                file.write(data)

        try:
            yield write
        except BaseException:
            with _naming_errors(full_name, writing=True):
                file.discard()
            raise
        with _naming_errors(full_name, writing=True):
            file.close()
            file.commit()

    def sync_folder(self, folder: str) -> None:
        """Do nothing: an object is durable with its name."""

    def _create(self, key: str) -> Any:  # fsspec ships no types
        try:
            return self._files.open(key, "xb", autocommit=False)
        except (ValueError, NotImplementedError):  # this store cannot refuse; that no object exists was checked before
            return self._files.open(key, "wb", autocommit=False)

    def _key(self, name: str) -> str:
        return f"{self._prefix}/{name}".rstrip("/")


Destination = Directory | ObjectStore


def open_destination(address: str, disk: Disk) -> Destination:
    path = address.removeprefix(_FILE)
    return ObjectStore(address) if "://" in path else Directory(Path(path), disk)


class _Compared:
    """Writer that only compares the data with an existing object."""

    def __init__(self, name: str, chunks: Iterator[bytes]) -> None:
        self._name = name
        self._chunks = chunks
        self._there = b""
        self._offset = 0

    def write(self, data: Buffer) -> None:
        while len(self._there) < len(data) and (chunk := next(self._chunks, b"")):
            self._there += chunk
        there, self._there = self._there[: len(data)], self._there[len(data) :]
        if (same := first_difference(there, data)) is not None:
            raise _differs(self._name, self._offset + same)
        self._offset += len(data)

    def finish(self) -> None:
        if self._there or next(self._chunks, b""):
            raise _differs(self._name, self._offset)


@contextmanager
def _naming_errors(name: str, *, writing: bool = False) -> Iterator[None]:
    """Convert the errors of every kind of store to DiskFailure, except FileNotFoundError of a read."""
    try:
        yield
    except WaldError:
        raise
    except Exception as error:
        if isinstance(error, FileNotFoundError) and not writing:
            raise
        text = " ".join(str(error).split()) or type(error).__name__
        raise DiskFailure(
            f"{name}: {text}", hint="check that the store can be reached; then rerun the same command to continue"
        ) from error
