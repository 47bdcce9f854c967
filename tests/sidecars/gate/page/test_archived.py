"""The strip marks segments as archived, completely or for some routes, even after they have been reclaimed."""

from __future__ import annotations

import html
import re
from pathlib import Path

import pytest
from archives import output_of as archived
from gating import Gate
from logs import Built
from running import Daemon, eventually, reclaim, wald

from wald.retention.history import History
from wald.status.rates import LogSource
from wald_gate.page.snapshot import Archived, Bundled


@pytest.fixture
def built(tmp_path: Path) -> Built:
    """An empty log, without a daemon."""
    return Built(tmp_path / "built")


def text(gate: Gate) -> str:
    """Return the visible text of the overview."""
    return " ".join(re.sub("<[^>]*>", " ", gate.get("/").body.decode()).split())


def band(gate: Gate) -> dict[str, str]:
    """Return the archive state in the title of each piece of the strip."""
    source = html.unescape(gate.get("/").body.decode())
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
    gate.post("/v1/routes/orders/records", b"three\n")
    gate.post("/v1/cut")
    eventually(lambda: band(gate) == {"1": "", "5": "", "6": ""})

    def run(route: str) -> None:
        archived(route, "--root", root, "--dest", tmp_path / "archive", "--engine", "local")

    run("orders")
    eventually(lambda: band(gate) == {"1": "archived in part", "5": "archived", "6": ""})
    eventually(lambda: re.search(r"archived 1 .*archived in part 1 ", text(gate)))
    run("bills")
    eventually(lambda: band(gate) == {"1": "archived", "5": "archived", "6": ""})

    reclaim(root, "--grace", 0)
    eventually(lambda: 'id="seg-1" class="reclaimed"' in gate.get("/").body.decode())
    eventually(lambda: band(gate)["1"] == "archived")
    eventually(lambda: "reclaimed records" in text(gate))


def test_what_was_reclaimed_in_the_middle_is_drawn_as_reclaimed(gate: Gate, daemon: Daemon, root: Path) -> None:
    daemon.ask("ROUTE ADD bills")
    for route in ("orders", "bills", "orders"):
        gate.post(f"/v1/routes/{route}/records", b"one\ntwo\n")
        gate.post("/v1/cut")
    assert wald("cursor", "set", "bills", 4, "--root", root).returncode == 0
    reclaim(root, "--grace", 0)

    eventually(lambda: 'id="seg-3" class="reclaimed"' in gate.get("/").body.decode())
    assert 'id="seg-1" class="sealed"' in gate.get("/").body.decode()


def found(bundled: Bundled, source: LogSource) -> Archived:
    bundled.begin()
    sample = source.sample(1.0)
    bundled.end(sample.segments)
    return bundled.newest


def test_a_ledger_that_cannot_be_believed_is_said_and_nothing_is_taken_from_it(built: Built, tmp_path: Path) -> None:
    for word in (b"one", b"two"):
        built.lines("a", [word])
        built.cut()
    built.seal()
    line = ("a", "--root", built.root.path, "--dest", tmp_path / "archive", "--engine", "local")
    archived(*line, "--to", 1)
    bundled = Bundled(built.root)
    source = LogSource(built.log, bundled.visit)
    assert found(bundled, source).whole == {1}
    archived(*line)
    assert found(bundled, source).whole == {1, 2}

    ledger = built.root.ledger / "archive.jsonl"
    whole = ledger.read_bytes()
    ledger.write_bytes(whole.replace(b'"archived"', b'"ARCHIVED"', 1))
    broken = found(bundled, source)
    assert (broken.whole, broken.partly) == (frozenset(), frozenset())
    assert "archive.jsonl" in broken.problem
    ledger.write_bytes(whole)
    assert found(bundled, source).whole == {1, 2}


def test_a_long_history_of_deletions_is_looked_at_some_in_each_walk_and_none_twice(
    built: Built, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("wald_gate.page.snapshot._AT_MOST", 2)
    for _ in range(6):
        built.lines("a", [b"one"])
        built.cut()
    built.seal()
    archived("a", "--root", built.root.path, "--dest", tmp_path / "archive", "--engine", "local", "--to", 4)
    for base in range(1, 6):
        built.reclaim(base)
    bundled = Bundled(built.root)
    source = LogSource(built.log, bundled.visit)

    runs = [list(found(bundled, source).gone) for _ in range(4)]
    assert runs == [[(4, 4)], [(2, 4)], [(1, 4)], [(1, 4)]]
    monkeypatch.setattr(History, "reclaimed_segments", None)  # it is not called again
    assert list(found(bundled, source).gone) == [(1, 4)]
