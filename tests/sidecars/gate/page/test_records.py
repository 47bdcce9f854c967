"""The records view shows the log from any position, page by page, to clients with the right to read it."""

from __future__ import annotations

import hashlib
import html
import json
import re
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import quote, urljoin

import pytest
from effort import steps
from gating import Answer, Gate
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
    root = tmp_path_factory.mktemp("records") / "log"
    with Daemon(root) as daemon:
        daemon.ask("ROUTE ADD orders")
        daemon.ask("ROUTE ADD rare")
        for part in (LINES[:COUNT], LINES[COUNT:]):
            assert wald("append", "orders", "--root", root, stdin=b"\n".join(part) + b"\n").returncode == 0
            daemon.ask("CUT")
        record = {"value_hex": "00ff", "key": "k", "headers": {"a": "1"}, "event_time_ns": 1_000_000_000}
        lines = b"".join(json.dumps(each).encode() + b"\n" for each in ({"value": "{}"}, record, {"value": ""}))
        assert wald("append", "rare", "--root", root, "--jsonl", stdin=lines).returncode == 0
        with Gate(root) as gate:
            yield gate


def rows(answer: Answer) -> list[int]:
    """Return the sequences of the rows in page order."""
    assert answer.status == 200, answer.body
    return [int(found) for found in re.findall(r'<tr id="r(\d+)"', answer.body.decode())]


def link(answer: Answer, text: str) -> str:
    """Return the target of a link on the page."""
    found = re.search(rf'<a href="([^"]*)"[^>]*>{text}</a>', answer.body.decode())
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
    pages = [filled.get("/records?route=orders")]
    while "Older</a>" in pages[-1].body.decode():
        pages.append(filled.get(link(pages[-1], "Older")))
    assert [number for page in reversed(pages) for number in rows(page)] == list(range(1, len(LINES) + 1))

    pages = [filled.get(link(pages[0], "Earliest"))]
    while "Newer</a>" in pages[-1].body.decode():
        pages.append(filled.get(link(pages[-1], "Newer")))
    assert [number for page in pages for number in rows(page)] == list(range(1, len(LINES) + 1))


def test_a_position_that_is_none_is_an_error(filled: Gate) -> None:
    for query in ["from=nowhere", "before=0", "before=x", "before=null", "follow=2", "from=1&from=2", "colour=red"]:
        answer = filled.get(f"/records?route=orders&{query}")
        assert answer.status == 400
        assert answer.headers["content-type"].startswith("text/html")


def test_a_wrong_position_keeps_the_form_and_says_what_is_wrong_beside_it(filled: Gate) -> None:
    for position, status, why in [
        ("nowhere", 400, "neither a sequence nor a time"),
        ("99999", 404, "record 99999 was never issued"),
        ('"><script>', 400, "neither a sequence nor a time"),
    ]:
        answer = filled.get(f"/records?route=orders&from={quote(position)}")
        page = answer.body.decode()
        assert answer.status == status
        assert f'name="from" value="{html.escape(position).replace("&quot;", "&#34;")}"' in page
        said = re.search(r'<p id="from-wrong"[^>]*>(.*?)</p>', page)
        assert said
        assert why in html.unescape(said[1])
        assert "<option selected>orders</option>" in page
        assert '<nav aria-label="Views">' in page


def test_a_route_that_is_not_there_and_a_name_that_none_can_have_are_errors(filled: Gate) -> None:
    assert filled.get("/records?route=nosuch").status == 404
    assert filled.get("/records?route=%2e%2e%2fhead").status == 400
    assert filled.get("/records?route=orders&from=99999").status == 404  # it was never issued


def test_a_record_has_all_that_is_known_of_it(filled: Gate) -> None:
    page = filled.get("/records/152").body.decode()
    for known in (
        "rare",
        "1970-01-01T00:00:01.000000000Z",
        "socket, user",
        "00000000000000000151.wal",
        "000000  00 ff",
    ):
        assert known in page, known
    assert '<bdi class="mono">k</bdi>' in page
    assert '<th scope="row"><bdi class="mono">a</bdi></th><td><bdi class="mono">1</bdi></td>' in page


def test_a_value_can_be_had_in_each_form(filled: Gate) -> None:
    for form in ["text", "json", "hex"]:
        page = filled.get(f"/records/151?as={form}").body.decode()
        assert f'aria-label="Value as {form}"' in page
        assert {"text": "{}", "json": "{}", "hex": "000000  7b 7d"}[form] in page


def test_the_bytes_of_a_value_are_a_file_that_no_browser_shows(filled: Gate) -> None:
    answer = filled.get("/records/152/value")
    assert answer.body == b"\x00\xff"
    assert answer.headers["content-type"] == "application/octet-stream"
    assert answer.headers["content-disposition"] == 'attachment; filename="record-152"'
    assert answer.headers["x-content-type-options"] == "nosniff"
    assert filled.get("/records/153/value").body == b""
    assert filled.get("/records/154/value").status == 404


def test_every_number_has_an_answer_and_what_is_none_is_an_error(filled: Gate) -> None:
    assert "never issued" in filled.get("/records/154").body.decode()
    assert filled.get(f"/records/{(1 << 63) - 1}").status == 200
    for none in ("0", "-1", "x", "1.5", str(1 << 63), "9" * 400, "%00"):
        assert filled.get(f"/records/{none}").status == 400, none
    found = filled.get("/record?sequence=152")
    assert (found.status, found.headers["location"]) == (303, "./records/152")


def test_what_was_reclaimed_says_when_and_by_which_rule(daemon: Daemon, gate: Gate) -> None:
    for number in (1, 2):
        gate.post("/v1/routes/orders/records", b"%d\n" % number)
        gate.post("/v1/cut")
    assert wald("cursor", "set", "orders", 1, "--root", daemon.root).returncode == 0
    reclaim(daemon.root, "--grace", 0)

    page = gate.get("/records/1").body.decode()
    assert re.search(r"reclaimed at .* by the rule &#39;read&#39;; cursors: orders/processed at 1", page)
    assert gate.get("/records/1/value").status == 404
    browsed = gate.get("/records?route=orders&from=1")
    assert rows(browsed) == [2]
    assert "RECLAIM has removed record 1" in browsed.body.decode()


def test_what_is_damaged_is_said_and_the_rest_is_shown(daemon: Daemon, gate: Gate) -> None:
    for number in (1, 2):
        gate.post("/v1/routes/orders/records", b"value %d\n" % number)
        gate.post("/v1/cut")
    segments = daemon.root / "segments"
    eventually(lambda: len(list(segments.glob("*.zst"))) == 2)
    assert daemon.stop() == 0
    (first, _) = sorted(segments.glob("*.zst"))
    first.write_bytes(b"\0" * first.stat().st_size)

    browsed = gate.get("/records?route=orders&from=1")
    assert rows(browsed) == [2]
    assert first.name in browsed.body.decode()
    assert first.name in gate.get("/records/1").body.decode()


def test_a_client_sees_records_of_its_routes_only(daemon: Daemon, tmp_path: Path) -> None:
    daemon.ask("ROUTE ADD secret")
    for route in ("orders", "secret"):
        assert wald("append", route, "--root", daemon.root, stdin=b"of %s\n" % route.encode()).returncode == 0
    tokens = tmp_path / "tokens"
    digest = hashlib.sha256(b"test").hexdigest()
    tokens.write_text(json.dumps({"name": "shop", "sha256": digest, "read": ["orders"]}) + "\n")
    with Gate(daemon.root, "--tokens", tokens) as gate:
        allowed = {"authorization": "Bearer test"}
        chosen = gate.get("/records", **allowed).body.decode()
        assert "orders" in chosen
        assert "secret" not in chosen
        assert rows(gate.get("/records?route=orders", **allowed)) == [1]
        assert "of orders" in gate.get("/records/1", **allowed).body.decode()
        for path in ("/records?route=secret", "/records?route=nosuch", "/records/2", "/records/2/value", "/history"):
            answer = gate.get(path, **allowed)
            assert answer.status == 403, path
            assert "of secret" not in answer.body.decode()
        assert "never issued" in gate.get("/records/3", **allowed).body.decode()
        assert gate.get("/records?route=orders").status == 303  # to the login page


SEGMENTS = 40


@pytest.fixture
def built(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Built:
    """Forty segments, of which the first, a middle one and the last have a record of the rare route."""
    monkeypatch.setattr(records, "_SEGMENTS", 5)
    return made(tmp_path / "log", SEGMENTS)


def made(path: Path, segments: int) -> Built:
    log = Built(path)
    for number in range(segments):
        log.lines("common", [b"%d" % number])
        if number in (0, segments // 2, segments - 1):
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
