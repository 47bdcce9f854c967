"""The test browser detects forbidden behaviour of a page, and its processes always exit."""

from __future__ import annotations

import http.server
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest
from browsing import PHONE, Chromium, Visit
from running import eventually

_BAD = {
    "a breach of its policy": ("<script>1</script>", "Content Security Policy"),
    "an image from elsewhere": ("<img src=//127.0.0.2:1/x.png>", "asked elsewhere"),
    "a dialog": ("<script nonce=n>alert(1)</script>", "a dialog: 1"),
    "an error that is thrown": ("<script nonce=n>nothing()</script>", "thrown: nothing is not defined"),
    "a window": ("<script nonce=n>open('/other')</script>", "another window"),
    "a file that is not there": ("<img src=/missing.png>", "404"),
}
_POLICY = "script-src 'nonce-n'"


class _Page(http.server.BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        name, _, number = self.path.lstrip("/").partition("/")
        self.send_response(404 if name == "missing.png" else 200)
        self.send_header("Content-Type", "text/html")
        self.send_header("Content-Security-Policy", _POLICY)
        self.end_headers()
        self.wfile.write(b"<!doctype html><title>t</title><link rel=icon href=data:,><p>here")
        if name == "bad":
            self.wfile.write(list(_BAD.values())[int(number)][0].encode())

    def log_message(self, *_: object) -> None:
        """Log nothing."""


@pytest.fixture(scope="module")
def origin() -> Iterator[str]:
    """Address of a server with good and bad pages."""
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), _Page) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()
        thread.join()


@pytest.mark.parametrize("number", range(len(_BAD)), ids=list(_BAD))
def test_a_visit_fails_on_what_a_page_must_not_do(chromium: Chromium, origin: str, number: int) -> None:
    fault = list(_BAD.values())[number][1]
    with pytest.raises(AssertionError, match=fault), chromium.visit(origin) as visit:
        _provoke(visit, number)


def test_a_visit_passes_with_what_was_allowed(chromium: Chromium, origin: str) -> None:
    allowed = "Content Security Policy|127.0.0.2|dialog|thrown|window|404"
    with chromium.visit(origin, allowed=allowed) as visit:
        for number in range(len(_BAD)):
            _provoke(visit, number)


def _provoke(visit: Visit, number: int) -> None:
    before = len(visit.faults)
    visit.page.goto(f"/bad/{number}")
    eventually(lambda: visit.page.inner_text("p") and len(visit.faults) > before)


def test_a_visit_has_the_size_and_the_colours_that_are_asked_for(chromium: Chromium, origin: str) -> None:
    with chromium.visit(origin, size=PHONE, dark=True) as visit:
        visit.page.goto("/")
        assert visit.page.evaluate("[innerWidth, innerHeight]") == [390, 844]
        assert visit.page.evaluate("matchMedia('(prefers-color-scheme: dark)').matches")
        assert visit.first_paint_ms() > 0
        assert visit.metrics()["Nodes"] > 0


def test_a_visit_without_javascript_runs_no_script(chromium: Chromium, origin: str) -> None:
    with chromium.visit(origin, javascript=False) as visit:
        visit.page.goto("/bad/2")  # a script would open a dialog
        assert visit.page.inner_text("p") == "here"


def test_no_browser_outlives_the_process_that_has_started_it(chromium: Chromium) -> None:
    program = "import browsing; browser = browsing.Chromium(); browser.__enter__(); print('up', flush=True); input()"
    line = [sys.executable, "-c", program]
    environment = os.environ | {"PYTHONPATH": str(Path(__file__).parents[3] / "support")}
    with subprocess.Popen(line, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=environment) as process:
        assert process.stdout
        assert process.stdout.readline() == b"up\n"
        started = _descendants(process.pid)
        assert any("chromium" in _name(pid) for pid in started)
        process.send_signal(signal.SIGKILL)
    eventually(lambda: not any(_runs(pid) for pid in started))


def _descendants(pid: int) -> list[int]:
    children = [int(each) for each in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
    return [*children, *(each for child in children for each in _descendants(child))]


def _name(pid: int) -> str:
    return Path(f"/proc/{pid}/comm").read_text()


def _runs(pid: int) -> bool:
    with suppress(OSError):
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    return False
