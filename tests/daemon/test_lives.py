"""Reports of a daemon's run distinguish a stop, a failure and a crash, and commands show them."""

from __future__ import annotations

import json
import os
import socket
from collections.abc import Callable
from pathlib import Path

from endpoint import free_address
from running import Client, Daemon, output_of, wald

Start = Callable[..., Daemon]


def said(*arguments: object, root: Path) -> str:
    done = wald(*arguments, "--root", root)
    assert done.returncode == 0
    return done.stderr.decode()


def contents(root: Path) -> dict[str, bytes]:
    """Every regular file by name; what else is there, by name alone."""
    return {str(path): path.read_bytes() if path.is_file() else b"" for path in root.rglob("*")}


def report(root: Path, epoch: int) -> dict[str, object]:
    report = json.loads((root / f"recovery/{epoch:010d}.json").read_text())
    assert isinstance(report, dict)
    return report


def test_a_stop_and_a_kill_are_distinguished(start: Start, root: Path) -> None:
    daemon = start()
    assert said("route", "list", root=root) == ""
    assert daemon.stop() == 0
    assert report(root, 1)["ended"] == "stopped"
    daemon.start_again()
    assert "(epoch 1) was stopped at " in str(report(root, 2)["before"])
    assert '"last run"' in daemon.log
    daemon.kill()
    assert "ended" not in report(root, 2)
    daemon.start_again()
    assert report(root, 3)["before"] == "the last one (epoch 2) was not stopped: it was killed or crashed"
    daemon.kill()
    path = root / "recovery/0000000003.json"
    path.write_text(json.dumps(report(root, 3) | {"boot": "another"}))
    assert "its machine went down" in said("route", "list", root=root)


def test_a_report_that_is_no_file_keeps_nobody_from_starting(start: Start, root: Path) -> None:
    daemon = start()
    assert daemon.stop() == 0
    os.mkfifo(root / "recovery/0000000009.json")
    daemon.start_again()
    assert daemon.ask("PING").startswith("OK")


def test_a_failure_is_reported_with_its_reason(start: Start, root: Path) -> None:
    daemon = start()
    daemon.ask("ROUTE ADD a")
    (root / "lock").unlink()
    with Client(daemon.socket_path) as client:
        client.publish("a", b"x\n")
        assert daemon.wait() == 3
    assert "the lock file was removed" in str(report(root, 1)["ended"])


def test_a_dead_daemons_state_is_not_shown_as_if_it_were_alive(start: Start, root: Path) -> None:
    daemon = start()
    daemon.ask("ROUTE ADD a")
    output_of("append", "a", "--root", root, stdin=b"x\n")
    assert json.loads(output_of("head", "--json", "--root", root))["no_daemon"] == ""
    daemon.kill()
    message = "no daemon runs: the last one (epoch 1) was not stopped: it was killed or crashed"
    for command in (("head",), ("route", "list"), ("explain",)):
        assert said(*command, root=root) == f"{message}\n  hint: wald --root {root} run\n", command
    report = json.loads(wald("head", "--json", "--root", root).stdout)
    assert report["no_daemon"] == message


# Starts that are refused.


def test_a_start_that_is_refused_leaves_no_trace(start: Start, root: Path, tmp_path: Path) -> None:
    """No epoch, no report, no route, not even a root; what became of the life before is still known."""
    file, config = tmp_path / "file", tmp_path / "wald.toml"
    file.write_text("precious")
    config.write_text("[routes.r]\nfifo = true")
    with socket.socket(socket.AF_UNIX) as listener, socket.create_server(("127.0.0.1", 0)) as server:
        listener.bind(str(tmp_path / "s"))
        listener.listen()
        cases: list[tuple[dict[str, object], tuple[str, ...], str]] = [
            ({"socket": "/nowhere/s"}, (), "/nowhere/s: cannot listen"),
            ({"socket": f"/tmp/{'d' * 120}"}, (), "AF_UNIX path too long"),
            ({"socket": file}, (), "not a socket"),
            ({"socket": tmp_path / "s"}, (), "another program listens"),
            ({"metrics": f"127.0.0.1:{server.getsockname()[1]}"}, (), "metrics = "),
            ({}, ("--stdin", "r", "--config", str(config)), "the route has a FIFO"),
            ({}, ("--stdin", "q"), "stdin is neither a pipe nor a file"),
        ]

        def refuse() -> None:
            for settings, arguments, message in cases:
                refused = start(*arguments, ready=False, **settings)
                assert refused.wait() == 2
                assert message in refused.log.splitlines()[-2]

        refuse()
        assert not root.exists()
        daemon = start()
        daemon.ask("ROUTE ADD r fifo")
        daemon.kill()
        before = contents(root)
        refuse()
        assert contents(root) == before
    assert said("head", root=root).splitlines()[0].endswith("(epoch 1) was not stopped: it was killed or crashed")
    assert file.read_text() == "precious"


def test_a_second_daemon_is_reported_of_the_first_and_not_of_its_port(start: Start, root: Path) -> None:
    address = free_address()
    start(metrics=address)
    second = start(metrics=address, ready=False)
    assert second.wait() == 5
    assert "another daemon writes to this root" in second.log


def test_a_start_that_fails_later_is_no_crash(start: Start, root: Path) -> None:
    """An error that the code does not expect: here the directory of the FIFOs' state is in the way."""
    start().stop()
    (root / "transfers").unlink()
    (root / "transfers").mkdir()
    assert start(ready=False).wait() != 0
    assert str(report(root, 2)["ended"]) not in ("", "stopped")
    assert "(epoch 2) failed at " in said("head", root=root)
