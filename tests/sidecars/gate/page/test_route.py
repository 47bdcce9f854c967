"""The route page puts commands that lose records after safe ones, and shows which worker has which records."""

from __future__ import annotations

import html
import re
from pathlib import Path

from gating import Gate
from running import eventually, wald

HOSTILE = "</td><script>alert(1)</script>\u202e"


def shown(gate: Gate) -> str:
    return gate.get("/routes/orders").body.decode()


def folded(source: str) -> str:
    """Return the text inside collapsed details."""
    return html.unescape(" ".join(re.findall(r"<details.*?</details>", source, re.DOTALL)))


def test_what_loses_records_is_behind_a_warning_and_after_the_harmless_ways(gate: Gate, root: Path) -> None:
    gate.post("/v1/routes/orders/records", b"one\ntwo\nthree\n")
    gate.post("/v1/cut")
    wald("cursor", "set", "orders", 1, "--group", "billing", "--root", root)
    eventually(lambda: "<details" in shown(gate))
    source = shown(gate)
    open_to_all = html.unescape(re.sub(r"<details.*?</details>", "", source, flags=re.DOTALL))

    assert f"wald --root {root} cursor show orders --group billing" in open_to_all
    assert f"wald-drain --root {root} feed orders --group billing -- COMMAND" in open_to_all
    assert "cursor set" not in open_to_all
    assert f"wald --root {root} cursor set orders 3 --group billing" in folded(source)
    assert "billing never gets the records from 2 to 3" in folded(source)


def test_a_route_that_nothing_reads_is_not_retired_by_one_paste(gate: Gate, root: Path) -> None:
    gate.post("/v1/routes/orders/records", b"one\n")
    gate.post("/v1/cut")
    eventually(lambda: "route retire orders" in folded(shown(gate)))

    assert shown(gate).count("route retire orders") == folded(shown(gate)).count("route retire orders") == 1


def test_who_has_which_records_is_said_and_which_wait(gate: Gate) -> None:
    gate.post("/v1/routes/orders/records", b"line\n" * 40)
    group = "/v1/routes/orders/groups/packing"
    gate.make_group("packing")
    for worker in ("w1", "w2"):
        asked = {"worker": worker, "max_records": 5, "lease_for": 600}
        assert len(gate.post(f"{group}/lease", asked).json()["records"]) == 5
    back = {"worker": "w2", "sequences": [7], "delay": 3600, "reason": HOSTILE}
    assert gate.post(f"{group}/nack", back).json() == {"refused": []}
    for number in range(15):
        assert (
            gate.post(f"{group}/lease", {"worker": f"many{number}", "max_records": 1, "lease_for": 600}).status == 200
        )

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
    gate.post("/v1/routes/orders/records", b"one\n")
    for group in ("packing", "billing", "audit"):
        gate.make_group(group)
        asked = {"worker": "w", "lease_for": 600}
        assert gate.post(f"/v1/routes/orders/groups/{group}/lease", asked).status == 200

    def chips() -> list[str]:
        line = re.search(r'<tr id="route-orders">.*?</th>', gate.get("/routes").body.decode())
        return re.findall(r'class="sign">(.*?)<', line[0]) if line else []

    eventually(lambda: bool(chips()))
    assert chips() == ["work group"]
    link = re.search(r'<a href="\.\.(/records[^"]*)">Its records</a>', shown(gate))
    assert link
    assert "Records of <code>orders</code>" in gate.get(html.unescape(link[1])).body.decode()
