"""States that a power cut can leave on disk, from the file operations of a real run.

The rules are the worst that POSIX and disks allow. A write is durable once its file was synced, and a name once its
directory was; before that each may be on disk or not. Any 512-byte sector of a write may be on disk without the
others.
`RecordingDisk` records operations within the test; `recorded` traces those of a process.
"""

import itertools
import os
import random
import re
import subprocess
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from tracing import strace

from wald.files.disk import Disk
from wald.format.batch import Buffer

SECTOR_BYTES = 512
DIRECTORY = -1  # the file number of a name that is a directory's

Names = dict[str, int]
NameChange = tuple[frozenset[str], Names, frozenset[str]]  # the directories affected, the names added, those removed
Files = tuple[tuple[str, bytes | None], ...]
Change = tuple[int, bytes] | int  # an offset and the bytes written there, or a new length


@dataclass(slots=True)
class _File:
    """The durable content of a file, and its changes since then."""

    durable: bytes = b""
    pending: list[Change] = field(default_factory=list)

    def content(self, keep: str, chance: random.Random) -> bytes:
        """ """
        if keep == "none" or not self.pending:
            return self.durable  # the same object, since many states hold it
        versions = [self.durable]
        for change in self.pending:
            data = bytearray(versions[-1])
            if isinstance(change, int):
                data[change:] = b""
                data.extend(bytes(change - len(data)))
            else:
                offset, written = change
                data.extend(bytes(max(0, offset - len(data))))
                data[offset : offset + len(written)] = written
            versions = [*versions, bytes(data)] if keep == "some" else [bytes(data)]
        if keep == "all":
            return versions[-1]
        length = len(chance.choice(versions))
        starts = range(0, length, SECTOR_BYTES)
        sectors = (chance.choice(versions)[start : start + SECTOR_BYTES].ljust(SECTOR_BYTES, b"\0") for start in starts)
        return b"".join(sectors)[:length]


@dataclass(frozen=True, slots=True)
class State:
    """A state after a power cut: the content of each file by its path, None for a directory."""

    files: Files
    acknowledged: int
    after: str

    def put(self, base: Path) -> None:
        """Write it below ``base``."""
        for name, content in self.files:
            path = base / name
            if content is None:
                path.mkdir()
            else:
                path.write_bytes(content)


class Platter:
    """Current and durable files and names below a directory, and the states that a power cut could have left."""

    def __init__(self, *, seed: int, every: bool, ordered: bool = True) -> None:
        self.acknowledged = 0
        self.now: Names = {}
        self._found: dict[Files, State] = {}
        self._chance = random.Random(seed)
        self._every = every
        self._ordered = ordered
        self._files: dict[int, _File] = {}
        self._numbers = itertools.count()
        self._durable: Names = {}
        self._pending: list[NameChange] = []

    @property
    def states(self) -> list[State]:
        """Return the distinct possible states at every moment so far, each with the last promise made by then."""
        return list(self._found.values())

    def load(self, base: Path) -> None:
        """Record everything below ``base`` as durable, links as links."""
        by_inode: dict[int, int] = {}
        for path in sorted(base.rglob("*")):
            name = os.path.relpath(path, base)
            if path.is_dir():
                self._durable[name] = DIRECTORY
            elif path.is_file():
                number = by_inode.setdefault(path.stat().st_ino, len(by_inode))
                self._durable[name] = number
                self._files[number] = _File(path.read_bytes())
        self._numbers = itertools.count(len(by_inode))
        self.now = dict(self._durable)

    def create(self, name: str) -> int:
        number = next(self._numbers)
        self._files[number] = _File()
        self._rename({name: number}, set())
        return number

    def make_directory(self, name: str) -> None:
        self._rename({name: DIRECTORY}, set())

    def change(self, number: int, change: Change) -> None:
        self._files[number].pending.append(change)

    def content(self, number: int) -> bytes:
        """Return the content as programs see it."""
        return self._files[number].content("all", self._chance)

    def pending_of(self, number: int) -> list[Change]:
        """Return the changes that a sync starting now covers."""
        return list(self._files[number].pending)

    def sync(self, number: int, covered: Sequence[Change] | None = None) -> None:
        """Make the changes of a file durable; only those ``covered`` if the sync began before the others."""
        file = self._files[number]
        self._look("before a sync")
        rest = file.pending[len(covered) :] if covered is not None else []
        file.pending = file.pending[: len(file.pending) - len(rest)]
        file.durable, file.pending = file.content("all", self._chance), rest
        self._look("after a sync")

    def sync_directory(self, folder: str) -> None:
        self._look(f"before the sync of {folder}")
        for change in [change for change in self._pending if folder in change[0]]:
            self._pending.remove(change)
            _apply(self._durable, change)
        self._look(f"after the sync of {folder}")

    def rename(self, old: str, new: str) -> None:
        below = {name for name in self.now if name == old or name.startswith(f"{old}/")}
        self._rename({new + name[len(old) :]: self.now[name] for name in below}, below)

    def link(self, source: str, target: str) -> None:
        self._rename({target: self.now[source]}, set())

    def unlink(self, name: str) -> None:
        if name in self.now:
            self._rename({}, {name})

    def end(self) -> None:
        """Record the states after the last operation."""
        self._look("at the end")

    def _rename(self, added: Names, taken: set[str]) -> None:
        folders = frozenset(os.path.dirname(name) or "." for name in (*added, *taken))
        change = (folders, added, frozenset(taken))
        _apply(self.now, change)
        self._pending.append(change)

    def _look(self, after: str) -> None:
        for names in self._possible_names():
            there = {name: number for name, number in names.items() if _has_parents(name, names)}
            unsure = sorted({n for n in there.values() if n != DIRECTORY and self._files[n].pending})
            for keeps in self._possible_keeps(len(unsure)):
                keep = dict(zip(unsure, keeps, strict=True))
                files = tuple(
                    (name, None if n == DIRECTORY else self._files[n].content(keep.get(n, "none"), self._chance))
                    for name, n in sorted(there.items())
                )
                self._found.pop(files, None)  # the last of several equal states has the most promises
                self._found[files] = State(files, self.acknowledged, after)

    def _possible_names(self) -> Iterator[Names]:
        """Yield the durable names with none, all, or the first of the pending changes, or those of one directory."""
        chosen = [self._pending[:count] for count in range(len(self._pending) + 1)]
        folders = set().union(*(change[0] for change in self._pending))
        chosen += [[change for change in self._pending if folder in change[0]] for folder in sorted(folders)]
        if not self._ordered:
            chosen.append([change for change in self._pending if self._chance.random() < 0.5])
            chosen += [[change] for change in self._pending[1:]]
        if not self._every:
            chosen = [chosen[0], self._chance.choice(chosen)]
        for changes in chosen:
            names = dict(self._durable)
            for change in changes:
                _apply(names, change)
            yield names

    def _possible_keeps(self, count: int) -> Iterator[Sequence[str]]:
        if self._every and count <= 4:
            yield from itertools.product(("none", "all", "some"), repeat=count)
            return
        yield ("none",) * count
        yield ("all",) * count
        yield [self._chance.choice(("none", "all", "some")) for _ in range(count)]


class RecordingDisk(Disk):
    """A disk that skips syncs and records every operation below ``base`` on a `Platter`."""

    def __init__(self, base: Path, *, seed: int, every: bool, ordered: bool = True) -> None:
        self.platter = Platter(seed=seed, every=every, ordered=ordered)
        self._base = base
        self._by_descriptor: dict[int, int] = {}

    @property
    def acknowledged(self) -> int:
        return self.platter.acknowledged

    @acknowledged.setter
    def acknowledged(self, promise: int) -> None:
        self.platter.acknowledged = promise

    @property
    def states(self) -> list[State]:
        return self.platter.states

    def create(self, path: Path) -> int:
        descriptor = super().create(path)
        self.platter.create(self._name(path))
        return self._opened(descriptor, path)

    def open(self, path: Path) -> int:
        return self._opened(super().open(path), path)

    def open_or_create(self, path: Path) -> int:
        if not path.exists():
            self.platter.create(self._name(path))
        return self._opened(super().open_or_create(path), path)

    def open_append(self, path: Path) -> int:
        if not path.exists():
            self.platter.create(self._name(path))
        return self._opened(super().open_append(path), path)

    def make_directory(self, path: Path) -> None:
        new = not path.exists()
        super().make_directory(path)
        if new:
            self.platter.make_directory(self._name(path))

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
        self.platter.sync(self._by_descriptor[descriptor])

    def sync_directory(self, path: Path) -> None:
        self.platter.sync_directory(self._name(path))

    def rename(self, source: Path, target: Path) -> None:
        super().rename(source, target)
        self.platter.rename(self._name(source), self._name(target))

    def rename_to_free(self, source: Path, target: Path) -> None:
        super().rename_to_free(source, target)
        self.platter.rename(self._name(source), self._name(target))

    def link(self, source: Path, target: Path) -> None:
        super().link(source, target)
        self.platter.link(self._name(source), self._name(target))

    def unlink(self, path: Path) -> None:
        super().unlink(path)
        self.platter.unlink(self._name(path))

    def _name(self, path: Path) -> str:
        return os.path.relpath(path, self._base)

    def _opened(self, descriptor: int, path: Path) -> int:
        self._by_descriptor[descriptor] = self.platter.now[self._name(path)]
        return descriptor

    def _changed(self, descriptor: int, change: Change) -> None:
        self.platter.change(self._by_descriptor[descriptor], change)


ACKNOWLEDGED = "acknowledged"
"""The file below the base of `recorded` to which a command appends a line for each promise that it has got."""


def recorded(
    line: Sequence[str], base: Path, trace: Path, *, seed: int = 1, every: bool = False, mapped: Collection[str] = ()
) -> Platter:
    """Run a command under strace and return the states that a power cut could have left below ``base``.

    In each state, ``acknowledged`` is the number of lines of `ACKNOWLEDGED` by then, and 1 more at the end.
    The last state is from after the end of the command. Writes through mmap(2) and splice(2) are not recorded; content
    that differs from the one on disk at the end fails the test, except in the files ``mapped``.
    """
    platter = Platter(seed=seed, every=every, ordered=False)
    platter.load(base)
    calls = "openat,write,pwrite64,writev,pwritev,pwritev2,ftruncate,fallocate,sendfile,rename,renameat,renameat2,link,"
    calls += "linkat,unlink,unlinkat,rmdir,mkdir,mkdirat,fsync,fdatasync,sync_file_range"
    options = ["-f", "-y", "-xx", "-s", "33554432", "--seccomp-bpf", "-e", f"trace={calls}", "-e", "signal=none"]
    done = subprocess.run([strace(), *options, "-o", str(trace), *line], capture_output=True, check=False)
    assert done.returncode == 0, done.stderr.decode()
    replay = _Replay(platter, base)
    for call in trace.read_text().splitlines():
        replay.take(call)
    platter.acknowledged += 1
    platter.end()
    for name, number in platter.now.items():
        assert number == DIRECTORY or name in mapped or (base / name).read_bytes() == platter.content(number), (
            f"{name} is not as recorded"
        )
    return platter


class _Replay:
    """Applies the lines of strace to a platter."""

    def __init__(self, platter: Platter, base: Path) -> None:
        self._platter = platter
        self._base = os.fspath(base)
        self._unfinished: dict[str, tuple[str, list[Change]]] = {}

    def take(self, line: str) -> None:
        pid, _, text = line.partition(" ")
        text = text.strip()
        covered: list[Change] | None = None
        if text.endswith("<unfinished ...>"):
            begun = text.removesuffix("<unfinished ...>").rstrip()
            number = self._number(begun) if re.match(r"f(data)?sync\(", begun) else None
            self._unfinished[pid] = (begun, [] if number in (None, DIRECTORY) else self._platter.pending_of(number))
            return
        if resumed := re.match(r"<\.\.\. \w+ resumed>", text):
            begun, covered = self._unfinished.pop(pid)
            text = begun + text[resumed.end() :]
        if found := re.match(r"(\w+)\((.*)\) += (\d+)", text):
            self._apply(found[1], found[2], int(found[3]), covered)

    def _apply(self, call: str, arguments: str, result: int, covered: list[Change] | None) -> None:
        platter, number = self._platter, self._number(arguments)
        if call in ("fsync", "fdatasync"):
            folder = self._inside(_paths(arguments)[0])
            if number is not None and number != DIRECTORY:
                platter.sync(number, covered)
            elif folder is not None:
                platter.sync_directory(folder)
        elif call in ("write", "writev", "pwrite64", "pwritev", "pwritev2", "sendfile", "ftruncate", "fallocate"):
            if number is not None:
                self._change(call, arguments, result, number)
        else:
            names = [self._inside(path) for path in _named(call, arguments)]
            if None not in names:
                self._rename(call, arguments, [str(name) for name in names])

    def _change(self, call: str, arguments: str, result: int, number: int) -> None:
        platter = self._platter
        numbers = [int(each) for each in re.findall(r", (\d+)(?=,|$)", re.sub(r"\[.*\]|\"[^\"]*\"", "", arguments))]
        length = len(platter.content(number))
        if call == "ftruncate":
            platter.change(number, numbers[0])
        elif call == "fallocate":
            assert ", 0, " in arguments or "KEEP_SIZE" in arguments, arguments
            if "KEEP_SIZE" not in arguments:
                platter.change(number, max(length, numbers[-2] + numbers[-1]))
        elif call == "sendfile":
            source = self._number(arguments.partition(", ")[2])
            assert source is not None
            start = int(re.search(r", \[(\d+)\]", arguments)[1])  # type: ignore[index]
            platter.change(number, (length, platter.content(source)[start : start + result]))
        else:
            data = b"".join(_decoded(each) for each in re.findall(r"\"([^\"]*)\"", arguments))[:result]
            at_offset = call.startswith("p")
            offset = numbers[-1 - (call == "pwritev2" and "RWF" not in arguments)] if at_offset else length
            platter.change(number, (offset, data))
            if platter.now.get(ACKNOWLEDGED) == number:
                platter.acknowledged += data.count(b"\n")

    def _rename(self, call: str, arguments: str, names: Sequence[str]) -> None:
        platter = self._platter
        if call == "openat":
            if names[0] not in platter.now and "O_CREAT" in arguments:
                platter.create(names[0])
            elif "O_TRUNC" in arguments:
                platter.change(platter.now[names[0]], 0)
        elif call.startswith("rename"):
            platter.rename(names[0], names[1])
        elif call.startswith("link"):
            platter.link(names[0], names[1])
        elif call.startswith("mkdir"):
            platter.make_directory(names[0])
        else:
            platter.unlink(names[0])

    def _number(self, arguments: str) -> int | None:
        """Return the number of the file that the first argument is open for; None for another file."""
        paths = _paths(arguments)
        name = self._inside(paths[0]) if paths else None
        return None if name is None else self._platter.now.get(name)

    def _inside(self, path: str) -> str | None:
        path = os.path.normpath(path)
        return os.path.relpath(path, self._base) if path.startswith(f"{self._base}/") or path == self._base else None


def _paths(arguments: str) -> list[str]:
    """Return the paths of the open files among the arguments."""
    return [_decoded(each).decode() for each in re.findall(r"\b(?:\d+|AT_FDCWD)<([^>]*)>", arguments)]


def _named(call: str, arguments: str) -> list[str]:
    """Return the paths that a call names, resolved against the directories it names them in."""
    names = [_decoded(each).decode() for each in re.findall(r"\"([^\"]*)\"", arguments)]
    folders = _paths(arguments) if call.endswith(("at", "at2")) else []
    folders += [os.getcwd()] * (len(names) - len(folders))
    return [os.path.join(folder, name) for folder, name in zip(folders, names, strict=False)]


def _decoded(text: str) -> bytes:
    """Return the bytes of a string as ``strace -xx`` shows it."""
    return re.sub(rb"\\x([0-9a-f]{2})", lambda found: bytes([int(found[1], 16)]), text.encode())


def _apply(names: Names, change: NameChange) -> None:
    _, added, taken = change
    for name in taken:
        names.pop(name, None)
    names.update(added)


def _has_parents(name: str, names: Names) -> bool:
    folder = os.path.dirname(name)
    return not folder or (folder in names and _has_parents(folder, names))
