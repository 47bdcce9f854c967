"""With 3,000 segments and 1,000 routes, every view and every update has a bounded size."""

from collections.abc import Iterator

import pytest
from browsing import PHONE, Chromium
from gating import Gate
from large import large, sending
from running import Daemon, eventually

from wald_gate.page.frame import PLACES

pytestmark = pytest.mark.slow

VIEWS = (
    *(place.path for place in PLACES),
    "/records?route=route-0999",
    "/records?route=route-0999&from=earliest",
    "/records?from=1h",
    "/records?follow=1",
    "/records/15000",
    "/history?what=deletions",
    "/history?what=cuts&before=segments:2700",
)
PAGE_BYTES = 700_000
UPDATE_BYTES = 300_000
NODES = 7_000


@pytest.fixture(scope="module")
def gate(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Gate]:
    """A gate on a large log that receives records and is cut during the tests."""
    root = tmp_path_factory.mktemp("large") / "log"
    large(root, 3_000, 1_000)
    routes = [f"route-{number:04}" for number in range(1000)]
    with Daemon(root), Gate(root) as running, sending(root, routes, batch=200):
        yield running


@pytest.mark.parametrize("path", VIEWS)
def test_a_view_of_a_large_log_has_a_bounded_size(chromium: Chromium, gate: Gate, path: str) -> None:
    with chromium.visit(gate.origin, size=PHONE) as visit:
        answer = visit.page.goto(path)
        assert answer
        assert answer.status == 200
        assert len(answer.body()) < PAGE_BYTES
        assert visit.page.evaluate("document.querySelectorAll('*').length") < NODES
        assert visit.page.evaluate("document.documentElement.scrollWidth") == PHONE["width"]


@pytest.mark.parametrize("path", ["/", "/routes", "/records?follow=1", "/history"])
def test_an_update_of_a_large_log_has_a_bounded_size(gate: Gate, path: str) -> None:
    with gate.asked("GET", path, headers={"Accept": "text/event-stream"}) as response:
        sizes: list[int] = []
        while len(sizes) < 8:
            line = response.readline()
            assert line, "the stream has ended"
            if line.startswith(b"data: ["):
                sizes.append(len(line))
    assert max(sizes[1:]) < UPDATE_BYTES
    assert max(sizes) < PAGE_BYTES


def test_updates_go_on_and_leave_no_more_elements_than_there_were(chromium: Chromium, gate: Gate) -> None:
    with chromium.visit(gate.origin) as visit:
        visit.page.goto("/")
        visit.page.evaluate("document.addEventListener('wald:parts', () => window.updates = (window.updates || 0) + 1)")
        eventually(lambda: visit.page.evaluate("window.updates || 0") > 15)
        assert visit.page.evaluate("document.querySelectorAll('*').length") < NODES
