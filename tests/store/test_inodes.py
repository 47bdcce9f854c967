"""A name stands for a file until it is given to another."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from tracing import strace

from wald.files.safe_open import FileIdentity, is_regular


@pytest.fixture
def path(tmp_path: Path) -> Path:
    path = tmp_path / "file"
    path.write_bytes(b"")
    return path


@pytest.fixture(params=["early", "late"])
def name(path: Path, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> Iterator[FileIdentity]:
    """The first calls of a process are by stat(2), the others by statx(2)."""
    monkeypatch.setattr("wald.files.safe_open._early_calls", iter([1] * 9 if request.param == "early" else []))
    with path.open("rb") as file:
        yield FileIdentity(path, file.fileno())


def test_it_holds_whatever_is_written_and_not_if_it_is_removed_moved_or_replaced(
    path: Path, name: FileIdentity
) -> None:
    path.write_bytes(b"more")
    assert name.is_current()
    path.rename(path.with_name("elsewhere"))
    assert not name.is_current()
    path.write_bytes(b"")
    assert not name.is_current()
    path.unlink()
    path.symlink_to("elsewhere")
    assert not name.is_current()  # readers do not follow links
    path.unlink()
    path.with_name("elsewhere").rename(path)
    assert name.is_current()


def test_an_inode_of_another_device_is_another_file(path: Path) -> None:
    """Numbers are given out by each file system for itself: here both roots have the same one, mostly."""
    for folder in (Path("/proc"), Path("/sys"), path.parent):
        descriptor = os.open(folder, os.O_RDONLY)
        assert [
            FileIdentity(other, descriptor).is_current() for other in (Path("/proc"), Path("/sys"), path.parent)
        ] == [other == folder for other in (Path("/proc"), Path("/sys"), path.parent)]
        os.close(descriptor)


def test_where_statx_is_forbidden_stat_tells_as_much(tmp_path: Path) -> None:
    """Some container runtimes of 2019 forbid it."""
    script = """
import pathlib, sys
from wald.files import safe_open
from wald.files.safe_open import FileIdentity, is_regular
safe_open._early_calls = iter(())
path = pathlib.Path(sys.argv[1])
file = path.open("wb")
name = FileIdentity(path, file.fileno())
held = name.is_current()
path.rename(path.with_name("elsewhere"))
print(is_regular(file.fileno()), held, name.is_current())
"""
    line: list[str | Path] = [sys.executable, "-c", script, tmp_path / "file"]
    trace = tmp_path / "trace"

    done = subprocess.run(
        [strace(), "-o", trace, "-e", "inject=statx:error=EPERM", *line], capture_output=True, check=True
    )

    assert done.stdout == b"True True False\n"
    assert trace.read_text().count("EPERM") == 4


def test_only_a_regular_file_is_one(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By statx(2), by stat(2) in the first calls of a process, and with a C library without statx."""
    monkeypatch.setattr("wald.files.safe_open._early_calls", iter([1] * 4))
    for _ in range(2):
        for place in (path, path.parent, Path("/dev/null")):
            descriptor = os.open(place, os.O_RDONLY)
            assert is_regular(descriptor) == place.is_file()
            os.close(descriptor)
        assert not is_regular(descriptor)
        assert not FileIdentity(path, descriptor).is_current()
    monkeypatch.setattr("wald.files.safe_open._statx", lambda: lambda *_: -1)
    with path.open("rb") as file:
        assert FileIdentity(path, file.fileno()).is_current()
        assert is_regular(file.fileno())
