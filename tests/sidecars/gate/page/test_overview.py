"""The overview is consistent: findings match the daemon's state, fill levels are exact, and each row is one group's."""

import html
import re
import signal
from itertools import combinations, pairwise
from pathlib import Path

import pytest
from archives import output_of as archived
from gating import ORDERS, Gate
from hypothesis import given, settings
from hypothesis import strategies as st
from logs import Built
from running import Daemon, eventually, reclaim, wald

from wald.retention.history import History
from wald.status.rates import LogSource
from wald_gate.page.snapshot import Archived, Bundled
from wald_gate.page.strip import PIECES_MAX, Look, Piece, strip

GROUPS = 30


def findings(source: str) -> str:
    """Return the HTML of the findings, or "" without any."""
    found = re.search(r'<ul class="findings">(.*?)</ul>', source, re.DOTALL)
    return html.unescape(found[1]) if found else ""


def sign(source: str) -> str:
    found = re.search(r'<span class="pill [^>]*>daemon (.*?)</span>', source)
    assert found
    return found[1]


def written(source: str) -> float:
    """Return the percentage of the active segment's width that is drawn as written."""
    found = re.search(
        r'class="room" x="[^"]*" width="([^"]*)%".*?class="body" x="[^"]*" width="([^"]*)%"', source, re.DOTALL
    )
    assert found
    return 100 * float(found[2]) / float(found[1])


def test_what_is_wrong_is_of_the_same_moment_as_the_sign_of_the_daemon(gate: Gate, daemon: Daemon, root: Path) -> None:
    gate.post(ORDERS, b"one\n")
    pid = daemon.process.pid
    wanted = {"frozen": f"kill -CONT {pid}", "not running": f"wald --root {root} run"}
    seen = set()

    def say(state: str) -> bool:
        """Check that findings and daemon state agree; return True if the state is the expected one."""
        source = gate.get("/").page
        now = sign(source)
        seen.add(now)
        for each, command in wanted.items():
            assert (command in findings(source)) == (each == now), source
        return now == state

    eventually(lambda: say("running"))
    eventually(lambda: f'class="{Look.ACTIVE.value}"' in gate.get("/").page)
    before = written(gate.get("/").page)
    daemon.process.send_signal(signal.SIGSTOP)
    eventually(lambda: say("frozen"))
    # The active segment is drawn as full as it is, although no daemon says so: one record in 64 MiB.
    assert before == written(gate.get("/").page) < 5
    daemon.process.send_signal(signal.SIGCONT)
    eventually(lambda: say("running"))
    daemon.kill()
    eventually(lambda: say("not running"))
    assert "was killed" in gate.get("/").text
    assert before == written(gate.get("/").page)
    assert seen >= {"running", *wanted}


def test_each_line_of_the_cursors_is_of_one_group_and_the_most_behind_come_first(gate: Gate, root: Path) -> None:
    gate.post(ORDERS, b"line\n" * 2 * GROUPS)
    for number in range(1, GROUPS + 1):
        (root / "routes" / "orders" / "cursors" / f"g{number}.cursor").write_text(f"{number}\n")

    def lines() -> list[tuple[str, int, int]]:
        table = re.search(r'<table class="cursors">.*?</section>', gate.get("/").page, re.DOTALL)
        assert table
        found = re.findall(r'"name">orders/(.*?)</span></th>\s*<td.*?>(.*?)</td>\s*<td.*?>(.*?)</td>', table[0])
        more = re.search(r'<a href="(.*?)">and (\d+) more</a>', table[0])
        assert not found or (more and (more[1], int(more[2])) == ("./routes?sort=lag", GROUPS - len(found)))
        return [(name, int(at), int(lag)) for name, at, lag in found]

    eventually(lambda: bool(lines()))
    found = lines()
    assert 10 < len(found) < GROUPS
    assert found == sorted(found, key=lambda line: -line[2])
    assert found[0] == ("g1", 1, 2 * GROUPS - 1)
    assert all(name == f"g{at}" and lag == 2 * GROUPS - at for name, at, lag in found)


@pytest.fixture
def empty(tmp_path: Path) -> Built:
    """An empty log, without a daemon."""
    return Built(tmp_path / "empty")


def band(gate: Gate) -> dict[str, str]:
    """Return the archive state in the title of each piece of the strip."""
    source = html.unescape(gate.get("/").page)
    titles = re.findall(r'<g id="seg-(\d+)".*?<title>(.*?)</title>(.*?)</g>', source, re.DOTALL)
    bands = {"f-archived": "archived", "archived": "archived in part"}
    found = {}
    for first, title, drawn in titles:
        said = re.search(r"archived in part|archived", title)
        (is_drawn,) = re.findall(r'class="(f-archived|archived)"', drawn) or ("",)
        assert bands.get(is_drawn) == (said and said[0])
        found[first] = said[0] if said else ""
    return found


def test_a_run_of_the_archive_is_seen_on_the_strip_and_stays_there_when_it_is_reclaimed(
    gate: Gate, daemon: Daemon, root: Path, tmp_path: Path
) -> None:
    daemon.ask("ROUTE ADD bills")
    for route in ("orders", "bills"):
        gate.post(f"/v1/routes/{route}/records", b"one\ntwo\n")
    gate.post("/v1/cut")
    gate.post(ORDERS, b"three\n")
    gate.post("/v1/cut")
    eventually(lambda: band(gate) == {"1": "", "5": "", "6": ""})

    def run(route: str) -> None:
        archived(route, "--root", root, "--dest", tmp_path / "archive", "--engine", "local")

    run("orders")
    eventually(lambda: band(gate) == {"1": "archived in part", "5": "archived", "6": ""})
    eventually(lambda: re.search(r"archived 1 .*archived in part 1 ", gate.get("/").text))
    run("bills")
    eventually(lambda: band(gate) == {"1": "archived", "5": "archived", "6": ""})

    reclaim(root, "--grace", 0)
    eventually(lambda: 'id="seg-1" class="reclaimed"' in gate.get("/").page)
    eventually(lambda: band(gate)["1"] == "archived")
    eventually(lambda: "reclaimed records" in gate.get("/").text)


def test_what_was_reclaimed_in_the_middle_is_drawn_as_reclaimed(gate: Gate, daemon: Daemon, root: Path) -> None:
    daemon.ask("ROUTE ADD bills")
    for route in ("orders", "bills", "orders"):
        gate.post(f"/v1/routes/{route}/records", b"one\ntwo\n")
        gate.post("/v1/cut")
    assert wald("cursor", "set", "bills", 4, "--root", root).returncode == 0
    reclaim(root, "--grace", 0)

    eventually(lambda: 'id="seg-3" class="reclaimed"' in gate.get("/").page)
    assert 'id="seg-1" class="sealed"' in gate.get("/").page


def found(bundled: Bundled, source: LogSource) -> Archived:
    bundled.begin()
    sample = source.sample(1.0)
    bundled.end(sample.segments)
    return bundled.newest


def test_a_ledger_that_cannot_be_believed_is_said_and_nothing_is_taken_from_it(empty: Built, tmp_path: Path) -> None:
    for word in (b"one", b"two"):
        empty.lines("a", [word])
        empty.cut()
    empty.seal()
    line = ("a", "--root", empty.root.path, "--dest", tmp_path / "archive", "--engine", "local")
    archived(*line, "--to", 1)
    bundled = Bundled(empty.root)
    source = LogSource(empty.log, bundled.visit)
    assert found(bundled, source).whole == {1}
    archived(*line)
    assert found(bundled, source).whole == {1, 2}

    ledger = empty.root.ledger / "archive.jsonl"
    whole = ledger.read_bytes()
    ledger.write_bytes(whole.replace(b'"archived"', b'"ARCHIVED"', 1))
    broken = found(bundled, source)
    assert (broken.whole, broken.partly) == (frozenset(), frozenset())
    assert "archive.jsonl" in broken.problem
    ledger.write_bytes(whole)
    assert found(bundled, source).whole == {1, 2}


def test_a_long_history_of_deletions_is_looked_at_some_in_each_walk_and_none_twice(
    empty: Built, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("wald_gate.page.snapshot._AT_MOST", 2)
    for _ in range(6):
        empty.lines("a", [b"one"])
        empty.cut()
    empty.seal()
    archived("a", "--root", empty.root.path, "--dest", tmp_path / "archive", "--engine", "local", "--to", 4)
    for base in range(1, 6):
        empty.reclaim(base)
    bundled = Bundled(empty.root)
    source = LogSource(empty.log, bundled.visit)

    runs = [list(found(bundled, source).gone) for _ in range(4)]
    assert runs == [[(4, 4)], [(2, 4)], [(1, 4)], [(1, 4)]]
    monkeypatch.setattr(History, "reclaimed_segments", None)  # it is not called again
    assert list(found(bundled, source).gone) == [(1, 4)]


KINDS = [look for look in Look if look not in (Look.ACTIVE, Look.RECLAIMED)]


@st.composite
def logs(draw: st.DrawFn) -> list[Piece]:
    """Generate segments, some with gaps between them; the last may be active."""
    count = draw(st.integers(0, 12) | st.integers(150, 240))
    random = draw(st.randoms(use_true_random=False))
    base, found = 1, []
    for _ in range(count):
        base += random.choice((0, 0, 0, 7))
        last = base + random.choice((0, 3, 1000))
        records = last - base + 1
        archived, partly = random.choice(((0, 0), (0, 0), (records, 0), (0, records)))
        look, held, size = random.choice(KINDS), random.randrange(2), random.randrange(99)
        found.append(Piece(base, last, look, held, stored_bytes=size, archived=archived, partly=partly))
        base = last + 1
    if draw(st.booleans()):
        found.append(Piece(base, base + draw(st.integers(-1, 50)), Look.ACTIVE, fill=draw(st.floats(0.02, 1))))
    return found


@settings(max_examples=80)
@given(logs(), st.booleans(), st.integers(0, 1 << 20), st.integers(0, 1 << 20))
def test_the_pieces_fill_the_width_and_tell_what_they_are_of(
    pieces: list[Piece], are_gone_archived: bool, one: int, other: int
) -> None:
    found = strip(pieces, None, [], lambda first, last: ((last - first + 1) * are_gone_archived, 0))
    drawn = found.drawn

    # They fill the width and leave nothing out.
    assert all(abs(left.x + left.width - right.x) < 1e-6 for left, right in pairwise(drawn))
    assert all(each.width > 0 for each in drawn)
    assert not drawn or (drawn[0].x == 0 and abs(drawn[-1].x + drawn[-1].width - 100) < 1e-6)
    assert len(drawn) <= PIECES_MAX + 1
    assert sum(each.piece.segments for each in drawn) == len(pieces)
    for name in ("stored_bytes", "held", *(() if are_gone_archived else ("archived",))):
        assert sum(getattr(each.piece, name) for each in drawn) == sum(getattr(piece, name) for piece in pieces), name
    # Damage and pins are never hidden, and only segments that are archived with all their records are drawn so.
    for piece in pieces:
        shown = [each.piece for each in drawn if each.piece.first <= piece.first][-1]
        assert shown.look is Look.DAMAGED or piece.look is not Look.DAMAGED
        assert shown.held or not piece.held
        assert piece.is_archived or not shown.is_archived or not piece.records
        assert shown.is_archived or shown.is_partly_archived or not (piece.is_archived or piece.is_partly_archived)
    gone = [each.piece for each in drawn if each.piece.look is Look.RECLAIMED]
    assert all(piece.is_archived == are_gone_archived and not piece.is_partly_archived for piece in gone)
    # A later record is never further to the left.
    assert found.at(min(one, other)) <= found.at(max(one, other))


@settings(max_examples=40)
@given(logs(), st.lists(st.integers(0, 1 << 20), max_size=60))
def test_cursors_are_marked_in_their_order_and_each_once(pieces: list[Piece], cursors: list[int]) -> None:
    named = [(f"group{number}", at) for number, at in enumerate(cursors)]
    found = strip(pieces, None, named)

    assert sorted(name for mark in found.marks for name in mark.names) == sorted(name for name, _ in named)
    assert [mark.number for mark in found.marks] == list(range(1, len(found.marks) + 1))
    assert all(one.x < other.x and one.last <= other.first for one, other in pairwise(found.marks))
    assert all(0 <= mark.x <= 100 + 1e-6 for mark in found.marks)
    for one, other in combinations(found.marks, 2):
        assert one.row != other.row or abs(one.x - other.x) >= 4 * 1.6 - 1e-6


def test_the_head_and_what_is_gone_are_drawn() -> None:
    sealed, active = Piece(1, 100, Look.SEALED), Piece(101, 110, Look.ACTIVE, fill=0.25)
    found = strip([sealed, active], 110, [("all", 100)])
    where = found.drawn[1]

    assert found.head_x == where.x + where.width * 0.25
    assert found.marks[0].x == where.x
    found = strip([Piece(51, 60, Look.SEALED), Piece(71, 80, Look.SEALED)], 80, [])

    assert [(each.piece.first, each.piece.last, each.piece.look) for each in found.drawn] == [
        (1, 50, Look.RECLAIMED),
        (51, 60, Look.SEALED),
        (61, 70, Look.RECLAIMED),
        (71, 80, Look.SEALED),
    ]
