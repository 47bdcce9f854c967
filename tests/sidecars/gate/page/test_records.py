"""The records view shows the log from any position, page by page, to clients with the right to read it."""

import html
import json
import re
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import quote, urljoin

import pytest
from effort import steps
from gating import ORDERS, Answer, Gate, serving
from logs import Built
from reading import result_of
from running import Daemon, eventually, reclaim, wald

from wald.log import Log
from wald_gate.page import records
from wald_gate.page.records import COUNT, Excerpt, Query, excerpt

LINES = [b"line %d" % number for number in range(1, 3 * COUNT + 1)]


@pytest.fixture(scope="module")
def filled(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Gate]:
    """A gate on a log with two routes: one has three pages of records, the other three records."""
    with serving(tmp_path_factory.mktemp("records") / "log", routes=("orders", "rare")) as gate:
        for part in (LINES[:COUNT], LINES[COUNT:]):
            assert wald("append", "orders", "--root", gate.root, stdin=b"\n".join(part) + b"\n").returncode == 0
            gate.daemon.ask("CUT")
        record = {"value_hex": "00ff", "key": "k", "headers": {"a": "1"}, "event_time_ns": 1_000_000_000}
        lines = b"".join(json.dumps(each).encode() + b"\n" for each in ({"value": "{}"}, record, {"value": ""}))
        assert wald("append", "rare", "--root", gate.root, "--jsonl", stdin=lines).returncode == 0
        yield gate


def rows(answer: Answer) -> list[int]:
    """Return the sequences of the rows in page order."""
    return [int(found) for found in re.findall(r'<tr id="r(\d+)"', answer.page)]


def link(answer: Answer, text: str) -> str:
    """Return the target of a link on the page."""
    found = re.search(rf'<a href="([^"]*)"[^>]*>{text}</a>', answer.page)
    assert found, text
    return urljoin("/records", html.unescape(found[1]))


def test_records_are_shown_from_a_position_on(filled: Gate) -> None:
    for query, first, last in [
        ("route=orders", 101, 150),
        ("route=orders&from=end", 101, 150),
        ("route=orders&from=earliest", 1, 50),
        ("route=orders&from=20", 20, 69),
        ("route=orders&from=140", 140, 150),
        ("route=orders&from=1h", 1, 50),
        ("route=orders&before=31", 1, 30),
        ("route=rare", 151, 153),
        ("", 104, 153),
        ("route=&from=149", 149, 153),
    ]:
        assert rows(filled.get(f"/records?{query}")) == list(range(first, last + 1))


def test_links_lead_over_all_records_in_both_directions(filled: Gate) -> None:
    def pages(first: Answer, text: str) -> list[list[int]]:
        found = [first]
        while f"{text}</a>" in found[-1].page:
            found.append(filled.get(link(found[-1], text)))
        return [rows(page) for page in found]

    first = filled.get("/records?route=orders")
    everything = list(range(1, len(LINES) + 1))
    assert [number for page in reversed(pages(first, "Older")) for number in page] == everything
    assert [number for page in pages(filled.get(link(first, "Earliest")), "Newer") for number in page] == everything


def test_a_wrong_position_keeps_the_form_and_says_what_is_wrong_beside_it(filled: Gate) -> None:
    for position, status, why in [
        ("nowhere", 400, "neither a sequence nor a time"),
        ("99999", 404, "record 99999 was never issued"),
        ('"><script>', 400, "neither a sequence nor a time"),
    ]:
        answer = filled.get(f"/records?route=orders&from={quote(position)}")
        page = answer.body.decode()
        assert (answer.status, answer.headers["content-type"].partition(";")[0]) == (status, "text/html")
        assert f'name="from" value="{html.escape(position).replace("&quot;", "&#34;")}"' in page
        said = re.search(r'<p id="from-wrong"[^>]*>(.*?)</p>', page)
        assert said
        assert why in html.unescape(said[1])
        assert "<option selected>orders</option>" in page
        assert '<nav aria-label="Views">' in page
    for query in ["before=0", "before=x", "before=null", "follow=2", "from=1&from=2", "colour=red"]:
        assert filled.get(f"/records?route=orders&{query}").status == 400
    assert filled.get("/records?route=nosuch").status == 404
    assert filled.get("/records?route=%2e%2e%2fhead").status == 400


def test_a_record_has_all_that_is_known_of_it_and_its_value_in_each_form(filled: Gate) -> None:
    page = filled.get("/records/152").page
    known = ("rare", "1970-01-01T00:00:01.000000000Z", "socket, user", "00000000000000000151.wal", "000000  00 ff")
    assert [each for each in known if each not in page] == []
    assert '<bdi class="mono">k</bdi>' in page
    assert '<th scope="row"><bdi class="mono">a</bdi></th><td><bdi class="mono">1</bdi></td>' in page
    for form, value in {"text": "{}", "json": "{}", "hex": "000000  7b 7d"}.items():
        page = filled.get(f"/records/151?as={form}").page
        assert f'aria-label="Value as {form}"' in page
        assert value in page


def test_the_bytes_of_a_value_are_a_file_that_no_browser_shows(filled: Gate) -> None:
    answer = filled.get("/records/152/value")
    assert answer.body == b"\x00\xff"
    assert answer.headers["content-type"] == "application/octet-stream"
    assert answer.headers["content-disposition"] == 'attachment; filename="record-152"'
    assert answer.headers["x-content-type-options"] == "nosniff"
    assert filled.get("/records/153/value").body == b""
    assert filled.get("/records/154/value").status == 404


def test_every_number_has_an_answer_and_what_is_none_is_an_error(filled: Gate) -> None:
    assert "never issued" in filled.get("/records/154").page
    assert filled.get(f"/records/{(1 << 63) - 1}").status == 200
    for none in ("0", "-1", "x", "1.5", str(1 << 63), "9" * 400, "%00"):
        assert filled.get(f"/records/{none}").status == 400, none
    found = filled.get("/record?sequence=152")
    assert (found.status, found.headers["location"]) == (303, "./records/152")


def test_what_was_reclaimed_says_when_and_by_which_rule(daemon: Daemon, gate: Gate) -> None:
    for number in (1, 2):
        gate.post(ORDERS, b"%d\n" % number)
        gate.post("/v1/cut")
    assert wald("cursor", "set", "orders", 1, "--root", daemon.root).returncode == 0
    reclaim(daemon.root, "--grace", 0)

    page = gate.get("/records/1").page
    assert re.search(r"reclaimed at .* by the rule &#39;read&#39;; cursors: orders/processed at 1", page)
    assert gate.get("/records/1/value").status == 404
    browsed = gate.get("/records?route=orders&from=1")
    assert rows(browsed) == [2]
    assert "RECLAIM has removed record 1" in browsed.page


def test_what_is_damaged_is_said_and_the_rest_is_shown(daemon: Daemon, gate: Gate) -> None:
    for number in (1, 2):
        gate.post(ORDERS, b"value %d\n" % number)
        gate.post("/v1/cut")
    segments = daemon.root / "segments"
    eventually(lambda: len(list(segments.glob("*.zst"))) == 2)
    assert daemon.stop() == 0
    (first, _) = sorted(segments.glob("*.zst"))
    first.write_bytes(b"\0" * first.stat().st_size)

    browsed = gate.get("/records?route=orders&from=1")
    assert rows(browsed) == [2]
    assert first.name in browsed.page
    assert first.name in gate.get("/records/1").page


SEGMENTS = 40


@pytest.fixture
def built(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Built:
    """Forty segments, of which the first, a middle one and the last have a record of the rare route."""
    monkeypatch.setattr(records, "_SEGMENTS", 5)
    log = Built(tmp_path / "log")
    for number in range(SEGMENTS):
        log.lines("common", [b"%d" % number])
        if number in (0, SEGMENTS // 2, SEGMENTS - 1):
            log.lines("rare", [b"rare %d" % number])
        log.cut()
    log.seal()
    return log


def walked(log: Log, query: Query, *, back: bool) -> list[Excerpt]:
    found = []
    while True:
        found.append(result_of(excerpt(log, "rare", query)))
        following = found[-1].older if back else found[-1].newer
        if following is None:
            return found
        query = Query(before=following) if back else Query(from_=str(following))


@pytest.mark.parametrize("back", [True, False])
def test_links_lead_to_all_records_of_a_rare_route(built: Built, back: bool) -> None:
    found = walked(built.log, Query() if back else Query(from_="earliest"), back=back)
    sequences = [row.sequence for page in found for row in page.rows]
    assert sequences == sorted((record.sequence for record in built.log.records("rare")), reverse=back)
    assert len(found) == SEGMENTS // 6 + 1 if back else len(found) > 5
    assert all(page.searched for page in found[:-1])


def test_a_page_of_a_rare_route_costs_what_its_stretch_does(built: Built, monkeypatch: pytest.MonkeyPatch) -> None:
    def cost(segments: int) -> int:
        monkeypatch.setattr(records, "_SEGMENTS", segments)
        result_of(excerpt(built.log, "rare", Query()))  # warm up imports, which do not count
        return steps(lambda: result_of(excerpt(built.log, "rare", Query())))

    assert 2 * cost(5) < cost(SEGMENTS)
