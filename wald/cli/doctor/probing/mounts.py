"""The file system of a directory from /proc/self/mountinfo, and its block device from /sys."""

from __future__ import annotations

import os
import re
import stat
from collections.abc import Iterator
from pathlib import Path

from wald.cli.doctor.judging.medium import Device, Mount

_MOUNTS = Path("/proc/self/mountinfo")
_BLOCKS = Path("/sys/dev/block")
_ESCAPED = re.compile(r"\\([0-7]{3})")
_WRITES, _FLUSHES = 4, 15  # of /sys/block/*/stat; see the kernel's Documentation/block/stat.rst


def mount_of(path: Path) -> Mount:
    """The mount that ``path`` is on.

    Raises:
        OSError: /proc is not there.
        LookupError: the mount is not in its list.
    """
    place = Path(os.path.realpath(path))
    found: Mount | None = None
    for mount in parse(_MOUNTS.read_text(errors="surrogateescape")):
        # A later one at the same place hides an earlier one.
        if place.is_relative_to(mount.mount_point) and (
            found is None or Path(mount.mount_point).is_relative_to(found.mount_point)
        ):
            found = mount
    if found is None:
        raise LookupError(f"{_MOUNTS}: the mount of {path} is not listed")
    return found


def parse(text: str) -> Iterator[Mount]:
    """The mounts in proc_pid_mountinfo(5): ``36 35 98:0 / /mnt rw,noatime master:1 - ext4 /dev/sda rw``."""
    for line in text.splitlines():
        before, _, behind = line.partition(" - ")
        fields, (type_, source, super_options) = before.split(), behind.split(" ", 2)
        options = dict.fromkeys([*fields[5].split(","), *super_options.split(",")])
        if "rw" in options and "ro" in options:
            del options["rw"]  # one of the two is read-only, and that decides
        yield Mount(type_, _plain(source), _plain(fields[4]), tuple(options))


def device_of(path: Path, mount: Mount) -> Device:
    """The block device of the file system that ``path`` is on; one without a name if it has none."""
    directory = _block(path, mount)
    if directory is None:
        return Device()
    disk = _disk(directory)
    return Device(
        name=directory.name,
        write_cache=_text(disk / "queue/write_cache"),
        backing=_text(disk / "loop/backing_file"),
        is_stacked=any((disk / "slaves").iterdir()) if (disk / "slaves").is_dir() else False,
    )


def completed(path: Path, mount: Mount) -> tuple[int | None, int | None]:
    """How many writes and flushes the device has completed since it is there; None if it does not count them."""
    directory = _block(path, mount)
    if directory is None:
        return None, None
    counts = [int(each) for each in _text(_disk(directory) / "stat").split()]
    return tuple(counts[at] if at < len(counts) else None for at in (_WRITES, _FLUSHES))  # type: ignore[return-value]


def _block(path: Path, mount: Mount) -> Path | None:
    """Its directory in /sys; that of the mount's source where files have a number of their own (btrfs)."""
    for number in (_number(mount.source), path.stat().st_dev):
        directory = _BLOCKS / f"{os.major(number)}:{os.minor(number)}"
        if number and directory.exists():
            return directory.resolve()
    return None


def _number(source: str) -> int:
    try:
        status = os.stat(source)
    except OSError:
        return 0
    return status.st_rdev if stat.S_ISBLK(status.st_mode) else 0


def _disk(directory: Path) -> Path:
    """The whole disk of a partition."""
    return directory.parent if (directory / "partition").exists() else directory


def _text(path: Path) -> str:
    try:
        return path.read_text().strip()
    except OSError:
        return ""


def _plain(text: str) -> str:
    r"""A path in which \040 stands for a blank."""
    return _ESCAPED.sub(lambda found: chr(int(found[1], 8)), text)
