"""Reading a bundle: from the tar back to parts, each checked against its index; no more than one part in memory."""

from __future__ import annotations

import io
import tarfile
from collections.abc import Iterator
from dataclasses import dataclass, field

from sidecars.archive.bundle import ABOUT
from sidecars.archive.codecs import BadStream
from sidecars.archive.layout import part_name
from sidecars.archive.parts import BadIndex, Form, Part, Run, parse_run

_BUFFER_BYTES = 1 << 20


class BadBundle(ValueError):
    """The tar is not what a bundle is, or the records in it are not those its indexes tell of."""


@dataclass(slots=True)
class Reading:
    """The parts of the bundle ``stem``, in order; afterwards :attr:`about` is the content of its ``bundle.json``.

    Args:
        tar: the decompressed tar, in pieces; read to its end.
    """

    stem: str
    tar: Iterator[bytes]
    about: bytes = field(default=b"", init=False)

    def parts(self) -> Iterator[Part]:
        """
        Raises:
            BadBundle: something is missing, out of place or not as its index says; or the tar cannot be read.
        """
        try:
            with tarfile.open(fileobj=_File(self.tar), mode="r|", bufsize=_BUFFER_BYTES) as tar:
                yield from self._parts(tar)
            for _ in self.tar:
                """What follows the end of a tar counts for its digest."""
        except (tarfile.TarError, BadStream, EOFError, UnicodeError) as error:
            raise BadBundle(str(error)) from error

    def _parts(self, tar: tarfile.TarFile) -> Iterator[Part]:
        runs: list[Run] = []
        last = 0
        while (member := tar.next()) is not None:
            content = tar.extractfile(member)
            folder, _, name = member.name.removeprefix(f"{self.stem}/").rpartition("/")
            if content is None or not member.name.startswith(f"{self.stem}/") or self.about:
                raise BadBundle(f"{member.name}: does not belong into a bundle")
            data = content.read()
            if folder == "batches" and not runs:
                runs = _runs(member.name, name, data)
            elif folder == "records" and runs:
                part = _part(member.name, name, data, runs)
                if part.first <= last:
                    raise BadBundle(f"{member.name}: record {part.first} comes behind record {last}")
                last, runs = part.last, []
                yield part
            elif (folder, name) == ("", ABOUT) and not runs and last:
                self.about = data
            else:
                raise BadBundle(f"{member.name}: not what is to follow here")
        if not self.about:
            raise BadBundle(f"it ends without {ABOUT}")


def _runs(member: str, name: str, data: bytes) -> list[Run]:
    try:
        runs = [parse_run(line) for line in data.removesuffix(b"\n").split(b"\n")]
    except BadIndex as error:
        raise BadBundle(f"{member}: {error}") from error
    if name != part_name(runs[0].first, ".jsonl"):
        raise BadBundle(f"{member}: begins with record {runs[0].first}")
    return runs


def _part(member: str, name: str, data: bytes, runs: list[Run]) -> Part:
    form = Form.LINES if name.endswith(Form.LINES.value) else Form.OBJECTS
    offset, sequence = 0, runs[0].first
    for run in runs:
        end = run.offset + run.bytes
        records = data.count(b"\n", run.offset, end)
        if run.part != name or run.offset != offset or run.first < sequence or records != run.count:
            raise BadBundle(f"{member}: offset {offset}: {records} records, not as its index says")
        if not records or data[end - 1 : end] != b"\n":
            raise BadBundle(f"{member}: offset {end}: no record ends here")
        offset, sequence = end, run.last + 1
    if offset != len(data) or name != part_name(runs[0].first, form.value):
        raise BadBundle(f"{member}: {len(data)} bytes, not the {offset} that its index tells of")
    return Part(
        form,
        first=runs[0].first,
        last=runs[-1].last,
        count=sum(run.count for run in runs),
        data_bytes=len(data),
        earliest_ns=runs[0].append_time_ns,
        latest_ns=runs[-1].append_time_ns,
        data=[data],
        runs=runs,
    )


class _File(io.RawIOBase):
    """Pieces of bytes as a file that can be read."""

    def __init__(self, chunks: Iterator[bytes]) -> None:
        self._chunks = chunks
        self._left = b""

    def read(self, count: int = -1, /) -> bytes:
        if not self._left:
            self._left = next(self._chunks, b"")
        taken, self._left = self._left[:count], self._left[count:]
        return taken
