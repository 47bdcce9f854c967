"""What a power cut can leave: every file operation of a real run is recorded, and put on disk again only in part.

The rules are those of POSIX and of disks, at their worst. A write is on disk once its file was synced, and a name once
its directory was; before that each may be there or not. Names of one directory come in their order; of what was written
to a file any sector of 512 bytes may be there without the others.
"""

from __future__ import annotations

import itertools
import os
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from wald.format.batch import Buffer
from wald.store.files.disk import Disk

SECTOR_BYTES = 512
DIRECTORY = -1  # stands for the file of a name that is a directory's

Names = dict[str, int]
NameChange = tuple[frozenset[str], Names, frozenset[str]]  # the directories it is in, what it adds, what it takes


@dataclass(slots=True)
class _File:
    """What is on disk for certain, and each write (offset, bytes) or length since then."""

    durable: bytes = b""
    pending: list[tuple[int, bytes] | int] = field(default_factory=list)

    def content(self, keep: str, chance: random.Random) -> bytes:
        """
        Args:
            keep: of what is pending: "none", "all", or "some" sectors.
        """
        data = bytearray(self.durable)
        for change in self.pending if keep != "none" else ():
            if isinstance(change, int):
                data[change:] = b""
                data.extend(bytes(change - len(data)))
            else:
                offset, written = change
                data.extend(bytes(max(0, offset + len(written) - len(data))))
                for start, end in _sectors(offset, offset + len(written)):
                    if keep == "all" or chance.random() < 0.5:
                        data[start:end] = written[start - offset : end - offset]
        return bytes(data)


@dataclass(frozen=True, slots=True)
class State:
    """What a power cut has left: the content of each file by its path, None for a directory; what was acknowledged."""

    files: tuple[tuple[str, bytes | None], ...]
    acknowledged: int
    after: str

    def put(self, base: Path) -> None:
        """Make it real below ``base``."""
        for name, content in self.files:
            path = base / name
            if content is None:
                path.mkdir()
            else:
                path.write_bytes(content)


class RecordingDisk(Disk):
    """Does everything but wait for syncs, and knows at any moment what a power cut would leave below ``base``.

    Attributes:
        acknowledged: what somebody was told of so far; for the test to say.
        states: that a power cut could have left at any moment up to now.

    Args:
        seed: of the choices that are made at random.
        every: whether all combinations are tried, and not just some at each moment.
    """

    def __init__(self, base: Path, *, seed: int, every: bool) -> None:
        self.acknowledged = 0
        self.states: dict[State, None] = {}
        self._base = base
        self._chance = random.Random(seed)
        self._every = every
        self._files: dict[int, _File] = {}
        self._numbers = itertools.count()
        self._by_descriptor: dict[int, int] = {}
        self._now: Names = {}
        self._durable: Names = {}
        self._pending: list[NameChange] = []

    # What the parts under test call.

    def create(self, path: Path) -> int:
        descriptor = super().create(path)
        self._named(path, next(self._numbers))
        return self._opened(descriptor, path)

    def open(self, path: Path) -> int:
        return self._opened(super().open(path), path)

    def open_or_create(self, path: Path) -> int:
        new = not path.exists()
        descriptor = super().open_or_create(path)
        if new:
            self._named(path, next(self._numbers))
        return self._opened(descriptor, path)

    def open_append(self, path: Path) -> int:
        new = not path.exists()
        descriptor = super().open_append(path)
        if new:
            self._named(path, next(self._numbers))
        return self._opened(descriptor, path)

    def make_directory(self, path: Path) -> None:
        new = not path.exists()
        super().make_directory(path)
        if new:
            self._named(path, DIRECTORY)

    def close(self, descriptor: int) -> None:
        self._by_descriptor.pop(descriptor, None)
        super().close(descriptor)

    def allocate(self, descriptor: int, length: int) -> bool:
        done = super().allocate(descriptor, length)
        self._changed(descriptor, os.fstat(descriptor).st_size)
        return done

    def truncate(self, descriptor: int, length: int) -> None:
        super().truncate(descriptor, length)
        self._changed(descriptor, length)

    def write(self, descriptor: int, buffers: Sequence[Buffer], offset: int) -> int:
        before = os.fstat(descriptor).st_size
        done = super().write(descriptor, buffers, offset)
        data = b"".join(buffers)
        appended = os.pread(descriptor, len(data), offset) != data
        self._changed(descriptor, (before if appended else offset, data))
        return done

    def update(self, descriptor: int, data: bytes, offset: int) -> None:
        super().update(descriptor, data, offset)
        self._changed(descriptor, (offset, data))

    def copy(self, descriptor: int, source: int, length: int, offset: int, *, source_offset: int = 0) -> None:
        super().copy(descriptor, source, length, offset, source_offset=source_offset)
        self._changed(descriptor, (offset, os.pread(source, length, source_offset)))

    def sync(self, descriptor: int) -> None:
        file = self._files[self._by_descriptor[descriptor]]
        self._look("before a sync")
        file.durable, file.pending = file.content("all", self._chance), []
        self._look("after a sync")

    def sync_directory(self, path: Path) -> None:
        folder = self._name(path)
        self._look("before the sync of a directory")
        for change in [change for change in self._pending if folder in change[0]]:
            self._pending.remove(change)
            _apply(self._durable, change)
        self._look("after the sync of a directory")

    def rename(self, source: Path, target: Path) -> None:
        super().rename(source, target)
        old, new = self._name(source), self._name(target)
        self._renamed({new: self._now[old]}, {old})

    def rename_to_free(self, source: Path, target: Path) -> None:
        super().rename_to_free(source, target)
        old, new = self._name(source), self._name(target)
        self._renamed({new: self._now[old]}, {old})

    def link(self, source: Path, target: Path) -> None:
        super().link(source, target)
        self._renamed({self._name(target): self._now[self._name(source)]}, set())

    def unlink(self, path: Path) -> None:
        super().unlink(path)
        if self._name(path) in self._now:
            self._renamed({}, {self._name(path)})

    # What is kept of it.

    def _name(self, path: Path) -> str:
        return os.path.relpath(path, self._base)

    def _named(self, path: Path, number: int) -> None:
        if number != DIRECTORY:
            self._files[number] = _File()
        self._renamed({self._name(path): number}, set())

    def _opened(self, descriptor: int, path: Path) -> int:
        self._by_descriptor[descriptor] = self._now[self._name(path)]
        return descriptor

    def _changed(self, descriptor: int, change: tuple[int, bytes] | int) -> None:
        self._files[self._by_descriptor[descriptor]].pending.append(change)

    def _renamed(self, added: Names, taken: set[str]) -> None:
        folders = frozenset(os.path.dirname(name) or "." for name in (*added, *taken))
        change = (folders, added, frozenset(taken))
        _apply(self._now, change)
        self._pending.append(change)

    def _look(self, after: str) -> None:
        """Note what a power cut could leave now."""
        for names in self._possible_names():
            there = {name: number for name, number in names.items() if _has_parents(name, names)}
            unsure = sorted({n for n in there.values() if n != DIRECTORY and self._files[n].pending})
            for keeps in self._possible_keeps(len(unsure)):
                keep = dict(zip(unsure, keeps, strict=True))
                files = tuple(
                    (name, None if n == DIRECTORY else self._files[n].content(keep.get(n, "none"), self._chance))
                    for name, n in sorted(there.items())
                )
                self.states[State(files, self.acknowledged, after)] = None

    def _possible_names(self) -> Iterator[Names]:
        """None of the pending names, all, the first few, or those of one directory."""
        chosen = [self._pending[:count] for count in range(len(self._pending) + 1)]
        folders = set().union(*(change[0] for change in self._pending))
        chosen += [[change for change in self._pending if folder in change[0]] for folder in sorted(folders)]
        if not self._every:
            chosen = [chosen[0], self._chance.choice(chosen)]
        for changes in chosen:
            names = dict(self._durable)
            for change in changes:
                _apply(names, change)
            yield names

    def _possible_keeps(self, count: int) -> Iterator[Sequence[str]]:
        every = list(itertools.product(("none", "all", "some"), repeat=count))
        yield from every if self._every else [every[0], every[-1], self._chance.choice(every)]


def _apply(names: Names, change: NameChange) -> None:
    _, added, taken = change
    for name in taken:
        names.pop(name, None)
    names.update(added)


def _has_parents(name: str, names: Names) -> bool:
    folder = os.path.dirname(name)
    return not folder or (folder in names and _has_parents(folder, names))


def _sectors(start: int, end: int) -> Iterator[tuple[int, int]]:
    while start < end:
        stop = min(end, (start // SECTOR_BYTES + 1) * SECTOR_BYTES)
        yield start, stop
        start = stop
