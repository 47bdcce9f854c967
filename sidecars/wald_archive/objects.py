"""Bags in an object store, or whatever else fsspec has an address for.

An object is written whole and only if there is none of its name: it appears at the end or not at all. One that is there
already is compared with what is to be written.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from textwrap import shorten
from typing import Any

from wald.errors import DiskFailure, InvalidInput, WaldError
from wald.files.disk import Disk
from wald.format.batch import Buffer
from wald_archive.destination import READ_BYTES, Destination, Directory, Listing, Sink, differs, first_difference

_FILE = "file://"
_REASON_MAX = 200  # characters; without Java, pyarrow names every place where it looked for a library


def open_destination(address: str, disk: Disk) -> Destination:
    """A directory, or with "://" in it an address.

    Raises:
        InvalidInput: an address that nothing installed can reach, or the path of a file.
    """
    if address.startswith(_FILE):
        return Directory(Path(address.removeprefix(_FILE)), disk)
    return ObjectStore(address) if "://" in address else Directory(Path(address), disk)


class ObjectStore:
    """
    Raises:
        InvalidInput: no package for this kind of address is installed, or there is none.
    """

    def __init__(self, address: str) -> None:
        self.address = address.rstrip("/")
        try:
            import fsspec.core

            # No cache of listings: other processes may write there.
            self._files, self._prefix = fsspec.core.url_to_fs(self.address, use_listings_cache=False)
        except Exception as error:  # ImportError, ValueError, or whatever a store raises without its library
            text = shorten(str(error), _REASON_MAX, placeholder=" …") or type(error).__name__
            raise InvalidInput(f"{address}: {text}", hint=_how_to_reach(self.address, error)) from error

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
    def writing(self, name: str) -> Iterator[Sink]:
        with _naming_errors(self.full_name(name)):
            there = self._files.exists(self._key(name))
        if there:
            compared = _Compared(self.full_name(name), self.read(name))
            yield compared
            compared.finish()
            return
        with _naming_errors(self.full_name(name), writing=True):
            file = self._create(self._key(name))
        try:
            yield _Upload(self.full_name(name), file)
        except BaseException:
            with _naming_errors(self.full_name(name), writing=True):
                file.discard()
            raise
        with _naming_errors(self.full_name(name), writing=True):
            file.close()
            file.commit()

    def sync_folder(self, folder: str) -> None:
        """An object has its name from the moment it is there."""

    def _create(self, key: str) -> Any:  # fsspec ships no types
        try:
            return self._files.open(key, "xb", autocommit=False)
        except (ValueError, NotImplementedError):  # this store cannot refuse; that no object exists was checked before
            return self._files.open(key, "wb", autocommit=False)

    def _key(self, name: str) -> str:
        return f"{self._prefix}/{name}".rstrip("/")


def _how_to_reach(address: str, error: Exception) -> str:
    """Return the hint for an address that no installed package can reach."""
    if not isinstance(error, ImportError):
        return "a directory, where the store may be mounted, or s3://BUCKET/PREFIX"
    if address.startswith(("s3://", "s3a://")):
        return "in a clone of wald: pip install '.[s3]'"
    return "install the package that this names for the same Python, or mount the store and name the directory"


class _Upload:
    """An object that is being uploaded."""

    def __init__(self, name: str, file: Any) -> None:
        self._name = name
        self._file = file

    def write(self, data: Buffer) -> None:
        with _naming_errors(self._name, writing=True):
            self._file.write(data)


class _Compared:
    """Compares what is written with the object that exists; writes nothing."""

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
            raise differs(self._name, self._offset + same)
        self._offset += len(data)

    def finish(self) -> None:
        if self._there or next(self._chunks, b""):
            raise differs(self._name, self._offset)


@contextmanager
def _naming_errors(name: str, *, writing: bool = False) -> Iterator[None]:
    """Turn the errors of every kind of store into a DiskFailure with the address.

    Only that an object is not there, when it is to be read, is an answer.
    """
    try:
        yield
    except WaldError:
        raise
    except Exception as error:
        if isinstance(error, FileNotFoundError) and not writing:
            raise
        text = " ".join(str(error).split()) or type(error).__name__
        raise DiskFailure(
            f"{name}: {text}", hint="see that the store can be reached; the same command again goes on"
        ) from error
