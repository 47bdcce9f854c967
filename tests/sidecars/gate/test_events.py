"""Server-Sent Events: a client that reconnects with the last event id misses nothing, wherever it was disconnected."""

import json
import re
from collections.abc import Iterator
from itertools import product
from pathlib import Path

import pytest
from browsing import Chromium, lack
from gating import ORDERS, Gate
from running import Daemon, output_of, reclaim

import wald

EVENTS = f"{ORDERS}?format=events"
_GONE = "ERR_|Failed to load"  # console messages about a killed gate


class Source:
    """State of an EventSource (HTML, section 9.2): its events and the id that it sends when it reconnects."""

    def __init__(self) -> None:
        self.last_id = ""
        self.events: list[str] = []

    def take(self, lines: Iterator[bytes]) -> None:
        """Parse lines; discard an incomplete block."""
        name = data = ""
        for line in lines:
            field, _, value = line.decode().rstrip("\n").partition(": ")
            if field == "id":
                name = value
            elif field == "data":
                data = value
            elif not field and line == b"\n":
                self.last_id = name or self.last_id
                if data:
                    self.events.append(json.loads(data)["value"])
                data = ""
                return

    def headers(self) -> dict[str, str]:
        """Return the headers for reconnecting."""
        return {"Last-Event-ID": self.last_id} if self.last_id else {}


def cut_off(gate: Gate, query: str, source: Source, lines: int, route: str = "orders") -> None:
    """Read the given number of lines, then close the connection."""
    with gate.asked("GET", f"/v1/routes/{route}/records?format=events&{query}", headers=source.headers()) as answer:
        assert answer.status == 200, answer.read()
        read = iter(answer.readline, b"")
        block: list[bytes] = []
        for _ in range(lines):
            block.append(next(read))
            if block[-1] == b"\n":
                source.take(iter(block))
                block = []


def append(gate: Gate, *values: str, route: str = "orders") -> None:
    answer = gate.post(f"/v1/routes/{route}/records", "".join(f"{value}\n" for value in values).encode())
    assert answer.status == 200, answer.body


def test_who_is_cut_off_before_the_first_event_misses_nothing(shared: Gate) -> None:
    for number, (query, before) in enumerate(product(("from=end", "from=1s", "from=earliest"), ([], ["old"]))):
        route = f"cut-{number}"
        assert shared.post(f"/v1/routes/{route}").status == 200
        if before:
            append(shared, *before, route=route)
        source = Source()
        cut_off(shared, query, source, 3, route)
        append(shared, "between", route=route)
        cut_off(shared, query, source, 6 + 3 * len(before if query != "from=end" else []), route)
        assert source.events[-1] == "between"
        assert source.events in (["between"], [*before, "between"])


def test_who_comes_again_gets_nothing_that_is_older_than_was_asked_for(gate: Gate) -> None:
    append(gate, "old")
    append(gate, "between")
    for start, events in {"2100-01-01T00:00:00Z": [], "2000-01-01T00:00:00Z": ["between"], "1s": ["between"]}.items():
        body = gate.get(f"{EVENTS}&from={start}&limit=5", last_event_id="1").body
        found = re.findall(rb"^data: (.*)$", body, re.MULTILINE)
        assert [json.loads(data)["value"] for data in found] == events


def test_an_answer_without_an_event_says_where_the_log_ends(gate: Gate) -> None:
    with gate.asked("GET", f"{EVENTS}&from=end") as events:
        assert [events.readline() for _ in range(3)] == [b": nothing new\n", b"id: 0\n", b"\n"]
        append(gate, "first")
        assert events.readline() == b"id: 1\n"
    for query in ["from=end&limit=1", "from=end&to=1"]:
        body = gate.get(f"{EVENTS}&{query}").body
        assert body.startswith(b": nothing new\nid: 1\n")
        assert set(re.findall(rb"^id: (.*)$", body, re.MULTILINE)) == {b"1"}


def test_wherever_the_connection_breaks_each_record_comes_once(gate: Gate, daemon: Daemon) -> None:
    """The connection breaks inside and between events, batches and chunks, among records of another route."""
    daemon.ask("ROUTE ADD others")
    values = [str(number) for number in range(4_000)]
    at = 0
    for count in (1, 3, 1, 1500, 2, 2493):
        append(gate, *values[at : at + count])
        gate.post("/v1/routes/others/records", b"x\n" * count)
        at += count
    source = Source()
    lines = 1
    while len(source.events) < len(values):
        left = 3 * (len(values) - len(source.events)) + 3
        cut_off(gate, "from=earliest", source, min(lines, left))
        lines = lines * 3 // 2 + 4

    assert source.events == values


def test_a_silent_source_may_come_again_once_what_it_passed_over_is_reclaimed(
    daemon: Daemon, root: Path, gate: Gate
) -> None:
    """With its initial id it would get 410, after which an EventSource gives up."""
    with gate.asked("GET", f"{EVENTS}&from=end") as events:
        source = Source()
        source.take(iter(events.readline, b""))
        append(gate, "one", "two")
        source.take(iter(events.readline, b""))
        source.take(iter(events.readline, b""))
    wald.open(root).set_cursor("orders", 2)
    daemon.ask("CUT")
    reclaim(root, "--grace", "0")
    append(gate, "three")
    cut_off(gate, "from=end", source, 6)

    assert source.events == ["one", "two", "three"]


@pytest.mark.slow
@pytest.mark.skipif(bool(lack()), reason=lack() or "there is one")
def test_an_eventsource_of_a_browser_misses_nothing_while_the_gate_is_away(gate: Gate) -> None:
    """The EventSource has only its initial id and no event yet; it reconnects automatically."""
    with Chromium() as chromium, chromium.visit(gate.origin, allowed=_GONE) as visit:
        visit.page.goto("/login")
        visit.page.evaluate(
            f"""() => new Promise((resolve) => {{
                const values = [], source = new EventSource("{EVENTS}&from=end")
                source.onopen = () => fetch("/healthz").then(resolve)  // the id was sent before that is answered
                window.seen = new Promise((resolve) => {{
                    source.onmessage = (event) => {{
                        values.push(JSON.parse(event.data).value)
                        if (values.at(-1) == "later") resolve(values)
                    }}
                }})
            }})"""
        )
        gate.kill()
        output_of("append", "orders", "--root", gate.root, stdin=b"between\n")
        gate.start()
        append(gate, "later")
        assert visit.page.evaluate("seen") == ["between", "later"]
