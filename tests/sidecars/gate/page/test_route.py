"""The page of a route: safe commands first, who has which records, and dead letters for those who may read them."""

import html
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from draining import drain
from gating import ORDERS, Gate, entry
from running import Daemon, eventually, wald

HOSTILE = "</td><script>alert(1)</script>\u202e"


def shown(gate: Gate) -> str:
    return gate.get("/routes/orders").page


def folded(source: str) -> str:
    """Return the text inside collapsed details."""
    return html.unescape(" ".join(re.findall(r"<details.*?</details>", source, re.DOTALL)))


def test_what_loses_records_is_behind_a_warning_and_after_the_harmless_ways(gate: Gate, root: Path) -> None:
    gate.post(ORDERS, b"one\ntwo\nthree\n")
    gate.post("/v1/cut")
    eventually(lambda: "route retire orders" in folded(shown(gate)))
    assert shown(gate).count("route retire orders") == folded(shown(gate)).count("route retire orders") == 1

    wald("cursor", "set", "orders", 1, "--group", "billing", "--root", root)
    eventually(lambda: "cursor set orders 3" in folded(shown(gate)))
    source = shown(gate)
    open_to_all = html.unescape(re.sub(r"<details.*?</details>", "", source, flags=re.DOTALL))

    assert f"wald --root {root} cursor show orders --group billing" in open_to_all
    assert f"wald-drain --root {root} feed orders --group billing -- COMMAND" in open_to_all
    assert "cursor set" not in open_to_all
    assert f"wald --root {root} cursor set orders 3 --group billing" in folded(source)
    assert "billing never gets the records from 2 to 3" in folded(source)


def test_who_has_which_records_is_said_and_which_wait(gate: Gate) -> None:
    gate.post(ORDERS, b"line\n" * 40)
    group = "/v1/routes/orders/groups/packing"
    gate.make_group("packing")
    for worker in ("w1", "w2"):
        asked = {"worker": worker, "max_records": 5, "lease_for": 600}
        assert len(gate.post(f"{group}/lease", asked).json()["records"]) == 5
    back = {"worker": "w2", "sequences": [7], "delay": 3600, "reason": HOSTILE}
    assert gate.post(f"{group}/nack", back).json() == {"refused": []}
    for number in range(15):
        asked = {"worker": f"many{number}", "max_records": 1, "lease_for": 600}
        assert gate.post(f"{group}/lease", asked).status == 200

    eventually(lambda: "not due yet" in shown(gate))
    eventually(lambda: "many14" in shown(gate))
    source = shown(gate)
    table = re.search(r"Who has what</h2>.*?</section>", source, re.DOTALL)
    assert table
    rows = re.findall(r'<tr><th scope="row">packing</th><td>.*?>([\d,]+)</a>(?: to ([\d,]+))?</td>', table[0])
    assert rows[:3] == [("1", "5"), ("6", ""), ("8", "10")]
    assert ("7", "") in rows
    assert len(rows) == 19  # 18 rows of leased records, one of the delayed record
    assert "<script>alert" not in source
    assert "\u202e" not in source


def test_a_route_leads_to_its_records_and_says_once_what_its_groups_are(gate: Gate) -> None:
    gate.post(ORDERS, b"one\n")
    for group in ("packing", "billing", "audit"):
        gate.make_group(group)
        asked = {"worker": "w", "lease_for": 600}
        assert gate.post(f"/v1/routes/orders/groups/{group}/lease", asked).status == 200

    def chips() -> list[str]:
        line = re.search(r'<tr id="route-orders">.*?</th>', gate.get("/routes").page)
        return re.findall(r'class="sign">(.*?)<', line[0]) if line else []

    eventually(lambda: bool(chips()))
    assert chips() == ["work group"]
    link = re.search(r'<a href="\.\.(/records[^"]*)">Its records</a>', shown(gate))
    assert link
    assert "Records of <code>orders</code>" in gate.get(html.unescape(link[1])).page


CONFIG = """
[groups."orders/billing"]
max_tries = 1
dead_letter = "unpaid"
"""


@pytest.fixture
def guarded(daemon: Daemon) -> Iterator[Gate]:
    """A gate with tokens and one try per record."""
    tokens = entry("chief", admin=True) + entry("reader", read=["orders"])
    with Gate(daemon.root, config=CONFIG, tokens=tokens) as running:
        yield running


def letters(guarded: Gate, by: str = "chief") -> str:
    """Return the dead-letter section of the page, or "" without one."""
    page = guarded.get("/routes/orders", by).page
    found = re.search(r'<section aria-labelledby="letters">.*?</section>', page, re.DOTALL)
    return found[0] if found else ""


def words(source: str) -> str:
    return " ".join(html.unescape(re.sub("<[^>]*>", "", source)).split())


def lease(guarded: Gate, line: bytes) -> int:
    """Send a record and lease it; return its sequence."""
    assert guarded.post(ORDERS, line, by="chief").status == 200
    [sequence] = guarded.leased(by="chief", wait=20)
    return sequence


def give_up(guarded: Gate, sequence: int) -> None:
    """Reject a record; check that it is not leased again."""
    assert guarded.worked("nack", by="chief", sequences=[sequence], reason="odd") == {"refused": []}
    assert guarded.leased(by="chief") == []  # it is not retried


def test_dead_letters_are_counted_in_their_route_and_on_the_way(guarded: Gate, daemon: Daemon, root: Path) -> None:
    assert letters(guarded) == ""
    daemon.ask("ROUTE ADD unpaid")
    give_up(guarded, lease(guarded, b"first\n"))
    told = "What billing gives up goes to unpaid: none is on the way, and 1 there not processed"
    eventually(lambda: told in words(letters(guarded)))
    assert 'href="../routes/unpaid"' in letters(guarded)
    assert f"wald-drain --root {root} redrive unpaid" in words(letters(guarded))
    assert letters(guarded, "reader") == ""  # who may not read them does not learn of them
    assert "unpaid" not in guarded.get("/routes/orders", "reader").page

    second = lease(guarded, b"second\n")
    daemon.kill()
    give_up(guarded, second)
    eventually(lambda: "1 record on the way, and 1 there" in words(letters(guarded)))


def test_a_group_that_was_drained_may_have_given_up_through_the_usual_route(
    guarded: Gate, daemon: Daemon, root: Path
) -> None:
    daemon.ask("ROUTE ADD dead_letter")
    for group in ("only-read", "drained"):
        assert wald("cursor", "set", "orders", 0, "--group", group, "--root", root).returncode == 0
    eventually(lambda: "only-read" in guarded.get("/routes/orders", "chief").page)
    assert letters(guarded) == ""
    done = drain("feed", "orders", "--root", root, "--group", "drained", "--exit-at-end", "--", "true")
    assert done.returncode == 0, done.stderr
    eventually(lambda: "What drained gives up goes to dead_letter: none is on the way" in words(letters(guarded)))
