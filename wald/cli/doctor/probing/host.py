"""Pipes, limits, clocks, installed parts, Java and systemd, as they are for this process on this host."""

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
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import wald
from wald.cli.doctor.judging.host import PIPE_BYTES, Clock, Limits, Parts, Pipes, Service, Spark, Uptime, needed_files
from wald.errors import Damaged
from wald.files.layout import Root
from wald.files.uptime import now
from wald.segments.durable_end import read_head, seconds_ahead
from wald.settings import Config

_SYSTEM = Path("/proc/sys/fs")
_LIFTING = (1 << 21) | (1 << 24)  # CAP_SYS_ADMIN and CAP_SYS_RESOURCE lift the limits of pipes
_MADE = 1_760_000_000  # seconds since 1970; a clock before it is wrong
_UNSYNCHRONISED = 0x40  # STA_UNSYNC of adjtimex(2)
_JAVA = re.compile(r'version "(?:1\.)?(\d+)')
_RUN_SECONDS = 2.0


def pipes(fifos: int) -> Pipes:
    """Make a pipe and enlarge it."""
    reader, writer = os.pipe2(os.O_CLOEXEC)
    try:
        reached = _enlarged(writer)
    finally:
        os.close(reader)
        os.close(writer)
    return Pipes(
        max_bytes=_number(_SYSTEM / "pipe-max-size"),
        soft_pages=_number(_SYSTEM / "pipe-user-pages-soft"),
        hard_pages=_number(_SYSTEM / "pipe-user-pages-hard"),
        page_bytes=resource.getpagesize(),
        reached_bytes=reached,
        is_limited=not _capabilities() & _LIFTING,
        fifos=fifos,
    )


def _enlarged(pipe: int) -> int:
    length = PIPE_BYTES
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


def limits(config: Config, fifos: int, pid: int) -> Limits:
    """The daemon raises its limit of open files as far as it may, so the hard one counts.

    Args:
        pid: of the daemon; 0: none runs, and it would inherit the limits of this process.
    """
    _, open_files = _limit(pid, resource.RLIMIT_NOFILE)
    file_bytes, _ = _limit(pid, resource.RLIMIT_FSIZE)
    return Limits(
        open_files=None if open_files == resource.RLIM_INFINITY else open_files,
        needed_files=needed_files(config.connections_max, fifos),
        file_bytes=None if file_bytes == resource.RLIM_INFINITY else file_bytes,
        segment_bytes=config.segment_max_bytes,
    )


def _limit(pid: int, which: int) -> tuple[int, int]:
    """The soft and the hard limit; those of this process if the other belongs to another user."""
    try:
        return resource.prlimit(pid, which)
    except (PermissionError, ProcessLookupError):
        return resource.getrlimit(which)


class _Timex(ctypes.Structure):
    """The beginning of struct timex, and room for the rest."""

    _fields_ = (
        ("modes", ctypes.c_uint),
        ("offset", ctypes.c_long),
        ("frequency", ctypes.c_long),
        ("maxerror", ctypes.c_long),
        ("esterror", ctypes.c_long),
        ("status", ctypes.c_int),
        ("rest", ctypes.c_byte * 256),
    )


def clock(root: Path) -> Clock:
    """Read the kernel's view of the clock, whichever program synchronises it, and compare the clock with the log."""
    asked = _Timex()
    answered = ctypes.CDLL(None).adjtimex(ctypes.byref(asked)) >= 0
    return Clock(
        is_synchronised=not asked.status & _UNSYNCHRONISED if answered else None,
        error_seconds=asked.maxerror / 1e6,
        is_past=time.time() < _MADE,
        behind_seconds=_behind(root),
    )


def _behind(root: Path) -> float:
    try:
        head = read_head(Root(root))
    except (Damaged, OSError):
        return 0.0
    return seconds_ahead(head.at_ns, time.time_ns()) if head is not None else 0.0


def uptime() -> Uptime:
    """As RECLAIM measures ages."""
    moment = now()
    return Uptime(moment.boot, moment.boottime_ns / 1e9)


def parts() -> Parts:
    """As they are imported."""
    import crc32c

    return Parts(
        wald=wald.__version__,
        python=platform.python_version(),
        crc32c=_version("crc32c"),
        zstandard=_version("zstandard"),
        has_crc32c_instruction=bool(crc32c.hardware_based),
    )


def spark() -> Spark:
    """Java is asked only where there is PySpark, because its start takes long."""
    pyspark = _version("pyspark")
    return Spark(pyspark, _java() if pyspark else 0)


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return ""


def _java() -> int:
    """The version of the first that runs: that of JAVA_HOME, the one on the PATH, those of the distribution."""
    home = os.environ.get("JAVA_HOME")
    programs = [Path(home) / "bin/java"] if home else []
    programs += [Path(found)] if (found := shutil.which("java")) else []
    programs += [each / "bin/java" for each in sorted(Path("/usr/lib/jvm").glob("*"), reverse=True)]
    return next(filter(None, map(_java_version, programs)), 0)


def _java_version(program: Path) -> int:
    found = _JAVA.search(_output([str(program), "-version"]))
    return int(found[1]) if found else 0


def service(pid: int, fifos: int) -> Service:
    """The unit of a process.

    Args:
        pid: 0: no process.
    """
    unit = _unit(pid) if pid else ""
    if not unit:
        return Service(fifos=fifos)
    names = ("Type", "FileDescriptorStoreMax", "WatchdogUSec")
    shown = _output(["systemctl", "show", unit, *(f"--property={name}" for name in names)])
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
    """From its control group: ``0::/system.slice/wald.service``; "" if that is not a service's."""
    try:
        groups = Path(f"/proc/{pid}/cgroup").read_text(errors="surrogateescape").splitlines()
    except OSError:
        return ""
    names = [line.rpartition("/")[2] for line in groups if ":name=systemd:" in line or line.startswith("0::")]
    return next((name for name in names if name.endswith(".service")), "")


def _output(line: list[str]) -> str:
    """What a program prints; "" if it does not run, or not for long."""
    try:
        done = subprocess.run(line, capture_output=True, text=True, timeout=_RUN_SECONDS, check=False)
    except (OSError, subprocess.SubprocessError):
        return ""
    return done.stdout + done.stderr if done.returncode == 0 else ""


def _number(path: Path) -> int:
    try:
        return int(path.read_text())
    except (OSError, ValueError):
        return 0
