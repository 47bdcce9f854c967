"""Disks that stop, fail or record: they simulate the death of a process or machine at the n-th change of the disk.

A change is a step that a crash can leave undone: create, allocate, write, update, copy, sync, truncate, rename,
unlink.
"""

import errno
import itertools
import os
import re
from collections.abc import Callable, Container, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import NoReturn, TypeVar

from wald.files.disk import Disk
from wald.format.batch import Buffer

_RANDOM = re.compile(r"[-.][0-9a-f]{16}(?=\.tmp$)")


class Died(BaseException):
    """Simulated death of the process."""


class SteppingDisk(Disk):
    """Disk that calls ``step(name, path)`` before each change, and knows which descriptors are open."""

    def __init__(self) -> None:
        self.descriptors: set[int] = set()
        self.survived = False

    @contextmanager
    def attempt(self) -> Iterator[None]:
        """End the block at the fault of the disk, or note that the disk has survived."""
        try:
            yield
            self.survived = True
        except Died:
            self.abandon()
        except OSError:
            pass

    def step(self, name: str, path: Path | None = None, descriptor: int = -1) -> None:
        raise NotImplementedError

    def partly(self) -> float:
        """Perform the part of a write or copy that happens despite the fault."""
        return 0.0

    def abandon(self) -> None:
        """Close the descriptors of the dead process."""
        for descriptor in self.descriptors:
            os.close(descriptor)
        self.descriptors.clear()

    def create(self, path: Path) -> int:
        self.step("create", path)
        return self._opened(super().create(path))

    def open(self, path: Path) -> int:
        return self._opened(super().open(path))

    def open_or_create(self, path: Path) -> int:
        return self._opened(super().open_or_create(path))

    def open_append(self, path: Path) -> int:
        return self._opened(super().open_append(path))

    def open_lock(self, path: Path) -> int:
        return self._opened(super().open_lock(path))

    def close(self, descriptor: int) -> None:
        self.descriptors.discard(descriptor)
        super().close(descriptor)

    def allocate(self, descriptor: int, length: int) -> bool:
        self.step("allocate", _path(descriptor), descriptor)
        return super().allocate(descriptor, length)

    def write(self, descriptor: int, buffers: Sequence[Buffer], offset: int) -> int:
        try:
            self.step("write", _path(descriptor), descriptor)
        except (Died, OSError):
            data = b"".join(buffers)
            os.pwrite(descriptor, data[: int(len(data) * self.partly())], offset)
            raise
        return super().write(descriptor, buffers, offset)

    def update(self, descriptor: int, data: bytes, offset: int) -> None:
        self.step("update", _path(descriptor), descriptor)
        super().update(descriptor, data, offset)

    def copy(self, descriptor: int, source: int, length: int, offset: int, *, source_offset: int = 0) -> None:
        try:
            self.step("copy", _path(descriptor), descriptor)
        except (Died, OSError):
            super().copy(descriptor, source, int(length * self.partly()), offset, source_offset=source_offset)
            raise
        super().copy(descriptor, source, length, offset, source_offset=source_offset)

    def sync(self, descriptor: int) -> None:
        self.step("sync", _path(descriptor), descriptor)  # and no waiting: the machine that runs the test does not fail

    def sync_directory(self, path: Path) -> None:
        self.step("sync_directory", path)

    def truncate(self, descriptor: int, length: int) -> None:
        self.step("truncate", _path(descriptor), descriptor)
        super().truncate(descriptor, length)

    def rename(self, source: Path, target: Path) -> None:
        self.step("rename", target)
        super().rename(source, target)

    def rename_to_free(self, source: Path, target: Path) -> None:
        self.step("rename", target)
        super().rename_to_free(source, target)

    def link(self, source: Path, target: Path) -> None:
        self.step("link", target)
        super().link(source, target)

    def unlink(self, path: Path) -> None:
        self.step("unlink", path)
        super().unlink(path)

    def _opened(self, descriptor: int) -> int:
        self.descriptors.add(descriptor)
        return descriptor


class TracingDisk(SteppingDisk):
    """Disk that records the order of the steps; temporary names without their random part."""

    def __init__(self) -> None:
        super().__init__()
        self.steps: list[tuple[str, str]] = []

    def step(self, name: str, path: Path | None = None, descriptor: int = -1) -> None:
        self.steps.append((name, _RANDOM.sub("", path.name) if path else ""))


T = TypeVar("T", bound=SteppingDisk)


class DyingDisk(SteppingDisk):
    """Disk that dies at step ``last`` (from 0), after ``part`` of the step's bytes; only ``names`` count, or all."""

    def __init__(self, last: int, *, part: float = 0.0, names: Container[str] | None = None) -> None:
        super().__init__()
        self.left = last
        self.part = part
        self.names = names

    def step(self, name: str, path: Path | None = None, descriptor: int = -1) -> None:
        if self.names is not None and name not in self.names:
            return
        if self.left <= 0:
            self.die(name)
        self.left -= 1

    def die(self, name: str) -> NoReturn:
        raise Died(name)

    def partly(self) -> float:
        return self.part if self.left == 0 else 0.0


class FailingDisk(SteppingDisk):
    """Disk that fails at step ``bad`` (from 0) and the ``more`` steps after it; ``part`` as for :class:`DyingDisk`.

    A write or sync of a descriptor after a failed write or sync raises AssertionError.
    """

    def __init__(self, bad: int, *, more: int = 0, part: float = 0.0, number: int = errno.ENOSPC) -> None:
        super().__init__()
        self.left = bad
        self.more = more
        self.part = part
        self.number = number
        self._finished: set[int] = set()

    def step(self, name: str, path: Path | None = None, descriptor: int = -1) -> None:
        assert descriptor not in self._finished, f"{name} on a descriptor that has failed"
        self.left -= 1
        if -1 - self.more <= self.left < 0:
            if name in ("write", "copy", "sync"):
                self._finished.add(descriptor)
            raise OSError(self.number, os.strerror(self.number), str(path))

    def partly(self) -> float:
        return self.part

    def close(self, descriptor: int) -> None:
        self._finished.discard(descriptor)
        super().close(descriptor)


def until_it_survives(make: Callable[[int], T]) -> Iterator[T]:
    """Yield disks that die or fail at step 0, 1, 2 …, up to the first that has survived its attempt."""
    for number in itertools.count():
        yield (disk := make(number))
        if disk.survived:
            return


def after_each_death(act: Callable[[int, DyingDisk], object], *, part: float = 0.0, least: int) -> Iterator[int]:
    """Act on disks that die at step 0, 1, 2 …, until one survives; yield the number of each attempt after it.

    Checks that there are more than ``least`` steps.
    """
    for number, disk in enumerate(until_it_survives(lambda last: DyingDisk(last, part=part))):
        with disk.attempt():
            act(number, disk)
        yield number
    assert number > least


def _path(descriptor: int) -> Path:
    return Path(os.readlink(f"/proc/self/fd/{descriptor}"))
