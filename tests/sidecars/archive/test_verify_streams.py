"""Verification continues behind damage while a thread reads ahead: every changed byte is found."""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterator
from concurrent.futures import Future
from pathlib import Path
from types import FrameType

import pytest
from archives import archive, bags, findings
from damage import flipped
from logs import Built
from running import eventually

from wald.checking.checker import Level
from wald.files.disk import Disk
from wald_archive.codecs import Codec
from wald_archive.objects import Directory

PIECE_BYTES = 4000


class Changed(Directory):
    """A destination that gives its files piece by piece, and one byte of the bundle changed."""

    def __init__(self, bundle: Path, piece_bytes: int = PIECE_BYTES) -> None:
        super().__init__(bundle.parents[3], Disk())
        self._bundle = bundle.name
        self._piece_bytes = piece_bytes
        self._files: dict[str, bytes] = {}
        self.offset: int | None = None

    def read(self, name: str) -> Iterator[bytes]:
        if name not in self._files:
            self._files[name] = b"".join(super().read(name))
        data = self._files[name]
        of_bundle = name.endswith(self._bundle)
        if of_bundle and self.offset is not None:
            data = flipped(data, 8 * self.offset + self.offset % 8)
        for start in range(0, len(data), self._piece_bytes):
            if of_bundle and start:
                self.on_next_piece()
            yield data[start : start + self._piece_bytes]

    def on_next_piece(self) -> None:
        """Called before each piece of the bundle except the first."""


def accused(place: Directory) -> list[str]:
    return [found.file for found in findings(place) if found.level is Level.ERROR]


def bundle_of(built: Built, dest: Path, codec: Codec) -> Path:
    """The only one of an archive."""
    archive(built, dest, codec=codec)
    (path,) = bags(dest)[0].glob(f"data/*{codec.suffix}")
    return path


@pytest.mark.parametrize(
    "codec", [Codec.ZST, Codec.GZ, pytest.param(Codec.NONE, marks=pytest.mark.slow)], ids=lambda codec: codec.value
)
def test_every_changed_byte_is_found(mixed: Built, dest: Path, codec: Codec) -> None:
    bundle = bundle_of(mixed, dest, codec)
    place = Changed(bundle)
    assert accused(place) == []
    for place.offset in range(bundle.stat().st_size):
        assert accused(place) == [f"data/{bundle.name}"], place.offset


def is_waiting(thread: int) -> bool:
    """Return True if a thread waits for the result of another one."""
    frame: FrameType | None = sys._current_frames()[thread]
    while frame is not None and frame.f_code is not Future.result.__code__:
        frame = frame.f_back
    return frame is not None


@pytest.mark.parametrize("offset", [100, 600])
def test_damage_is_found_while_a_slow_destination_is_being_read(mixed: Built, dest: Path, offset: int) -> None:
    """The next piece arrives only after the damage was found."""
    prover = threading.get_ident()

    class Slow(Changed):
        def on_next_piece(self) -> None:
            eventually(lambda: is_waiting(prover) or threading.get_ident() == prover)

    bundle = bundle_of(mixed, dest, Codec.NONE)
    place = Slow(bundle, 512)
    place.offset = offset

    assert accused(place) == [f"data/{bundle.name}"]


def test_a_destination_that_fails_behind_damage_says_so(mixed: Built, dest: Path) -> None:
    """An error of the reading thread is kept; otherwise the digest would cover half a file."""

    class Failing(Changed):
        def on_next_piece(self) -> None:
            raise OSError("no such sector")

    place = Failing(bundle_of(mixed, dest, Codec.NONE), 512)
    place.offset = 100

    with pytest.raises(OSError, match="no such sector"):
        findings(place)
