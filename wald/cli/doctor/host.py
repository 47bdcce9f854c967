"""Pipes, limits, clocks, installed parts, Java and systemd on this host."""

from __future__ import annotations

import ctypes
import fcntl
import os
import platform
import re
import resource
import shutil
import subprocess
import time
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import wald
from wald.cli.doctor.findings import Facts, Paths, Verdict, fail, ok, skipped, unknown, warn
from wald.errors import Damaged
from wald.files.layout import Root
from wald.files.uptime import now
from wald.hints import hint_for
from wald.segments.durable_end import read_head, seconds_ahead
from wald.setting_types import format_bytes, format_seconds
from wald.settings import Config

_PIPE_BYTES = 1 << 20  # that the daemon requests
_SPARE_PIPES = 2  # for the daemon's own use
_SYSTEM = Path("/proc/sys/fs")
_UNLIMITED = (1 << 21) | (1 << 24)  # CAP_SYS_ADMIN and CAP_SYS_RESOURCE lift the limits of pipes
_DESCRIPTORS_KEPT = 32  # for segments and other files of the daemon
_BUILT = 1_760_000_000  # seconds since 1970; a clock before it is wrong
_UNSYNCHRONISED = 0x40  # STA_UNSYNC of adjtimex(2)
_OFF_SECONDS = 1.0
_OLDEST_JAVA = 17
_JAVA = re.compile(r'version "(?:1\.)?(\d+)')
_RUN_SECONDS = 2.0


@dataclass(frozen=True, slots=True)
class Pipes(Facts):
    """The largest pipe, for every FIFO."""

    max_bytes: int  # this and the next two: of /proc/sys/fs
    soft_pages: int
    hard_pages: int
    page_bytes: int
    reached_bytes: int  # the size that F_SETPIPE_SZ gave to a new pipe
    is_limited: bool  # True if the limits apply to this user; they do not apply to root
    fifos: int

    def verdict(self, paths: Paths) -> Verdict:
        reached = format_bytes(self.reached_bytes)
        needed = (self.fifos + _SPARE_PIPES) * _PIPE_BYTES // self.page_bytes
        allowed = min(filter(None, (self.soft_pages, self.hard_pages)), default=0)  # 0: unlimited
        if self.reached_bytes < _PIPE_BYTES and self.max_bytes < _PIPE_BYTES:
            return warn(
                f"a pipe can have {reached}, not 1 MiB: writers block sooner, and after a kill the daemon has to guess",
                "sysctl fs.pipe-max-size=1048576",
            )
        if self.reached_bytes < _PIPE_BYTES:
            message = f"a pipe of this user can have {reached}, not 1 MiB, because other pipes use up the limit"
            return warn(message, f"sysctl fs.pipe-user-pages-soft={needed}")
        if self.is_limited and 0 < allowed < needed:
            message = f"{self.fifos} FIFOs need {needed} pages, but this user may have {allowed}: some FIFOs stay small"
            return warn(message, f"sysctl fs.pipe-user-pages-soft={needed} fs.pipe-user-pages-hard=0")
        return ok(f"a pipe can have {reached}; the log has {self.fifos} FIFOs")


def pipes(fifos: int) -> Pipes:
    reader, writer = os.pipe2(os.O_CLOEXEC)
    try:
        reached = _enlarge(writer)
    finally:
        os.close(reader)
        os.close(writer)
    return Pipes(
        max_bytes=_read_number(_SYSTEM / "pipe-max-size"),
        soft_pages=_read_number(_SYSTEM / "pipe-user-pages-soft"),
        hard_pages=_read_number(_SYSTEM / "pipe-user-pages-hard"),
        page_bytes=resource.getpagesize(),
        reached_bytes=reached,
        is_limited=not _capabilities() & _UNLIMITED,
        fifos=fifos,
    )


def _enlarge(pipe: int) -> int:
    length = _PIPE_BYTES
    while length > fcntl.fcntl(pipe, fcntl.F_GETPIPE_SZ):
        try:
            return fcntl.fcntl(pipe, fcntl.F_SETPIPE_SZ, length)
        except PermissionError:
            length //= 2
    return fcntl.fcntl(pipe, fcntl.F_GETPIPE_SZ)


def _capabilities() -> int:
    status = Path("/proc/self/status").read_text(errors="surrogateescape")
    found = re.search(r"^CapEff:\s*([0-9a-f]+)$", status, re.MULTILINE)
    return int(found[1], 16) if found else 0


def _read_number(path: Path) -> int:
    try:
        return int(path.read_text())
    except (OSError, ValueError):
        return 0


@dataclass(frozen=True, slots=True)
class Limits(Facts):
    """Limits of open files and of file sizes: the daemon's, or those that it would inherit."""

    open_files: int | None
    needed_files: int
    file_bytes: int | None
    segment_bytes: int

    def verdict(self, paths: Paths) -> Verdict:
        if self.file_bytes is not None and self.file_bytes < self.segment_bytes:
            message = f"the file size limit is {self.file_bytes} bytes, but a segment has {self.segment_bytes}"
            return fail(message, "ulimit -f unlimited; LimitFSIZE=infinity in a unit")
        if self.open_files is not None and self.open_files < self.needed_files:
            return warn(
                f"only {self.open_files} files may be open; if the daemon needs its {self.needed_files}, it refuses "
                "connections",
                f"ulimit -Hn {self.needed_files}; LimitNOFILE={self.needed_files} in a unit",
            )
        limit = "any number of" if self.open_files is None else self.open_files
        return ok(f"{limit} files may be open; the daemon needs at most {self.needed_files}")


def limits(config: Config, fifos: int, pid: int) -> Limits:
    """Read the limits of the daemon or this process; for open files the hard limit, to which a daemon raises it."""
    _, open_files = _limit(pid, resource.RLIMIT_NOFILE)
    file_bytes, _ = _limit(pid, resource.RLIMIT_FSIZE)
    return Limits(
        open_files=None if open_files == resource.RLIM_INFINITY else open_files,
        needed_files=config.connections_max + fifos + _DESCRIPTORS_KEPT,
        file_bytes=None if file_bytes == resource.RLIM_INFINITY else file_bytes,
        segment_bytes=config.segment_max_bytes,
    )


def _limit(pid: int, which: int) -> tuple[int, int]:
    """Return the soft and the hard limit; those of this process if the daemon belongs to another user."""
    try:
        return resource.prlimit(pid, which)
    except (PermissionError, ProcessLookupError):
        return resource.getrlimit(which)


class _Timex(ctypes.Structure):
    """Start of struct timex, and space for the rest."""

    _fields_ = (
        ("modes", ctypes.c_uint),
        ("offset", ctypes.c_long),
        ("frequency", ctypes.c_long),
        ("maxerror", ctypes.c_long),
        ("esterror", ctypes.c_long),
        ("status", ctypes.c_int),
        ("rest", ctypes.c_byte * 256),
    )


@dataclass(frozen=True, slots=True)
class Clock(Facts):
    """Synchronisation of the wall clock, for append times."""

    is_synchronised: bool | None  # None if adjtimex(2) is not permitted
    error_seconds: float  # the largest error that the kernel assumes
    is_past: bool  # True if the clock is before this version of wald was built
    behind_seconds: float = 0.0  # how far the clock is behind the append times of the log

    def verdict(self, paths: Paths) -> Verdict:
        if self.is_past:
            message = "the clock is set to the past: append times are wrong until it has caught up"
            return warn(message, "timedatectl set-ntp true; date -u")
        if self.behind_seconds:
            return warn(
                f"the clock is {format_seconds(self.behind_seconds)} behind the last append time; until it catches "
                "up, new records repeat that time",
                hint_for("append-times-ahead"),
            )
        if self.is_synchronised is False:
            return warn(
                "the clock is not synchronised: append times are as inaccurate as the clock; ages and order are not "
                "affected",
                "timedatectl set-ntp true, or apt install chrony",
            )
        if self.is_synchronised is None:
            message = "the kernel does not report whether the clock is synchronised; no promise depends on it"
            return unknown(message, "date -u, compared with another clock")
        error = format_seconds(self.error_seconds)
        if self.error_seconds > _OFF_SECONDS:
            return warn(f"the clock may be off by {error}, and append times with it", "chronyc tracking")
        return ok(f"the clock is synchronised to within {error}")


def clock(root: Path) -> Clock:
    """Ask the kernel if any program synchronises the clock, and compare the clock with the log."""
    timex = _Timex()
    is_answered = ctypes.CDLL(None).adjtimex(ctypes.byref(timex)) >= 0
    try:
        head = read_head(Root(root))
    except (Damaged, OSError):
        head = None
    return Clock(
        is_synchronised=not timex.status & _UNSYNCHRONISED if is_answered else None,
        error_seconds=timex.maxerror / 1e6,
        is_past=time.time() < _BUILT,
        behind_seconds=seconds_ahead(head.at_ns, time.time_ns()) if head else 0.0,
    )


@dataclass(frozen=True, slots=True)
class Uptime(Facts):
    """The clock for ages, which cannot be set: boot id and time since boot."""

    boot: str
    seconds: float

    def verdict(self, paths: Paths) -> Verdict:
        if not self.boot:
            hint = "mount -t proc proc /proc; cat /proc/sys/kernel/random/boot_id /proc/self/timens_offsets"
            return fail("the boot id or time-namespace offset is unavailable, so age limits never apply", hint)
        return ok(f"the kernel identifies this boot, which was {format_seconds(self.seconds)} ago")


def uptime() -> Uptime:
    moment = now()
    return Uptime(moment.boot, moment.boottime_ns / 1e9)


@dataclass(frozen=True, slots=True)
class Parts(Facts):
    """Versions of components, and hardware checksums."""

    wald: str
    python: str
    crc32c: str
    zstandard: str
    has_crc32c_instruction: bool

    def verdict(self, paths: Paths) -> Verdict:
        if not self.has_crc32c_instruction:
            message = "checksums are computed without the processor's instruction, ten times slower"
            return warn(message, "use a processor with SSE 4.2 or ARMv8 CRC; pip install --upgrade crc32c")
        return ok(
            f"wald {self.wald}, Python {self.python}, crc32c {self.crc32c} with the processor's instruction, "
            f"zstandard {self.zstandard}"
        )


def parts() -> Parts:
    import crc32c

    return Parts(
        wald=wald.__version__,
        python=platform.python_version(),
        crc32c=_installed("crc32c"),
        zstandard=_installed("zstandard"),
        has_crc32c_instruction=bool(crc32c.hardware_based),
    )


def _installed(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return ""


@dataclass(frozen=True, slots=True)
class Spark(Facts):
    """PySpark and Java, for wald-export, wald-compact and wald-audit."""

    pyspark: str
    java: int

    def verdict(self, paths: Paths) -> Verdict:
        install = "apt install default-jre-headless; or set JAVA_HOME"
        if not self.pyspark:
            return skipped("PySpark is not installed; only the commands on Spark need it")
        if not self.java:
            return warn(f"PySpark {self.pyspark} without Java: the commands on Spark do not start", install)
        if self.java < _OLDEST_JAVA:
            return warn(f"Java {self.java} is too old for PySpark {self.pyspark}, which needs 17", install)
        return ok(f"PySpark {self.pyspark}, Java {self.java}")


def spark() -> Spark:
    """Run Java only if PySpark is installed, because Java starts slowly."""
    pyspark = _installed("pyspark")
    return Spark(pyspark, _java_version() if pyspark else 0)


def _java_version() -> int:
    """Return the version of the first Java that runs: JAVA_HOME, PATH, the distribution's."""
    home = os.environ.get("JAVA_HOME")
    programs = [Path(home) / "bin/java"] if home else []
    programs += [Path(found)] if (found := shutil.which("java")) else []
    programs += [each / "bin/java" for each in sorted(Path("/usr/lib/jvm").glob("*"), reverse=True)]
    for program in programs:
        if printed := _JAVA.search(_run([str(program), "-version"])):
            return int(printed[1])
    return 0


@dataclass(frozen=True, slots=True)
class Service(Facts):
    """The systemd unit of the running daemon: notification, descriptor store, watchdog."""

    unit: str = ""  # empty if no daemon runs, or not under systemd
    type: str = ""  # Type=; empty if systemd does not answer
    store_max: int = 0
    has_watchdog: bool = False
    fifos: int = 0

    def verdict(self, paths: Paths) -> Verdict:
        if not self.unit:
            return skipped("no daemon of this root runs under systemd")
        if not self.type:
            return unknown(f"systemd does not answer about {self.unit}", f"systemctl show {self.unit}")
        if not self.type.startswith("notify"):
            return warn(
                f"{self.unit} has Type={self.type}: pipes are not kept across a restart, and systemd does not notice a "
                "daemon that hangs",
                f"systemctl edit {self.unit}: Type=notify, FileDescriptorStoreMax={self.fifos}, WatchdogSec=30",
            )
        if self.store_max < self.fifos:
            return warn(
                f"{self.unit} keeps {self.store_max} descriptors across a restart, but the log has {self.fifos} FIFOs",
                f"systemctl edit {self.unit}: FileDescriptorStoreMax={self.fifos}",
            )
        if not self.has_watchdog:
            message = f"{self.unit} has no watchdog: systemd does not restart a daemon that hangs"
            return warn(message, f"systemctl edit {self.unit}: WatchdogSec=30")
        return ok(f"{self.unit} keeps {self.store_max} descriptors and has a watchdog")


def service(pid: int, fifos: int) -> Service:
    """Ask systemd about the unit of a process; ``pid`` is 0 if no daemon runs."""
    unit = _unit(pid) if pid else ""
    if not unit:
        return Service(fifos=fifos)
    names = ("Type", "FileDescriptorStoreMax", "WatchdogUSec")
    shown = _run(["systemctl", "show", unit, *(f"--property={name}" for name in names)])
    found = dict(line.partition("=")[::2] for line in shown.splitlines())
    store_max = found.get("FileDescriptorStoreMax", "")
    return Service(
        unit=unit,
        type=found.get("Type", ""),
        store_max=int(store_max) if store_max.isdecimal() else 0,
        has_watchdog=found.get("WatchdogUSec", "0") not in ("0", "infinity"),
        fifos=fifos,
    )


def _unit(pid: int) -> str:
    """Return the service in the control group, such as ``0::/system.slice/wald.service``, or an empty string."""
    try:
        groups = Path(f"/proc/{pid}/cgroup").read_text(errors="surrogateescape").splitlines()
    except OSError:
        return ""
    names = [line.rpartition("/")[2] for line in groups if ":name=systemd:" in line or line.startswith("0::")]
    return next((name for name in names if name.endswith(".service")), "")


def _run(line: list[str]) -> str:
    """Return a program's output; empty if it fails or takes too long."""
    try:
        done = subprocess.run(line, capture_output=True, text=True, timeout=_RUN_SECONDS, check=False)
    except (OSError, subprocess.SubprocessError):
        return ""
    return done.stdout + done.stderr if done.returncode == 0 else ""
