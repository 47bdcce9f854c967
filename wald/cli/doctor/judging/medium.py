"""Below the directory: the file system, its device, what a sync costs and whether it reaches the device."""

from __future__ import annotations

from dataclasses import dataclass

from wald.cli.doctor.checks import Check, Outcome, Rule, otherwise

IN_MEMORY = frozenset({"tmpfs", "ramfs"})
LAYERS = frozenset({"overlay", "aufs", "fuse-overlayfs", "fuse.fuse-overlayfs"})
NETWORK = frozenset(
    {"nfs", "nfs4", "cifs", "smb3", "9p", "virtiofs", "ceph", "glusterfs", "lustre", "gpfs", "ocfs2", "gfs2", "afs"}
)
COPY_ON_WRITE = frozenset({"btrfs", "zfs", "bcachefs"})
OF_KERNEL = frozenset(
    {
        "bpf",
        "cgroup",
        "cgroup2",
        "configfs",
        "debugfs",
        "devpts",
        "efivarfs",
        "mqueue",
        "proc",
        "pstore",
        "sysfs",
        "tracefs",
    }
)
LOCAL = frozenset({"ext2", "ext3", "ext4", "xfs", "f2fs", "jfs", "nilfs2", *COPY_ON_WRITE})
WITHOUT_RIGHTS = frozenset({"vfat", "msdos", "exfat", "ntfs", "ntfs3", "fuseblk", "hfsplus"})
_UNSAFE = frozenset({"nobarrier", "barrier=0", "volatile", "nobarriers", "fsync_mode=nobarrier"})
_IMPLAUSIBLE_SECONDS = 0.000_020  # less than system calls and a device together take
_SLOW_SECONDS = 0.1


@dataclass(frozen=True, slots=True)
class Mount:
    """The file system that the directory is on; options of the mount and of the file system."""

    type: str
    source: str
    mount_point: str
    options: tuple[str, ...]

    @property
    def unsafe(self) -> str:
        """The options that keep a sync from reaching the disk."""
        return ", ".join(option for option in self.options if option in _UNSAFE)


MOUNT: Check[Mount] = Check(
    "mount",
    "file system and mount options",
    (1, 2),
    (
        Rule(
            Outcome.FAIL,
            lambda f: f.type in OF_KERNEL,
            "{f.type} on {f.mount_point} belongs to the kernel, and keeps no files",
            "put the root on ext4 or xfs",
        ),
        Rule(
            Outcome.FAIL,
            lambda f: "ro" in f.options,
            "{f.type} on {f.mount_point} is mounted read-only",
            "mount -o remount,rw {f.mount_point}",
        ),
        Rule(
            Outcome.FAIL,
            lambda f: f.type in IN_MEMORY,
            "{f.type} on {f.mount_point} is memory: a crash of the host loses the whole log",
            "put the root on a disk; findmnt --real lists those that are mounted",
        ),
        Rule(
            Outcome.FAIL,
            lambda f: f.unsafe,
            "{f.type} on {f.mount_point} is mounted with {f.unsafe}: a sync does not wait for the disk",
            "take {f.unsafe} out of /etc/fstab, then umount {f.mount_point} and mount it again",
        ),
        Rule(
            Outcome.FAIL,
            lambda f: f.type in WITHOUT_RIGHTS,
            "{f.type} on {f.mount_point} has no owners, no modes and no FIFOs",
            "put the root on ext4 or xfs",
        ),
        Rule(
            Outcome.WARN,
            lambda f: f.type in LAYERS,
            "{f.type}: the layer of a container, which is removed with the container",
            "mount a volume at {at}",
        ),
        Rule(
            Outcome.WARN,
            lambda f: f.type in NETWORK,
            "{f.type} from {f.source}: locks, mapped files and events may hold within one host only",
            "put the root on a local disk, or start a daemon on one host only",
        ),
        Rule(
            Outcome.WARN,
            lambda f: f.type.startswith("fuse"),
            "{f.type} from {f.source}: what a sync and a lock do depends on the program that serves it",
            "put the root on a local disk",
        ),
        Rule(
            Outcome.WARN,
            lambda f: "sync" in f.options,
            "{f.type} on {f.mount_point} is mounted with sync: each write waits for the disk, and again at its commit",
            "mount -o remount,async {f.mount_point}",
        ),
        Rule(
            Outcome.WARN,
            lambda f: "data=writeback" in f.options,
            "{f.type} on {f.mount_point} is mounted with data=writeback: after a crash of the host, what was not "
            "synced may be old bytes, which wald reports as torn",
            "take data=writeback out of /etc/fstab",
        ),
        Rule(
            Outcome.OK,
            lambda f: f.type in LOCAL,
            "{f.type} on {f.mount_point}, from {f.source}",
        ),
        Rule(
            Outcome.UNKNOWN,
            otherwise,
            "{f.type} on {f.mount_point} is not known to wald",
            "rely on the other checks, or put the root on ext4 or xfs",
        ),
    ),
)


@dataclass(frozen=True, slots=True)
class Device:
    """The block device below the file system.

    Attributes:
        name: "" if there is none.
        write_cache: as the kernel has it: "write back", "write through"; "" if it does not say.
        backing: of a loop device, the file.
        is_stacked: made of other devices (LVM, RAID, encryption), whose caches count.
    """

    name: str = ""
    write_cache: str = ""
    backing: str = ""
    is_stacked: bool = False


DEVICE: Check[Device] = Check(
    "device",
    "block device and its write cache",
    (1, 2),
    (
        Rule(Outcome.SKIPPED, lambda f: not f.name, "the file system has no block device of its own"),
        Rule(
            Outcome.WARN,
            lambda f: f.backing,
            "{f.name} is the file {f.backing}: a sync is worth what it is worth there",
            "examine the directory of {f.backing}, too",
        ),
        Rule(
            Outcome.OK,
            lambda f: f.write_cache == "write back",
            "{f.name} has a volatile write cache, which each sync has to flush",
        ),
        Rule(
            Outcome.OK,
            lambda f: f.write_cache == "write through",
            "{f.name} reports no volatile write cache",
        ),
        Rule(Outcome.UNKNOWN, otherwise, "{f.name} does not report whether it has a write cache"),
    ),
)


@dataclass(frozen=True, slots=True)
class Sync:
    """Appends of a few bytes to an allocated file, each followed by fdatasync.

    Attributes:
        error: of the operating system; "" if there was none.
        device_writes, device_flushes: that the device completed meanwhile, of all programs; None if it does not count.
        needs_flushes: whether the device has a volatile write cache that only a flush empties.
    """

    error: str = ""
    is_in_memory: bool = False
    syncs: int = 0
    p50_seconds: float = 0.0
    p90_seconds: float = 0.0
    p99_seconds: float = 0.0
    max_seconds: float = 0.0
    device_writes: int | None = None
    device_flushes: int | None = None
    needs_flushes: bool = False

    @property
    def is_implausible(self) -> bool:
        return self.p50_seconds < _IMPLAUSIBLE_SECONDS

    @property
    def percentiles(self) -> str:
        named = (("p50", self.p50_seconds), ("p90", self.p90_seconds), ("p99", self.p99_seconds))
        return ", ".join(f"{name} {milliseconds(each)}" for name, each in (*named, ("max", self.max_seconds)))


def milliseconds(seconds: float) -> str:
    """As text, with a unit.

    >>> milliseconds(0.0123), milliseconds(0.000_045)
    ('12.3 ms', '0.045 ms')
    """
    return f"{seconds * 1000:.1f} ms" if seconds >= 0.001 else f"{seconds * 1000:.3f} ms"


SYNC: Check[Sync] = Check(
    "sync",
    "latency of fdatasync over a few hundred appends, and whether the device saw them",
    (1, 2),
    (
        Rule(
            Outcome.FAIL,
            lambda f: f.error,
            "an append could not be synced: {f.error}",
            "dmesg | tail; smartctl -a on the disk",
        ),
        Rule(Outcome.SKIPPED, lambda f: f.is_in_memory, "there is no disk to sync to"),
        Rule(
            Outcome.FAIL,
            lambda f: f.device_writes is not None and 2 * f.device_writes < f.syncs,
            "{f.syncs} syncs, and the device completed {f.device_writes} writes: a sync does not reach it",
            "mount the file system without options that switch syncs off; unset LD_PRELOAD (eatmydata)",
        ),
        Rule(
            Outcome.FAIL,
            lambda f: f.needs_flushes and f.device_flushes is not None and 2 * f.device_flushes < f.syncs,
            "{f.syncs} syncs, and the device completed {f.device_flushes} flushes of its volatile cache: a power cut "
            "loses what was acknowledged",
            "mount the file system with barriers, or switch the cache off: hdparm -W0 DEVICE",
        ),
        Rule(
            Outcome.WARN,
            lambda f: f.is_implausible,
            "{f.syncs} syncs: {f.percentiles}; no disk is as fast, unless its cache has a battery",
            "switch the cache mode of the virtual machine from unsafe to none; unset LD_PRELOAD (eatmydata)",
        ),
        Rule(
            Outcome.WARN,
            lambda f: f.p99_seconds > _SLOW_SECONDS,
            "{f.syncs} syncs: {f.percentiles}; each commit waits as long",
            "iostat -x 1 shows which device is busy; put the root on a faster disk",
        ),
        Rule(Outcome.OK, otherwise, "{f.syncs} syncs: {f.percentiles}"),
    ),
)
