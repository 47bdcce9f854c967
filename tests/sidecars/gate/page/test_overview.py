"""The overview is consistent: findings match the daemon's state, fill levels are exact, and each row is one group's."""

from __future__ import annotations

import html
import re
import signal
from pathlib import Path

from gating import Gate
from running import Daemon, eventually

from wald_gate.page.strip import Look

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
    gate.post("/v1/routes/orders/records", b"one\n")
    pid = daemon.process.pid
    wanted = {"frozen": f"kill -CONT {pid}", "not running": f"wald --root {root} run"}
    seen = set()

    def say(state: str) -> bool:
        """Check that findings and daemon state agree; return True if the state is the expected one."""
        source = gate.get("/").body.decode()
        now = sign(source)
        seen.add(now)
        for each, command in wanted.items():
            assert (command in findings(source)) == (each == now), source
        return now == state

    eventually(lambda: say("running"))
    daemon.process.send_signal(signal.SIGSTOP)
    eventually(lambda: say("frozen"))
    daemon.process.send_signal(signal.SIGCONT)
    eventually(lambda: say("running"))
    daemon.kill()
    eventually(lambda: say("not running"))
    assert seen >= {"running", *wanted}


def test_the_active_segment_is_drawn_as_full_as_it_is_although_no_daemon_says_so(gate: Gate, daemon: Daemon) -> None:
    gate.post("/v1/routes/orders/records", b"one\n")
    eventually(lambda: f'class="{Look.ACTIVE.value}"' in gate.get("/").body.decode())
    before = written(gate.get("/").body.decode())
    daemon.process.send_signal(signal.SIGSTOP)
    eventually(lambda: sign(gate.get("/").body.decode()) == "frozen")
    frozen = written(gate.get("/").body.decode())
    daemon.kill()
    eventually(lambda: sign(gate.get("/").body.decode()) == "not running")

    assert before == frozen == written(gate.get("/").body.decode()) < 5  # one record in 64 MiB


def test_each_line_of_the_cursors_is_of_one_group_and_the_most_behind_come_first(gate: Gate, root: Path) -> None:
    gate.post("/v1/routes/orders/records", b"line\n" * 2 * GROUPS)
    for number in range(1, GROUPS + 1):
        (root / "routes" / "orders" / "cursors" / f"g{number}.cursor").write_text(f"{number}\n")

    def lines() -> list[tuple[str, int, int]]:
        table = re.search(r'<table class="cursors">.*?</section>', gate.get("/").body.decode(), re.DOTALL)
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
