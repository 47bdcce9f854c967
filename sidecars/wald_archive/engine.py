"""Engines, which make the bundles of a run: each is written to the destination, its digest beside it, and read back.

What an engine makes depends on the run and the records alone, so one may go on with what another has left.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from itertools import chain
from typing import Protocol

from wald.errors import Damaged
from wald.log import Log
from wald.reading.assembler import Batch
from wald_archive.bundle import Bundle, bundle
from wald_archive.codecs import BadStream, Codec, in_order
from wald_archive.destination import Destination
from wald_archive.layout import DIGEST_SUFFIX, PAYLOAD, bundle_stem
from wald_archive.ledger import Run
from wald_archive.sizes import BundleBatches
from wald_archive.tags import digest_file


class Engine(Protocol):
    """What makes the bundles of a run."""

    def bundles(self, run: Run, on_record: Callable[[int], None]) -> Iterator[Bundle]:
        """Every bundle of ``run``, in order; each is at the destination when it comes out, and read back.

        Args:
            on_record: called with the last sequence packed.

        Raises:
            NotFound: RECLAIM has removed records that belong to it.
            NotGivenBack: the destination does not return the bytes that were written.
            Damaged: records that belong to it cannot be read.
            Refused: something else is at the destination.
            OSError: the destination or the log's disk fails.
        """


class EngineMaker(Protocol):
    """What the entry point of an engine is, in the group ``wald_archive.engines``: a module with these functions."""

    def is_there(self) -> bool:
        """Whether what the engine needs is installed."""

    def start(self, log: Log, destination: Destination, master: str | None, stack: ExitStack) -> Engine:
        """The engine, on the cluster ``master``; it ends with ``stack``.

        Raises:
            NotFound: what it needs is not installed.
        """


class NotGivenBack(Damaged):
    """What was read back from the destination is not what was written to it."""


@dataclass(frozen=True, slots=True)
class LocalEngine:
    """One bundle after the other, in this process."""

    log: Log
    destination: Destination

    def bundles(self, run: Run, on_record: Callable[[int], None]) -> Iterator[Bundle]:
        def watched() -> Iterator[Batch]:
            for batch in self.log.batches(run.origin.route, run.first, run.last):
                on_record(batch.last_sequence)
                yield batch

        after = run.after
        for portion in BundleBatches(watched(), run.size):
            made = write_bundle(self.destination, run, portion, after)
            yield made
            after = made.contents.last


def write_bundle(destination: Destination, run: Run, batches: Iterator[Batch], after: int) -> Bundle:
    """Write one bundle of ``run`` and its digest, and read both back.

    Args:
        batches: all that it is to hold; at least one.
        after: the last record of the bundle before; that of the first one is the run's.

    Raises:
        NotGivenBack, Refused, OSError: as of :meth:`Engine.bundles`; and whatever ``batches`` raises.
    """
    begin = next(batches)
    name = f"{run.bag}/{PAYLOAD}/{bundle_stem(run.origin.route, begin.first_sequence)}{run.codec.suffix}"
    with destination.writing(name) as file:
        everything = chain([begin], batches)
        made = bundle(everything, origin=run.origin, codec=run.codec, after=after, sink=file.write)
    _read_back(destination, name, made, run.codec)
    write_file(destination, name + DIGEST_SUFFIX, digest_file(made.sha256, made.name))
    return made


def write_file(destination: Destination, name: str, data: bytes) -> None:
    """Write a small file, and read it back; raises as :func:`write_bundle`."""
    with destination.writing(name) as file:
        file.write(data)
    if b"".join(destination.read(name)) != data:
        raise _not_given_back(destination.full_name(name))


def _read_back(destination: Destination, name: str, made: Bundle, codec: Codec) -> None:
    stored, tar = hashlib.sha256(), hashlib.sha256()

    def chunks() -> Iterator[bytes]:
        for chunk in destination.read(name):
            stored.update(chunk)
            yield chunk

    lengths = [length for length, _ in made.frames]
    frames = zip(_reparted(chunks(), lengths), made.frames, strict=True)
    try:
        for content in in_order(lambda frame: codec.expand(frame[0], frame[1][1]), frames):
            tar.update(content)
    except (BadStream, ValueError) as error:
        raise _not_given_back(destination.full_name(name)) from error
    if (stored.hexdigest(), tar.hexdigest()) != (made.sha256, made.tar_sha256):
        raise _not_given_back(destination.full_name(name))


def _reparted(chunks: Iterator[bytes], lengths: Sequence[int]) -> Iterator[bytes]:
    """The same bytes in pieces of these lengths, and whatever is left."""
    pending = b""
    for length in lengths:
        pieces, missing = [pending], length - len(pending)
        while missing > 0 and (chunk := next(chunks, b"")):
            pieces.append(chunk)
            missing -= len(chunk)
        pending = b"".join(pieces)
        yield pending[:length]
        pending = pending[length:]
    if pending or (pending := next(chunks, b"")):
        yield pending


def _not_given_back(name: str) -> NotGivenBack:
    return NotGivenBack(
        f"{name}: read back, it is not what was written; nothing was acknowledged",
        hint="the destination does not return what was written; archive to another place: --dest DIR",
    )
