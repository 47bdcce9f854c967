"""A fault at a system call of a program, then the same command again, compared with runs without a fault.

A program first runs under strace, which lists the calls that touch its log, by path or by descriptor. A fault is one of
these calls that kills the program, or fails. The two runs must leave the same state as one run, or two runs, without a
fault.
"""

import json
import os
import random
import re
import shutil
import signal
import subprocess
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from dataclasses import dataclass
from pathlib import Path

from archives import findings, restored
from contents import errors
from running import TIMEOUT_SECONDS
from tracing import strace

import wald
from wald.errors import DiskFailure, WaldError
from wald.files.disk import Disk
from wald.files.identity import read_identity
from wald.files.layout import Root
from wald.retention.cursors import read_cursors
from wald.segments.view import State
from wald.writing.sealing import remove_temporaries

KILL = "KILL"
_LOOK_SECONDS = 0.2
_RANDOM = re.compile(r"[0-9a-f]{8}(-?[0-9a-f]{4}){2,}[0-9a-f]*")
_TELLING = ("event", "route", "group", "base", "first", "last", "sequence", "rule", "verdict")
_OUTCOME = "event=skipped-record "  # not on record if the program was killed just before
_NUMBER = re.compile(r"^\d+")
_PASSING = re.compile(r"\.(tmp|whole|deleting|pin|ask)$")  # names that only a running program needs
_WRITES = "write,pwrite64,writev,pwritev,pwritev2,fallocate,ftruncate,copy_file_range,sendfile,splice,tee"
_NAMES = "rename,renameat,renameat2,link,linkat,unlink,unlinkat,mkdir,mkdirat,mknodat,symlinkat,rmdir"
_READS = "read,pread64,readv,preadv,preadv2,getdents64,newfstatat,statx,flock,fsync,fdatasync,sync_file_range"
_SOCKETS = "connect,sendto,sendmsg,recvfrom,recvmsg"
_INTERRUPTIBLE = frozenset(f"openat,{_WRITES},{_SOCKETS},read,pread64,flock,fsync,fdatasync".split(","))
_KINDS = {
    **dict.fromkeys(_WRITES.split(","), ("EIO", "ENOSPC")),
    **dict.fromkeys(_NAMES.split(","), ("EIO", "ENOSPC")),
    **dict.fromkeys(_READS.split(","), ("EIO",)),
    **dict.fromkeys(_SOCKETS.split(","), ("ECONNRESET",)),
    "openat": ("EIO", "ENOSPC"),
}


@dataclass(frozen=True)
class Fault:
    """A fault at one call of every thread of a program.

    Attributes:
        call: the system call.
        number: the first, second, … call of that name of a thread.
        kind: KILL, or the error.
        line: the call as strace shows it, without a fault.
    """

    call: str
    number: int
    kind: str
    line: str = ""

    def __str__(self) -> str:
        return f"{self.kind} at {self.call} {self.number}: {self.line[:160]}"

    @property
    def injected(self) -> str:
        what = "signal=SIGKILL" if self.kind == KILL else f"error={self.kind}"
        return f"inject={self.call}:{what}:when={self.number}"


@dataclass(frozen=True)
class Program:
    """A program to disturb.

    Attributes:
        prepare: makes the log, at ``log`` below the directory.
        line: its command line.
        stdin: input of the first run; the second one gets the rest.
        beside: context around both runs, such as a daemon.
        again: allowed exit codes of a second run, such as for a name that the first run has removed.
        prints: "all": the second run prints the same as a run without a fault; "rest": both together print at
            least that.
        layout: True if the names of segments equal those of a run without a fault.
        retries: True if it starts processes that meet the same fault repeatedly, until strace detaches.
        assist: acts during a run: ``assist(root, process)``.
    """

    prepare: Callable[[Path], None]
    line: Callable[[Path], Sequence[str]]
    stdin: bytes = b""
    beside: Callable[[Path], AbstractContextManager[object]] = nullcontext
    again: tuple[int, ...] = ()
    prints: str = ""
    layout: bool = True
    retries: bool = False
    assist: Callable[[Path, subprocess.Popen[bytes]], None] | None = None


@dataclass(frozen=True)
class Run:
    code: int
    out: bytes
    err: str


class Disturbed:
    """A program, its prepared log, and the results of runs without a fault.

    Attributes:
        faults: all possible faults.
        hits: number of tried faults that have hit the log.
    """

    def __init__(self, program: Program, base: Path) -> None:
        self.program = program
        self._base = base
        self._log = base / "run" / "log"
        self._place = base / "run"
        self._place.mkdir(parents=True)
        program.prepare(self._log)
        self._place.rename(base / "template")
        for _ in range(2):
            with self._prepared() as stdin:
                self._once = self._run(stdin, "trace=" + ",".join(_KINDS))
            trace = (base / "trace").read_text().splitlines()
            if not any("O_CREAT" in line and ".pyc" in line for line in trace):
                break  # otherwise it compiles modules, and the next run has different calls
        self.hits = 0
        self.faults = self._faults(trace)
        self._expected: list[Mapping[str, object]] = [left(self._place)]

    def _faults(self, trace: Sequence[str]) -> list[Fault]:
        """Return the faults of every call that touches the log."""
        counts: Counter[tuple[str, str]] = Counter()
        found: dict[tuple[str, int], str] = {}
        for line in trace:
            if begun := re.match(r"(\d+) +(\w+)\((.*)", line):
                pid, call, text = begun.groups()
                counts[pid, call] += 1
                if f"{self._place}/" in text:
                    found.setdefault((call, counts[pid, call]), text.replace(f"{self._place}/", ""))
        return [
            Fault(call, number, kind, text)
            for (call, number), text in found.items()
            for kind in (KILL, *_KINDS[call], *(("EINTR",) if call in _INTERRUPTIBLE else ()))
        ]

    def _has_hit(self, fault: Fault) -> bool:
        """Return True if the last fault hit calls that touch the log, and no others."""
        begun: dict[str, str] = {}
        hits = []
        for line in (self._base / "trace").read_text().splitlines():
            pid, _, text = line.partition(" ")
            if "resumed>" not in text and "(" in text:
                begun[pid] = text
            if "(INJECTED)" in text or (fault.kind == KILL and text.endswith("= ?")):
                hits.append(begun[pid])
        return bool(hits) and all(f"{self._place}/" in each for each in hits)

    def _run_twice(self) -> None:
        """Add the state after two runs to the expected results."""
        with self._prepared() as stdin:
            self._run(stdin)
            self._run(stdin)
        self._expected.append(left(self._place))

    def wrong_after(self, fault: Fault) -> list[str]:
        """Return the differences once the program has run with a fault, and again without one.

        A fault that hits no call on the log is not judged: the calls of an interpreter's imports are counted, too.
        """
        with self._prepared() as stdin:
            runs = [self._run(stdin, f"trace={fault.call}", fault.injected)]
            if not self._has_hit(fault):
                return []
            self.hits += 1
            runs.append(self._run(stdin))
        after = left(self._place)
        wrong = []
        for each, codes in zip(runs, (_documented(), {self._once.code, *self.program.again}), strict=True):
            if each.code not in codes or "Traceback" in each.err:
                wrong.append(f"ended with {each.code}: {each.err[-3000:]}")
        if runs[0].code == DiskFailure.exit_code and not (f"{self._place}/" in runs[0].err and "hint: " in runs[0].err):
            wrong.append(f"named no file, or no hint: {runs[0].err[-3000:]}")
        if self.program.prints == "all" and runs[1].out != self._once.out:
            wrong.append(f"printed {runs[1].out[:500]!r} and not {self._once.out[:500]!r}")
        if self.program.prints == "rest":
            printed = Counter((runs[0].out + runs[1].out).splitlines())
            wrong += [f"not printed: {line[:200]!r}" for line in self._once.out.splitlines() if not printed[line]]
        if after != self._expected[0] and len(self._expected) == 1:
            self._run_twice()
        return wrong + min((list(_differences(after, each, self.program)) for each in self._expected), key=len)

    @contextmanager
    def _prepared(self) -> Iterator[int | None]:
        """Copy the log; the descriptor is the standard input of the runs."""
        shutil.rmtree(self._place, ignore_errors=True)
        subprocess.run(["cp", "-a", self._base / "template", self._place], check=True)
        reading, writing = os.pipe()
        os.write(writing, self.program.stdin)
        os.close(writing)
        try:
            with self.program.beside(self._log):
                yield reading
        finally:
            os.close(reading)

    def _run(self, stdin: int | None, *expressions: str) -> Run:
        line, trace = list(self.program.line(self._log)), self._base / "trace"
        if expressions:
            trace.unlink(missing_ok=True)
            detached = ["-D"] if self.program.retries else []
            tracing = [strace(), *detached, "-f", "-yy", "-o", os.fspath(trace)]
            line = [*tracing, *(f"-e{each}" for each in expressions), *line]
        process = subprocess.Popen(
            line, stdin=stdin, stdout=subprocess.PIPE, stderr=subprocess.PIPE, start_new_session=True
        )
        try:
            if self.program.assist:
                self.program.assist(self._log, process)
            out, err = self._output(process, trace if self.program.retries and len(expressions) > 1 else None)
        except (TimeoutError, subprocess.TimeoutExpired):
            return Run(-99, b"", "it hangs")
        finally:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.communicate()
        return Run(process.returncode, out, err.decode(errors="replace"))

    def _output(self, process: subprocess.Popen[bytes], trace: Path | None) -> tuple[bytes, bytes]:
        """Return the output of a program until it ends; detach at the first fault that ``trace`` shows."""
        while trace is not None:
            try:
                return process.communicate(timeout=_LOOK_SECONDS)
            except subprocess.TimeoutExpired:
                seen = trace.read_text() if trace.exists() else ""  # strace may not have begun
                if "(INJECTED)" in seen and (tracer := _tracer_of(process.pid)):
                    os.kill(tracer, signal.SIGKILL)
                    break
        return process.communicate(timeout=TIMEOUT_SECONDS)


def left(place: Path) -> dict[str, object]:
    """Return the contents of a directory, as its readers, groups and operators see it."""
    root = place / "log"
    for path in root.rglob("*.tmp"):
        os.utime(path, (0, 0))  # as if a minute had passed
    remove_temporaries(Root(root), Disk())
    log = wald.open(root)
    head = log.head()
    last = head.sequence if head else 0
    log_id = read_identity(log.root).log_id
    found: dict[str, object] = {"damage": errors(root), "head": last}
    for route in log.routes():
        records = [(record.sequence, record.value, record.key, record.terminated) for record in log.records(route)]
        found[f"records of {route}"] = records
        for each in read_cursors(log.root, route, log_id=log_id, head_sequence=last):
            found[f"cursor of {route}/{each.group}"] = each.effective
            unread = [record.value for record in log.records(route, each.effective + 1)]
            found[f"unread of {route}/{each.group}"] = unread
    for number in range(1, last + 1):
        there = log.where(number)
        state = there.state if there.state is not State.SEALED else State.CUT  # a daemon may not have sealed it yet
        found[f"where {number} is"] = (state, there.durable, there.route, there.processed, there.member)
    for path in sorted(log.root.ledger.glob("*.jsonl")):
        events = {_event(json.loads(line)) for line in path.read_text().splitlines()}
        found[f"events in {path.name}"] = {each for each in events if not each.startswith(_OUTCOME)}
    names = {_RANDOM.sub("…", os.path.relpath(path, place)) for path in place.rglob("*")}
    found["files"] = {name for name in names if not re.match(r"log/(segments|recovery|quarantine)/", name)}
    # Without sparse indexes: any process may remove one, and a raw segment that repair has rewritten has none.
    found["segments"] = {each for each in names if each.startswith("log/segments/") and not each.endswith(".idx")}
    found["leftovers"] = {name for name in names if _PASSING.search(name)}
    for path in place.glob("archive/*"):
        found[f"{path.name} in the archive"] = (findings(path.parent, root=log.root), restored(path.parent, path.name))
    return found


def _event(entry: Mapping[str, object]) -> str:
    """Return a line of a ledger without times and sizes."""
    return " ".join(f"{name}={entry[name]}" for name in _TELLING if name in entry)


def _differences(after: Mapping[str, object], expected: Mapping[str, object], program: Program) -> Iterator[str]:
    for name in sorted({*after, *expected}):
        if name in ("segments", "events in segments.jsonl") and not program.layout:
            continue
        there, wanted = after.get(name), expected.get(name)
        if name.startswith("events") and isinstance(there, set) and isinstance(wanted, set) and there >= wanted:
            continue  # an act that was recorded and failed is recorded again
        if there != wanted:
            if isinstance(there, set) and isinstance(wanted, set):
                there, wanted = there - wanted, wanted - there
            yield f"{name}: {str(there)[:600]}; without a fault {str(wanted)[:600]}"


def _tracer_of(pid: int) -> int:
    """Return the process that traces this one; 0 if none does."""
    with suppress(FileNotFoundError, ProcessLookupError):
        return int(re.search(r"TracerPid:\s+(\d+)", Path(f"/proc/{pid}/status").read_text())[1])  # type: ignore[index]
    return 0


def _documented() -> set[int]:
    """Return the documented exit codes, and that of a killed program."""
    kinds = [WaldError]
    for kind in kinds:
        kinds += kind.__subclasses__()
    return {0, -signal.SIGKILL, 128 + signal.SIGKILL} | {kind.exit_code for kind in kinds}


def some_of(faults: Sequence[Fault], count: int, chance: random.Random) -> list[Fault]:
    """Choose faults, spread evenly over system calls and files."""
    groups: dict[tuple[str, str], list[Fault]] = {}
    for fault in faults:
        groups.setdefault((fault.call, _NUMBER.sub("", fault.line.partition(",")[0])), []).append(fault)
    for group in groups.values():
        chance.shuffle(group)
    chosen: list[Fault] = []
    while len(chosen) < min(count, len(faults)):
        left_over = [group for group in groups.values() if group]
        chosen += [group.pop() for group in chance.sample(left_over, min(len(left_over), count - len(chosen)))]
    return chosen
