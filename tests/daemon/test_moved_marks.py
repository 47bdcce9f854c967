"""A mark that the former `wald route rename` left: reported by a start and by verify, and followed by no program."""

from __future__ import annotations

import json
import os
import re
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from contents import assert_sound, values
from running import Daemon, eventually, output_of, run, wald

Start = Callable[..., Daemon]
MARKS = {
    "to b": json.dumps({"to": "b", "after": 1, "at": "2026-11-21T10:00:00Z"}).encode(),
    "to itself": b'{"to": "a", "after": 1, "at": ""}',
    "empty": b"",
    "garbage": bytes(range(64)),
}


@pytest.fixture
def marked(start: Start, root: Path) -> Callable[[bytes], Daemon]:
    """Routes a and b with a record each, and a mark that a was moved; the daemon runs again."""

    def mark(content: bytes) -> Daemon:
        daemon = start()
        for route in ("a", "b"):
            output_of("route", "add", route, "--fifo", "--root", root)
            output_of("append", route, "--root", root, stdin=b"before\n")
        assert wald("cursor", "set", "a", 1, "--group", "mine", "--root", root).returncode == 0
        assert daemon.stop() == 0
        (root / "routes/a/moved").write_bytes(content)
        daemon.start_again()
        return daemon

    return mark


@pytest.mark.parametrize("content", MARKS.values(), ids=MARKS)
def test_a_mark_is_reported_and_nothing_follows_it(
    marked: Callable[[bytes], Daemon], root: Path, content: bytes
) -> None:
    daemon = marked(content)
    output_of("append", "a", "--root", root, stdin=b"socket\n")
    (root / "routes/a/in").write_bytes(b"fifo\n")
    eventually(lambda: len(values(root)) == 4)

    assert sorted(values(root, "a")) == [b"before", b"fifo", b"socket"]
    assert values(root, "b") == [b"before"]
    assert "mark of a moved route" in daemon.log
    for listed in (["routes"], ["status"], ["explain"], ["metrics"], ["cursor", "show", "a", "--group", "mine"]):
        assert wald(*listed, "--root", root).returncode == 0
    verified = output_of("verify", "--root", root).decode()
    assert "info   routes/a/moved: records sent to a are stored in a again" in verified
    assert f"wald --root {root} route retire a" in verified
    assert_sound(root)


def test_the_commands_of_the_report_drain_and_retire_the_route(marked: Callable[[bytes], Daemon], root: Path) -> None:
    daemon = marked(MARKS["to b"])
    output_of("append", "a", "--root", root, stdin=b"one\ntwo\n")
    found = re.search(r"not in b: (wald-drain .*); then (wald .*)\n", output_of("verify", "--root", root).decode())
    assert found is not None
    programs = {"PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}
    done = run(["bash", "-ec", "\n".join(found.groups())], env=programs)
    assert done.returncode == 0, done.stderr

    assert values(root, "b") == [b"before", b"one", b"two"]
    assert int(output_of("cursor", "get", "a", "--group", "mine", "--root", root)) == 4
    assert not (root / "routes/a/moved").exists()
    daemon.log_path.write_text("")
    assert daemon.stop() == 0
    daemon.start_again()
    assert "moved route" not in daemon.log
    assert "/moved" not in output_of("verify", "--root", root).decode()


@pytest.mark.parametrize("running", [True, False])
def test_a_route_that_was_retired_with_its_mark_is_added_without_it(
    marked: Callable[[bytes], Daemon], root: Path, *, running: bool
) -> None:
    daemon = marked(MARKS["to b"])
    (root / "routes/a/retired").touch()
    assert "/moved" not in output_of("verify", "--root", root).decode()
    if not running:
        assert daemon.stop() == 0
    output_of("route", "add", "a", "--root", root)
    assert not (root / "routes/a/moved").exists()
