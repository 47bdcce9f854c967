"""Lost records of a damaged segment may be of any of its routes; ``--verify`` reads frames before they go."""

import json
import os
import re
import subprocess
from collections.abc import Callable, Iterable, Sequence
from itertools import chain, combinations, product
from pathlib import Path
from typing import Any

import pytest
from contents import errors
from damage import flipped
from logs import Built
from reclaiming import ANYTHING_READ, EXPIRE, Reclaimer, bases, ledger, reclaim
from running import output_of, run, sidecar

from wald.format.names import Kind
from wald.format.sealed_index import Frame
from wald.retention.audit import audit_deletion
from wald.retention.backlog import Backlog, SegmentStatus
from wald.retention.history import History
from wald.retention.progress import measure_lags
from wald.segments.sealed_file import FRAME_BYTES, SealedFile
from wald_reclaim.policy import Limits
from wald_reclaim.survey import Survey


def damaged(path: Path, order: str, at: bytes) -> Built:
    """Segment 1 with a batch of one line for each route in ``order``, the line ``at`` spoilt; then one with both."""
    built = Built(path / "root")
    for number, route in enumerate(order, start=1):
        built.lines(route, [b"line %d" % number])
    built.cut()
    raw = built.path(1, Kind.RAW)
    data = raw.read_bytes()
    assert data.count(at) == 1
    raw.write_bytes(data.replace(at, b"spoilt"))
    built.seal()
    built.lines("a", [b"later"])
    built.lines("b", [b"later"])
    built.cut()
    built.seal()
    return built


def pins(built: Built) -> list[tuple[str, int]]:
    """Return the pins of the first segment: each group, and the record that it must reach."""
    return [(pin.route, pin.needs) for pin in status(built).pins]


@pytest.mark.parametrize(("at", "a"), [(b"line 1", 3), (b"line 2", 3), (b"line 3", 3), (b"line 4", 4)])
def test_a_route_has_to_be_past_the_last_record_that_is_lost(tmp_path: Path, at: bytes, a: int) -> None:
    built, needed = damaged(tmp_path, "abab", at), {"a": a, "b": 4}
    assert dict(pins(built)) == needed
    for route, sequence in needed.items():
        put(built, **({"a": 6, "b": 6} | {route: sequence - 1}))
        assert pins(built) == [(route, sequence)]
        reclaim(built)
        assert bases(built.root) == [1, 5]
    put(built, **needed)
    reclaim(built)

    assert bases(built.root) == [5]
    (line,) = ledger(built.root.path)
    assert (line["base"], line["rule"], line["damaged"]) == (1, "read", True)


def test_a_segment_of_which_no_record_is_left_never_goes(tmp_path: Path) -> None:
    built = damaged(tmp_path, "a", b"line 1")
    put(built, a=3, b=3)
    reclaim(built)

    assert bases(built.root)[0] == 1
    assert "their routes are unknown" in status(built).problem
    assert errors(built.root.path)


def test_a_segment_without_an_index_goes_as_it_would_with_one(tmp_path: Path) -> None:
    built = damaged(tmp_path, "ab", b"line 1")
    path = built.path(1, Kind.SEALED)
    path.write_bytes(path.read_bytes()[:-9])
    put(built, a=4, b=1)
    assert pins(built) == [("b", 2)]
    reclaim(built)
    assert bases(built.root) == [1, 3]
    put(built, b=2)
    reclaim(built)
    assert bases(built.root) == [3]
    assert ledger(built.root.path)[0]["damaged"] is True


LASTS = {"a": 2, "b": 5}
"""Last record of each route in the first segment."""


@pytest.fixture
def framed(tmp_path: Path) -> Built:
    """Create segment 1 with records 1 and 2 of a, and 3 to 5 of b, each in a separate frame; then two segments of a."""
    framed = Built(tmp_path / "root", segment_max_bytes=16 << 20)
    for number, route in enumerate("aabbb"):
        framed.lines(route, [b"%d" % number * (FRAME_BYTES * 2 // 3)])
    for _ in range(2):
        framed.cut()
        framed.lines("a", [b"later"])
    framed.seal()
    assert len(frames(framed)) == 5
    return framed


def frames(framed: Built) -> Sequence[Frame]:
    with SealedFile(framed.path(1, Kind.SEALED)) as sealed:
        return sealed.index.frames


def spoil_places(framed: Built, whole: bytes, places: Iterable[int]) -> None:
    """Give segment 1 the bytes ``whole`` with a bit flipped at each of ``places``."""
    for place in places:
        whole = flipped(whole, 8 * place)
    framed.path(1, Kind.SEALED).write_bytes(whole)


def lose_rest(framed: Built, number: int) -> None:
    """Flip a bit of a frame's header and one of the seek table: the next frame cannot be found."""
    whole = framed.path(1, Kind.SEALED).read_bytes()
    spoil_places(framed, whole, [frames(framed)[number].offset, len(whole) - 1])


def cut_short(framed: Built, number: int) -> None:
    os.truncate(framed.path(1, Kind.SEALED), frames(framed)[number].offset + 9)


def cut_out(framed: Built, number: int) -> None:
    """Remove a frame; the others are whole, and follow each other."""
    whole, frame = framed.path(1, Kind.SEALED).read_bytes(), frames(framed)[number]
    framed.path(1, Kind.SEALED).write_bytes(whole[: frame.offset] + whole[frame.offset + frame.compressed_bytes :])


def forget_sealing(framed: Built) -> None:
    """Remove the ledger of the sealer."""
    (framed.root.ledger / "segments.jsonl").unlink()


def put(framed: Built, **cursors: int) -> None:
    for route, sequence in cursors.items():
        framed.log.set_cursor(route, sequence, rewind=True)


def lose_rest_unknown(framed: Built) -> None:
    lose_rest(framed, 1)
    forget_sealing(framed)


def status(framed: Built) -> SegmentStatus:
    return next(s for s in Backlog(framed.view).segments() if s.segment.base_sequence == 1)


@pytest.mark.parametrize(
    ("spoilt", "number"), [(lose_rest, 1), (lose_rest, 2), (cut_short, 1), (cut_short, 2), (cut_out, 4)]
)
def test_a_route_whose_records_are_all_behind_the_damage_holds_the_segment_back(
    framed: Built, spoilt: Callable[[Built, int], None], number: int
) -> None:
    spoilt(framed, number)
    put(framed, a=7)
    reclaim(framed)
    assert bases(framed.root) == [1]
    assert pins(framed) == [("b", 5)]
    assert status(framed).last_sequence == 5

    put(framed, b=5)
    reclaim(framed)
    assert bases(framed.root) == []
    reported = next(line for line in ledger(framed.root.path) if line["base"] == 1)
    assert (reported["last"], reported["damaged"]) == (5, True)
    assert {each["route"]: (each["count"], each["first"], each["last"]) for each in reported["routes"]} == {
        "a": (2, 1, 2),
        "b": (3, 3, 5),
    }
    assert audit_deletion(reported, History(framed.root).sealing_of(1)).errors == ()
    assert errors(framed.root.path) == []


@pytest.mark.parametrize("spoilt", [lose_rest, cut_short])
@pytest.mark.parametrize("number", [1, 4])
def test_without_the_line_about_its_sealing_it_stays_and_what_to_type_is_said(
    framed: Built, spoilt: Callable[[Built, int], None], number: int
) -> None:
    spoilt(framed, number)
    forget_sealing(framed)
    put(framed, a=7, b=7)
    done = run(sidecar("reclaim", "--root", framed.root.path, "--grace", 0))
    words = output_of("explain", "--root", framed.root.path).decode()
    reported = json.loads(output_of("explain", "--json", "--root", framed.root.path).splitlines()[0])

    assert bases(framed.root) == [1]
    for answer in (done.stderr.decode(), words):
        assert "segments.jsonl does not list the routes of their records" in answer
        assert "give up the lost records: wald " in answer
    assert "the routes of their records" in reported["message"]


def lose_all(framed: Built) -> None:
    path = framed.path(1, Kind.SEALED)
    path.write_bytes(bytes(path.stat().st_size))


@pytest.mark.parametrize("spoilt", [lose_rest_unknown, lose_all])
def test_what_to_type_names_the_file_that_is_there(framed: Built, spoilt: Callable[[Built], None]) -> None:
    """A segment that was released has its old name back by the time it is reported, except in a dry run."""
    spoilt(framed)
    framed.reclaim(1, keep=True)
    put(framed, a=7, b=7)
    for arguments, kind in [(["--dry-run"], Kind.RELEASED), ([], Kind.SEALED)]:
        done = run(sidecar("reclaim", "--root", framed.root.path, "--grace", 0, *arguments))
        path = framed.path(1, kind)
        assert path.exists()
        assert "give up the lost records: wald " in done.stderr.decode()
        assert set(re.findall(r"/\S*\.wal\S*?(?=:? )", done.stderr.decode())) == {str(path)}


@pytest.mark.parametrize("successor", ["reclaimed", "lost"])
def test_a_segment_of_whole_frames_is_not_damaged_though_its_index_and_its_successor_are(
    framed: Built, successor: str
) -> None:
    """By its name alone it could extend to the next existing segment; the ledger proves that it does not."""
    whole = framed.path(1, Kind.SEALED).read_bytes()
    if successor == "reclaimed":
        spoil_places(framed, whole, [len(whole) - 1])
        framed.reclaim(6)
    else:
        spoil_places(framed, whole, [len(whole) - 60])
        framed.path(6, Kind.SEALED).unlink()
    put(framed, a=2 if successor == "reclaimed" else 7, b=5)
    reclaim(framed)

    line = next(line for line in ledger(framed.root.path) if line["base"] == 1)
    assert bases(framed.root) == []
    assert "damaged" not in line
    assert line["sha256"]


@pytest.mark.parametrize("damage", [b'{"event": "sealed"', None])
def test_a_ledger_that_is_damaged_lets_nothing_go(framed: Built, damage: bytes | None) -> None:
    path = framed.root.ledger / "segments.jsonl"
    data = path.read_bytes()
    path.write_bytes(data.replace(b'["b",3,3,5', b'["b",3,3,3') if damage is None else damage + b"\n" + data)
    assert path.read_bytes() != data
    lose_rest(framed, 2)
    put(framed, a=7, b=7)
    reclaim(framed)

    assert bases(framed.root)[0] == 1
    assert not status(framed).readable


@pytest.mark.parametrize("sealed_line", [True, False])
def test_whatever_is_damaged_it_goes_only_when_everybody_who_has_records_in_it_is_past(
    framed: Built, sealed_line: bool
) -> None:
    """Any of its frames and its index × how far its routes are × where their last records are known from."""
    whole, places = framed.path(1, Kind.SEALED).read_bytes(), [frame.offset for frame in frames(framed)]
    if not sealed_line:
        forget_sealing(framed)
    subsets = chain.from_iterable(combinations(places, size) for size in range(len(places) + 1))
    damages = [(whole, (*subset, len(whole) - 1)) for subset in subsets]
    damages += [(whole[: place + 9], subset) for place in places for subset in ((), tuple(places[:1]))]
    cursors = list(product((0, 1, LASTS["a"], 7), (0, 3, LASTS["b"], 7)))
    went = 0
    for number, (data, subset) in enumerate(damages):
        spoil_places(framed, data, subset)
        # Each damage with some of the cursors, and those with which it may go, just so.
        for a, b in (cursors[5 * number % len(cursors)], (LASTS["a"], LASTS["b"])):
            put(framed, a=a, b=b)
            goes = first_goes(framed)
            assert not goes or (a >= LASTS["a"] and b >= LASTS["b"]), (subset, len(data), a, b)
            reported = status(framed)
            assert goes == (reported.readable and not reported.pins)
            went += goes
    assert went > (len(damages) // 2 if sealed_line else 0)


def first_goes(framed: Built) -> bool:
    survey = Survey(framed.root, ANYTHING_READ, log_id=framed.log_id)
    return next(iter(survey.decisions(now_ns=framed.now_ns))).verdict.is_deletion


@pytest.mark.parametrize("sealed_line", [True, False])
def test_lag_counts_what_a_reader_would_still_get(framed: Built, sealed_line: bool) -> None:
    lose_rest(framed, 3)
    if not sealed_line:
        forget_sealing(framed)
    for at in (0, 1, 3):
        put(framed, a=at, b=at)
        backlog = Backlog(framed.view)
        list(backlog.segments())
        cursors = [group.cursor for group in backlog.groups.values()]
        counted = {route: sum(r.sequence > at for r in framed.log.records(route, on_damage=print)) for route in "ab"}
        assert {group.cursor.route: group.lag.records for group in backlog.groups.values()} == counted
        assert {route: lag.records for (route, _), lag in measure_lags(framed.view, cursors).items()} == (counted)


@pytest.mark.parametrize(("a", "b", "lost"), [(0, 0, {"a": 2, "b": 3}), (1, 4, {"a": 1, "b": 1}), (2, 0, {"b": 3})])
def test_of_what_expires_the_lost_records_count_as_unread(framed: Built, a: int, b: int, lost: dict[str, int]) -> None:
    lose_rest(framed, 2)
    put(framed, a=a, b=b)
    reclaim(framed, Limits(max_records=1, others=EXPIRE))
    reported: Sequence[dict[str, object]] = [line for line in ledger(framed.root.path) if line["base"] == 1]

    assert [line["lost"] for line in reported] == [lost]
    assert audit_deletion(reported[0], History(framed.root).sealing_of(1)).errors == ()


@pytest.fixture
def by_turns(tmp_path: Path) -> Built:
    """Segment 1 with records 1 to 6, in frames of two each, by turns of a and b; then segment 7, and an active one."""
    by_turns = Built(tmp_path / "root")
    for number in range(3):
        # Of this length, so that no frame takes two of them.
        by_turns.lines("a", [os.urandom(400 << 10).hex().encode()])
        by_turns.lines("b", [b"line %d" % number])
    by_turns.cut()
    by_turns.lines("a", [b"later"])
    by_turns.lines("b", [b"later"])
    by_turns.cut()
    by_turns.seal()
    for route in "ab":
        by_turns.log.set_cursor(route, 8)
    return by_turns


def spoil(by_turns: Built, number: int) -> Frame:
    """Flip a bit in the middle of a frame of segment 1."""
    path = by_turns.path(1, Kind.SEALED)
    with SealedFile(path) as sealed:
        frame = sealed.index.frames[number]
    path.write_bytes(flipped(path.read_bytes(), 8 * (frame.offset + frame.compressed_bytes // 2)))
    return frame


def spoil_index(by_turns: Built) -> None:
    """Flip a bit of segment 1's index."""
    path = by_turns.path(1, Kind.SEALED)
    with SealedFile(path) as sealed:
        end = sealed.index.frames[-1].offset + sealed.index.frames[-1].compressed_bytes
    path.write_bytes(flipped(path.read_bytes(), 8 * (end + 60)))


def reclaim_as_process(by_turns: Built, *arguments: object) -> subprocess.CompletedProcess[bytes]:
    return run(sidecar("reclaim", "--root", by_turns.root.path, "--grace", 0, *arguments))


def line_about(by_turns: Built, base: int = 1) -> dict[str, Any]:
    return next(entry for entry in ledger(by_turns.root.path) if entry["base"] == base)


def test_what_was_damaged_after_sealing_goes_and_is_reported_of_where_frames_are_read_first(by_turns: Built) -> None:
    frame = spoil(by_turns, 1)
    planned = reclaim_as_process(by_turns, "--verify", "--dry-run")
    done = reclaim_as_process(by_turns, "--verify")

    path = by_turns.path(1, Kind.SEALED)
    assert planned.stdout.startswith(b"would reclaim 00000000000000000001.wal.zst: records 1 to 6, ")
    assert b", damaged\n" in planned.stdout
    assert done.returncode == 0
    assert done.stderr == planned.stderr
    assert done.stderr.decode().startswith(
        f"wald-reclaim: {path}: offset {frame.offset}: frame 1 cannot be decompressed"
    )
    reported = line_about(by_turns)
    assert (reported["rule"], reported["damaged"], reported["damaged_bytes"]) == ("read", True, frame.raw_bytes)
    assert bases(by_turns.root) == []


def test_what_was_taken_back_and_goes_again_is_reported_of_again(by_turns: Built) -> None:
    """By the same process, which has read its frames before."""
    spoil(by_turns, 1)
    reclaimer = Reclaimer(by_turns.root, by_turns.disk, grace_ns=1 << 60, verify=True)
    for sequence in (8, 0, 8):
        by_turns.log.set_cursor("a", sequence, rewind=True)
        reclaimer.look(now_ns=by_turns.now_ns)
    reclaimer.ledger.close()

    reported = [(entry["event"], entry.get("damaged")) for entry in ledger(by_turns.root.path) if entry["base"] == 1]
    assert reported == [("reclaimed", True), ("kept", None), ("reclaimed", True)]


def test_what_is_whole_goes_as_ever_where_frames_are_read_first(by_turns: Built) -> None:
    done = reclaim_as_process(by_turns, "--verify")

    assert (done.returncode, done.stderr) == (0, b"")
    assert "damaged" not in line_about(by_turns)


def test_a_segment_whose_index_is_damaged_goes_once_it_is_read_by_what_its_frames_tell(by_turns: Built) -> None:
    with SealedFile(by_turns.path(1, Kind.SEALED)) as sealed:
        digest = sealed.index.sha256.hex()
    spoil_index(by_turns)
    by_turns.log.set_cursor("b", 5, rewind=True)
    held = reclaim_as_process(by_turns)
    reported = output_of("explain", "--json", "--root", by_turns.root.path)
    words = output_of("explain", "--root", by_turns.root.path).decode()
    assert bases(by_turns.root) == [1, 7]
    assert b"checksum is wrong" in held.stderr
    standing = json.loads(reported.splitlines()[0])
    assert [(pin["route"], pin["needs"]) for pin in standing["pins"]] == [("b", 6)]
    assert "checksum is wrong" in standing["message"]
    assert "pinned by b/processed (at 5, needs 6); its index is damaged" in words

    by_turns.log.set_cursor("b", 8)
    done = reclaim_as_process(by_turns)

    assert bases(by_turns.root) == []
    assert b"checksum is wrong" in done.stderr
    reported_about = line_about(by_turns)
    assert (reported_about["last"], reported_about["sha256"]) == (6, digest)
    assert {each["route"]: (each["count"], each["last"]) for each in reported_about["routes"]} == {
        "a": (3, 5),
        "b": (3, 6),
    }
    assert errors(by_turns.root.path) == []
