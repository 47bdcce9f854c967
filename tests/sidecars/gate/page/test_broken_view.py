"""A page that a bug prevents from rendering reports it to open browsers, logs it once, and recovers."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from browsing import Chromium
from gating import Gate
from running import Daemon, eventually

BUG = """
import os
from wald_gate.page import views
sound = views._spark

def broken(rates):
    if os.path.exists(os.environ["BROKEN"]):
        raise ZeroDivisionError("a bug of the test")
    return sound(rates)

views._spark = broken
"""


@pytest.fixture
def flag(tmp_path: Path) -> Path:
    """A file that makes every overview fail while it exists."""
    return tmp_path / "broken"


@pytest.fixture
def faulty(daemon: Daemon, tmp_path: Path, flag: Path) -> Iterator[Gate]:
    """A gate whose overview has a bug."""
    place = tmp_path / "bug"
    place.mkdir()
    (place / "sitecustomize.py").write_text(BUG)
    path = os.pathsep.join(filter(None, (str(place), os.environ.get("PYTHONPATH"))))
    with Gate(daemon.root, env={"PYTHONPATH": path, "BROKEN": str(flag)}) as running:
        yield running


def test_a_page_with_a_bug_says_that_it_is_old_and_goes_on_by_itself(
    chromium: Chromium, faulty: Gate, flag: Path
) -> None:
    with chromium.visit(faulty.origin) as visit:
        visit.page.goto("/")
        notice = visit.page.locator("#connection")
        visit.page.evaluate("window.same = true")
        eventually(lambda: "running" in visit.page.locator("#live_state").inner_text())
        flag.touch()
        eventually(lambda: "The gate has failed at this page (ZeroDivisionError)" in notice.inner_text())
        assert "What you see is from" in notice.inner_text()

        flag.unlink()
        assert faulty.post("/v1/routes/orders/records", b"one\ntwo\n").status == 200
        eventually(lambda: visit.page.locator("#live_extent").inner_text().endswith("records 1 to 2"))
        assert not notice.is_visible()
        assert visit.page.evaluate("window.same")
    assert faulty.log.count("ZeroDivisionError: a bug of the test") == 1


def test_a_stream_with_a_bug_stays_open_and_is_tried_more_and_more_rarely(faulty: Gate, flag: Path) -> None:
    flag.touch()
    with faulty.asked("GET", "/", headers={"Accept": "text/event-stream"}) as response:
        found = b"".join(response.readline() for _ in range(2 + 1 + 3 * 3))
        assert found.count(b"event: failed") == 3
        flag.unlink()
        while b"event: parts" not in (line := response.readline()):
            assert line, "the stream has ended"
    assert faulty.log.count("ZeroDivisionError: a bug of the test") == 1
    assert "no page: /" in faulty.log
