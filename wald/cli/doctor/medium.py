"""File system, block device and space below a directory."""

from __future__ import annotations

import os
import re
import stat
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from wald.cli.doctor.findings import Facts, Paths, Verdict, fail, ok, skipped, unknown, warn
from wald.errors import DISK_FULL
from wald.files.disk import Disk
from wald.setting_types import format_bytes, format_seconds

IN_MEMORY = frozenset({"tmpfs", "ramfs"})
LAYERS = frozenset({"overlay", "aufs", "fuse-overlayfs", "fuse.fuse-overlayfs"})
NETWORK = frozenset(
    {"nfs", "nfs4", "cifs", "smb3", "9p", "virtiofs", "ceph", "glusterfs", "lustre", "gpfs", "ocfs2", "gfs2", "afs"}
)
COPY_ON_WRITE = frozenset({"btrfs", "zfs", "bcachefs"})
OF_KERNEL = frozenset({"bpf", "cgroup", "cgroup2", "configfs", "debugfs", "devpts", "efivarfs", "mqueue"})
OF_KERNEL |= {"proc", "pstore", "sysfs", "tracefs"}
_LOCAL = frozenset({"ext2", "ext3", "ext4", "xfs", "f2fs", "jfs", "nilfs2", *COPY_ON_WRITE})
_WITHOUT_RIGHTS = frozenset({"vfat", "msdos", "exfat", "ntfs", "ntfs3", "fuseblk", "hfsplus"})
_UNSAFE = frozenset({"nobarrier", "barrier=0", "volatile", "nobarriers", "fsync_mode=nobarrier"})
_QUOTAS = frozenset({"usrquota", "grpquota", "prjquota", "usrjquota", "grpjquota"})
_QUOTAS |= {"uquota", "gquota", "pquota", "quota"}
_MOUNTS = Path("/proc/self/mountinfo")
_BLOCKS = Path("/sys/dev/block")
_ESCAPED = re.compile(r"\\([0-7]{3})")
_WRITES, _FLUSHES = 4, 15  # of /sys/block/*/stat; see the kernel's Documentation/block/stat.rst
_SYNCS = 300
_SYNCS_SECONDS = 1.0
_APPEND = b"0123456789abcdef" * 8
_ALLOCATED_BYTES = 1 << 20
_IMPLAUSIBLE_SECONDS = 0.000_020  # less than system calls and a device take together
_SLOW_SECONDS = 0.1
_FEW_INODES = 1000
_DAY = 86400
_YEAR = 366 * _DAY


@dataclass(frozen=True, slots=True)
class Mount(Facts):
    """File system and mount options."""

    type: str
    source: str
    mount_point: str
    options: tuple[str, ...]

    def verdict(self, paths: Paths) -> Verdict:
        where = f"{self.type} on {self.mount_point}"
        unsafe = ", ".join(option for option in self.options if option in _UNSAFE)
        if self.type in OF_KERNEL:
            return fail(f"{where} belongs to the kernel and stores no files", "put the root on ext4 or xfs")
        if "ro" in self.options:
            return fail(f"{where} is mounted read-only", f"mount -o remount,rw {self.mount_point}")
        if self.type in IN_MEMORY:
            message = f"{where} is memory: a crash of the host loses the whole log"
            return fail(message, "put the root on a disk; findmnt --real lists the mounted ones")
        if unsafe:
            message = f"{where} is mounted with {unsafe}: a sync does not wait for the disk"
            return fail(message, f"remove {unsafe} from /etc/fstab, then umount {self.mount_point} and mount it again")
        if self.type in _WITHOUT_RIGHTS:
            return fail(f"{where} has no owners, no modes and no FIFOs", "put the root on ext4 or xfs")
        if self.type in LAYERS:
            message = f"{self.type} is the layer of a container, which is removed with the container"
            return warn(message, f"mount a volume at {paths.at}")
        if self.type in NETWORK:
            message = f"{self.type} from {self.source}: locks, mapped files and events may work within one host only"
            return warn(message, "put the root on a local disk, or start a daemon on one host only")
        if self.type.startswith("fuse"):
            message = f"{self.type} from {self.source}: the program that serves it determines what a sync and a lock do"
            return warn(message, "put the root on a local disk")
        if "sync" in self.options:
            message = f"{where} is mounted with sync: each write waits for the disk, and each commit waits again"
            return warn(message, f"mount -o remount,async {self.mount_point}")
        if "data=writeback" in self.options:
            return warn(
                f"{where} is mounted with data=writeback: after a crash of the host, unsynced data may be old bytes, "
                "which wald reports as torn",
                "remove data=writeback from /etc/fstab",
            )
        if self.type in _LOCAL:
            return ok(f"{where}, from {self.source}")
        return unknown(f"wald does not know {where}", "rely on the other checks, or put the root on ext4 or xfs")


def mount_of(path: Path) -> Mount:
    place = Path(os.path.realpath(path))
    mounts = parse_mounts(_MOUNTS.read_text(errors="surrogateescape"))
    above = [each for each in mounts if place.is_relative_to(each.mount_point)]
    if not above:
        raise LookupError(f"{_MOUNTS}: the mount of {path} is not listed")
    # A later mount at the same place hides an earlier one.
    return max(enumerate(above), key=lambda each: (len(Path(each[1].mount_point).parts), each[0]))[1]


def parse_mounts(text: str) -> Iterator[Mount]:
    """Parse proc_pid_mountinfo(5): ``36 35 98:0 / /mnt rw,noatime master:1 - ext4 /dev/sda rw``."""
    for line in text.splitlines():
        before, _, behind = line.partition(" - ")
        fields, (type_, source, super_options) = before.split(), behind.split(" ", 2)
        options = dict.fromkeys([*fields[5].split(","), *super_options.split(",")])
        if "rw" in options and "ro" in options:
            del options["rw"]  # either the mount or the file system is read-only, which suffices
        source, point = (_ESCAPED.sub(lambda found: chr(int(found[1], 8)), each) for each in (source, fields[4]))
        yield Mount(type_, source, point, tuple(options))


@dataclass(frozen=True, slots=True)
class Device(Facts):
    """Block device and its write cache."""

    name: str = ""
    write_cache: str = ""  # "write back" or "write through"; empty if the kernel does not report it
    backing: str = ""  # the file of a loop device
    is_stacked: bool = False  # True if it consists of other devices (LVM, RAID, encryption), whose caches count

    def verdict(self, paths: Paths) -> Verdict:
        if not self.name:
            return skipped("the file system has no block device of its own")
        if self.backing:
            message = f"{self.name} is the file {self.backing}: a sync is as reliable as the disk of that file"
            return warn(message, f"examine the directory of {self.backing}, too")
        if self.write_cache == "write back":
            return ok(f"{self.name} has a volatile write cache, which each sync has to flush")
        if self.write_cache == "write through":
            return ok(f"{self.name} reports no volatile write cache")
        return unknown(f"{self.name} does not report whether it has a write cache")


def device_of(path: Path, mount: Mount) -> Device:
    directory = _block_directory(path, mount)
    if directory is None:
        return Device()
    disk = _whole_disk(directory)
    return Device(
        name=directory.name,
        write_cache=_read_text(disk / "queue/write_cache"),
        backing=_read_text(disk / "loop/backing_file"),
        is_stacked=any((disk / "slaves").iterdir()) if (disk / "slaves").is_dir() else False,
    )


def _completed(path: Path, mount: Mount) -> tuple[int | None, int | None]:
    """Return the number of writes and flushes completed by the device; None if it does not count them."""
    directory = _block_directory(path, mount)
    counted = "" if directory is None else _read_text(_whole_disk(directory) / "stat")
    counts = dict(enumerate(map(int, counted.split())))
    return counts.get(_WRITES), counts.get(_FLUSHES)


def _block_directory(path: Path, mount: Mount) -> Path | None:
    """Return the device's directory in /sys. Try the mount's source first: on btrfs, st_dev names no device."""
    numbers = [path.stat().st_dev]
    with suppress(OSError):
        status = os.stat(mount.source)
        numbers[:0] = [status.st_rdev] * stat.S_ISBLK(status.st_mode)
    directories = (_BLOCKS / f"{os.major(number)}:{os.minor(number)}" for number in numbers if number)
    return next((each.resolve() for each in directories if each.exists()), None)


def _whole_disk(directory: Path) -> Path:
    return directory.parent if (directory / "partition").exists() else directory


def _read_text(path: Path) -> str:
    try:
        return path.read_text().strip()
    except OSError:
        return ""


@dataclass(frozen=True, slots=True)
class Sync(Facts):
    """Latency of fdatasync over a few hundred appends, and the writes that reach the device."""

    error: str = ""
    is_in_memory: bool = False
    syncs: int = 0
    p50_seconds: float = 0.0
    p90_seconds: float = 0.0
    p99_seconds: float = 0.0
    max_seconds: float = 0.0
    device_writes: int | None = None  # completed by the device during the test, for all programs; None if not counted
    device_flushes: int | None = None
    needs_flushes: bool = False  # True if the device has a volatile write cache that only a flush empties

    def verdict(self, paths: Paths) -> Verdict:
        if self.error:
            return fail(f"an append could not be synced: {self.error}", "dmesg | tail; smartctl -a on the disk")
        if self.is_in_memory:
            return skipped("there is no disk to sync to")
        if self.device_writes is not None and 2 * self.device_writes < self.syncs:
            message = f"{self.syncs} syncs, but the device completed {self.device_writes} writes: syncs do not reach it"
            hint = "mount the file system without options that disable syncs; unset LD_PRELOAD (eatmydata)"
            return fail(message, hint)
        if self.needs_flushes and self.device_flushes is not None and 2 * self.device_flushes < self.syncs:
            return fail(
                f"{self.syncs} syncs, but the device completed {self.device_flushes} flushes of its volatile cache: a "
                "power cut loses acknowledged records",
                "mount the file system with barriers, or disable the cache: hdparm -W0 DEVICE",
            )
        named = (("p50", self.p50_seconds), ("p90", self.p90_seconds), ("p99", self.p99_seconds))
        latency = ", ".join(f"{name} {milliseconds(each)}" for name, each in (*named, ("max", self.max_seconds)))
        if self.p50_seconds < _IMPLAUSIBLE_SECONDS:
            hint = "change the cache mode of the virtual machine from unsafe to none; unset LD_PRELOAD (eatmydata)"
            return warn(f"{self.syncs} syncs: {latency}; only a disk with a battery-backed cache is that fast", hint)
        if self.p99_seconds > _SLOW_SECONDS:
            message = f"{self.syncs} syncs: {latency}; commits are as slow"
            return warn(message, "iostat -x 1 shows which device is busy; put the root on a faster disk")
        return ok(f"{self.syncs} syncs: {latency}")


def sync(scratch: Path, mount: Mount, device: Device) -> Sync:
    """Append and sync as the daemon does, and count the writes and flushes that the device completes."""
    try:
        before = _completed(scratch, mount)
        seconds = sorted(_append_and_sync(scratch / "sync"))
        after = _completed(scratch, mount)
    except OSError as error:
        return Sync(error=reason_of(error))
    writes, flushes = (
        None if old is None or new is None or device.is_stacked else new - old  # a stacked device counts differently
        for old, new in zip(before, after, strict=True)
    )
    p50, p90, p99 = (seconds[min(len(seconds) - 1, len(seconds) * percent // 100)] for percent in (50, 90, 99))
    return Sync(
        is_in_memory=mount.type in IN_MEMORY,
        syncs=len(seconds),
        p50_seconds=p50,
        p90_seconds=p90,
        p99_seconds=p99,
        max_seconds=seconds[-1],
        device_writes=writes,
        device_flushes=flushes,
        needs_flushes=device.write_cache == "write back",
    )


def _append_and_sync(path: Path) -> list[float]:
    disk = Disk()
    descriptor = disk.create(path)
    seconds = []
    try:
        disk.allocate(descriptor, _ALLOCATED_BYTES)
        disk.sync(descriptor)
        end = time.monotonic() + _SYNCS_SECONDS
        for number in range(_SYNCS):
            begun = time.monotonic()
            disk.write(descriptor, [_APPEND], number * len(_APPEND))
            disk.sync(descriptor)
            seconds.append(time.monotonic() - begun)
            if time.monotonic() > end:
                break
    finally:
        disk.close(descriptor)
        os.unlink(path)
    return seconds


@dataclass(frozen=True, slots=True)
class Space(Facts):
    """Free space compared with the daemon's needs, bytes that groups pin, and how fast the log grows."""

    free_bytes: int
    needed_bytes: int
    segment_bytes: int  # on this disk
    segment_max_bytes: int  # as configured
    pinned_bytes: int | None = None  # None if unknown, like the next
    full_in_seconds: float | None = None

    def verdict(self, paths: Paths) -> Verdict:
        free, needed = format_bytes(self.free_bytes), format_bytes(self.needed_bytes)
        pinned = f"; groups pin {format_bytes(self.pinned_bytes)}" if self.pinned_bytes else ""
        seconds = self.full_in_seconds
        outlook = "" if seconds is None or seconds > _YEAR else f"; full in {format_seconds(seconds)}"
        if self.free_bytes < self.needed_bytes:
            smaller = f"df -h {paths.at}; or use a smaller free_space_min and segment_max_bytes"
            remedy = f"{paths.wald} explain; df -h {paths.at}" if pinned else smaller
            return fail(f"{free} free, but the daemon needs {needed} to accept input{pinned}", remedy)
        if seconds is not None and seconds < _DAY:
            return warn(f"{free} free{outlook} if nothing is reclaimed{pinned}", f"{paths.wald} explain")
        if self.segment_bytes < self.segment_max_bytes:
            return warn(
                f"{free} free; the disk is small, so segments have {self.segment_bytes} bytes instead of "
                f"{self.segment_max_bytes}",
                "use a larger disk, or a smaller segment_max_bytes and free_space_min",
            )
        return ok(f"{free} free, of which {needed} are reserved{pinned}{outlook}")


@dataclass(frozen=True, slots=True)
class Inodes(Facts):
    """Number of inodes that are still free."""

    free: int
    total: int

    def verdict(self, paths: Paths) -> Verdict:
        if not self.total:
            return ok("the file system does not limit the number of files")
        if not self.free:
            return fail(f"no file can be created: all {self.total} inodes are used", f"df -i {paths.at}")
        if self.free < _FEW_INODES:
            message = f"only {self.free} of {self.total} inodes are free"
            return warn(message, f"df -i {paths.at}; du --inodes -xd1 on the directories around it")
        return ok(f"{self.free} of {self.total} inodes are free")


def inodes(at: Path) -> Inodes:
    status = os.statvfs(at)
    return Inodes(status.f_favail, status.f_files)


@dataclass(frozen=True, slots=True)
class Quota(Facts):
    """Quotas, as mount options enable them."""

    options: tuple[str, ...]

    def verdict(self, paths: Paths) -> Verdict:
        if not self.options:
            return ok("quotas are off")
        message = f"quotas are on ({', '.join(self.options)}), so less space may be available than is free"
        return unknown(message, "quota -v; repquota -a")


def quota(mount: Mount) -> Quota:
    return Quota(tuple(each for each in mount.options if each.partition("=")[0] in _QUOTAS))


def reason_of(error: OSError) -> str:
    if error.errno in DISK_FULL:
        raise error
    return error.strerror or str(error)


def milliseconds(seconds: float) -> str:
    """Format a duration in milliseconds.

    >>> milliseconds(0.0123), milliseconds(0.000_045)
    ('12.3 ms', '0.045 ms')
    """
    return f"{seconds * 1000:.1f} ms" if seconds >= 0.001 else f"{seconds * 1000:.3f} ms"
