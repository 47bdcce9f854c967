"""Estimates of the bytes to pack from names and indexes."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from archives import SOFTWARE
from logs import Built

from wald.format.names import Kind
from wald_archive import engines
from wald_archive.codecs import Codec
from wald_archive.engines import due_bytes, spark_pays
from wald_archive.ledger import Request
from wald_archive.parts import Records


def request(route: str = "a", to: int | None = None) -> Request:
    return Request(route, "processed", Records(10), Codec.ZST, SOFTWARE, to)


@pytest.fixture
def three(built: Built) -> Built:
    """Two sealed segments with 1000 bytes of a in each, records 1 to 10 and 21 to 30, and 100 bytes in the active."""
    for _ in range(2):
        built.lines("a", [b"x" * 99] * 10)
        built.lines("b", [b"y" * 9] * 10)
        built.cut()
    built.seal()
    built.lines("a", [b"x" * 99])
    return built


def active_bytes(built: Built) -> int:
    return built.writer.position


def test_sealed_segments_tell_the_bytes_of_a_route(three: Built) -> None:
    """The estimate has all records after the cursor, and the whole segment of the cursor."""
    assert due_bytes(three.log, request()) == 2000 + active_bytes(three)
    assert due_bytes(three.log, request("b")) == 200 + active_bytes(three)
    three.log.set_cursor("a", 5)
    assert due_bytes(three.log, request()) == 2000 + active_bytes(three)
    three.log.set_cursor("a", 10)
    assert due_bytes(three.log, request()) == 1000 + active_bytes(three)
    three.log.set_cursor("a", 41)
    assert due_bytes(three.log, request()) <= active_bytes(three)


def test_what_is_left_for_later_does_not_count(three: Built) -> None:
    assert due_bytes(three.log, request(to=20)) == 1000


def test_a_cut_segment_counts_with_its_file(built: Built) -> None:
    built.lines("a", [b"x" * 99] * 10)
    built.cut()
    assert due_bytes(built.log, request()) == built.path(1, Kind.RAW).stat().st_size + active_bytes(built)


def test_what_is_wrong_counts_nothing(three: Built) -> None:
    """Whoever packs meets it, and tells."""
    three.path(1, Kind.SEALED).write_bytes(b"")
    assert due_bytes(three.log, request()) == 1000 + active_bytes(three)
    assert due_bytes(three.log, request("none")) == 0


def test_spark_pays_with_idle_cores_and_enough_to_do(
    three: Built, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    there = due_bytes(three.log, request()) + due_bytes(three.log, request("b"))
    for cores in (2, 5):
        monkeypatch.setattr(os, "sched_getaffinity", lambda _, cores=cores: set(range(cores)))
        for enough in (there - 1, there):
            monkeypatch.setattr(engines, "SPARK_PAYS_BYTES", enough)
            assert spark_pays(three.log, [request(), request("b")]) == (cores > 4 and enough < there)
