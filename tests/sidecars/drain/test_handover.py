"""Handover files: content survives a crash, a torn file counts as absent, and one process at a time holds the file."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from damage import every_flip, every_truncation
from logs import Built

from wald.errors import Locked, NotFound
from wald.files.disk import Disk
from wald_drain.redrive import Handover, HandoverFile, decode_handover, encode_handover

HANDOVER = Handover(10, 11, 20, "exit 3 after 5 tries", 5, "dead_letter", 1_795_255_200_000_000_000)
LINE = (
    b'{"after": 10, "first": 11, "last": 20, "reason": "exit 3 after 5 tries", "tries": 5, '
    b'"dead_letter": "dead_letter", "at_ns": 1795255200000000000, "head": 0, "crc": "%s"}\n'
)


@pytest.fixture
def built(tmp_path: Path) -> Built:
    log = Built(tmp_path / "log")
    log.lines("a", [b"one"])
    return log


def test_the_line_has_every_field() -> None:
    assert encode_handover(HANDOVER) == LINE % b"e099fb41"
    assert decode_handover(LINE % b"e099fb41") == HANDOVER
    assert HANDOVER.position == 20
    now = replace(HANDOVER, head=450)
    assert decode_handover(encode_handover(now)) == now
    assert now.position == 450


def test_torn_line_says_nothing() -> None:
    line = encode_handover(HANDOVER)

    assert {decode_handover(torn) for torn in every_truncation(line[:-1])} == {None}


def test_changed_line_never_says_something_else() -> None:
    line = encode_handover(HANDOVER)

    assert {decode_handover(changed) for changed in every_flip(line)} <= {None, HANDOVER}


def test_other_content_says_nothing() -> None:
    for line in [b"null", b"[1]", b"7", b"{}", b'{"crc": "e099fb41"}', b"[" * 100_000]:
        assert decode_handover(line) is None


def test_what_was_begun_is_there_until_it_ends(built: Built) -> None:
    with HandoverFile(built.root, "a", "g", Disk()) as file:
        assert file.begun() is None
        file.begin(HANDOVER)
    with HandoverFile(built.root, "a", "g", Disk()) as file:
        assert file.begun() == HANDOVER
        file.end()
    with HandoverFile(built.root, "a", "g", Disk()) as file:
        assert file.begun() is None


def test_what_a_crash_left_torn_is_replaced(built: Built) -> None:
    (built.root.cursor_directory("a") / "g.drain").write_bytes(encode_handover(HANDOVER)[:40])
    with HandoverFile(built.root, "a", "g", Disk()) as file:
        assert file.begun() is None
        file.begin(HANDOVER)
        assert file.begun() == HANDOVER


def test_one_drain_per_route_and_group(built: Built) -> None:
    built.lines("b", [b"two"])
    with HandoverFile(built.root, "a", "g", Disk()):
        with pytest.raises(Locked, match="this process works on route a for group g already"):
            HandoverFile(built.root, "a", "g", Disk())
        for route, group in (("a", "h"), ("b", "g")):
            with HandoverFile(built.root, route, group, Disk()) as file:
                assert file.begun() is None
    with HandoverFile(built.root, "a", "g", Disk()) as file:
        assert file.begun() is None


def test_no_route_no_file(built: Built) -> None:
    with pytest.raises(NotFound):
        HandoverFile(built.root, "nosuch", "g", Disk())
    assert not built.root.route("nosuch").exists()
