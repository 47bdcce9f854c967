"""Real file systems with real options: in files behind loop devices, as overlays, read-only, in memory."""

import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import programs

MIB = 1 << 20


@contextmanager
def mounted(at: Path, *arguments: object) -> Iterator[Path]:
    """Run ``mount ARGUMENTS at``; fail without root or the right to create a user namespace."""
    at.mkdir(exist_ok=True)
    done = subprocess.run(["mount", *map(str, arguments), at], capture_output=True, check=False)
    assert done.returncode == 0, f"needs root, or unshare -rm pytest: {done.stderr.decode()}"
    try:
        yield at
    finally:
        subprocess.run(["umount", "--lazy", at], check=True)


@contextmanager
def disk(scratch: Path, type_: str, options: str = "defaults") -> Iterator[Path]:
    """Mount a file system of this type in a file, behind a loop device."""
    image, length = scratch / "image", {"ext4": 48, "btrfs": 120}[type_] * MIB
    with image.open("wb") as file:
        file.truncate(length)
    subprocess.run([programs.program(f"mkfs.{type_}"), "-q", image], check=True, capture_output=True)
    with mounted(scratch / "disk", "-o", f"loop,{options}", image) as at:
        yield at


@contextmanager
def overlay(scratch: Path) -> Iterator[Path]:
    """Mount a layer over an empty directory, as in a container; both in memory, which always works."""
    with mounted(scratch / "layers", "-t", "tmpfs", "tmpfs") as layers:
        for name in ("lower", "upper", "work"):
            (layers / name).mkdir()
        named = ",".join(f"{name}dir={layers / name}" for name in ("lower", "upper", "work"))
        with mounted(scratch / "merged", "-t", "overlay", "overlay", "-o", named) as at:
            yield at
