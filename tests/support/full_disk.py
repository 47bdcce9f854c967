"""A real file system that is small enough to fill."""

import os
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest


@contextmanager
def small_file_system(path: Path, length: int) -> Iterator[Path]:
    """Mount a tmpfs of ``length`` bytes; fail without root or the right to create a user namespace."""
    path.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", f"size={length}", "wald-test", path], capture_output=True, check=False
    )
    assert mounted.returncode == 0, f"needs root, or unshare -rm pytest: {mounted.stderr.decode()}"
    try:
        yield path
    finally:
        subprocess.run(["umount", "--lazy", path], check=True)


def fill(path: Path) -> None:
    """Use all free space."""
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT)
    for block in (bytes(1 << 20), bytes(1 << 12)):
        with pytest.raises(OSError, match="No space left"):
            _write_without_end(descriptor, block)
    os.close(descriptor)


def _write_without_end(descriptor: int, block: bytes) -> None:
    while True:
        os.write(descriptor, block)
