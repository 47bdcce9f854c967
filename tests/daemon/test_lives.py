"""Whether the daemon was stopped, failed or died is told by what is left: in its report, and by who shows its state."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path

from running import Client, Daemon, output_of, wald

Start = Callable[..., Daemon]


def said(*arguments: object, root: Path) -> str:
    done = wald(*arguments, "--root", root)
    assert done.returncode == 0
    return done.stderr.decode()


def report(root: Path, epoch: int) -> dict[str, object]:
    told = json.loads((root / f"recovery/{epoch:010d}.json").read_text())
    assert isinstance(told, dict)
    return told


def test_a_stop_and_a_kill_are_told_apart(start: Start, root: Path) -> None:
    daemon = start()
    assert said("routes", root=root) == ""
    assert daemon.stop() == 0
    assert report(root, 1)["ended"] == "stopped"
    daemon.start_again()
    assert "(epoch 1) was stopped at " in str(report(root, 2)["before"])
    assert '"last life"' in daemon.log
    daemon.kill()
    assert "ended" not in report(root, 2)
    daemon.start_again()
    assert report(root, 3)["before"] == "the last one (epoch 2) was not stopped: it was killed, or crashed"
    daemon.kill()
    path = root / "recovery/0000000003.json"
    path.write_text(json.dumps(report(root, 3) | {"boot": "another"}))
    assert "its machine went down" in said("routes", root=root)


def test_a_report_that_is_no_file_keeps_nobody_from_starting(start: Start, root: Path) -> None:
    daemon = start()
    assert daemon.stop() == 0
    os.mkfifo(root / "recovery/0000000009.json")
    daemon.start_again()
    assert daemon.ask("PING").startswith("OK")


def test_a_failure_is_told_with_its_reason(start: Start, root: Path) -> None:
    daemon = start()
    daemon.ask("ROUTE ADD a")
    (root / "lock").unlink()
    with Client(daemon.socket_path) as client:
        client.publish("a", b"x\n")
        assert daemon.wait() == 5
    assert "another daemon has taken over" in str(report(root, 1)["ended"])


def test_a_dead_daemons_state_is_not_shown_as_if_it_were_alive(start: Start, root: Path) -> None:
    daemon = start()
    daemon.ask("ROUTE ADD a")
    output_of("append", "a", "--root", root, stdin=b"x\n")
    assert json.loads(output_of("head", "--json", "--root", root))["daemon"] == ""
    daemon.kill()
    words = "no daemon runs: the last one (epoch 1) was not stopped: it was killed, or crashed"
    for command in ("head", "routes", "explain"):
        assert said(command, root=root) == f"{words}\n", command
    told = json.loads(wald("head", "--json", "--root", root).stdout)
    assert told["daemon"] == words


def test_a_report_can_be_dumped(start: Start, root: Path) -> None:
    daemon = start()
    assert daemon.stop() == 0
    path = root / "recovery/0000000001.json"
    (told,) = map(json.loads, output_of("dump", "--json", path).splitlines())

    assert (told["kind"], told["epoch"], told["ended"]) == ("recovery", 1, "stopped")
    path.write_text("nonsense")
    done = wald("dump", path)
    assert done.returncode == 4
    assert b"damage=" in done.stdout
