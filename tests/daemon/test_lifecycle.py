"""Lifecycle of a daemon: a single instance, signals, starts and stops, and reports of its runs."""

import json
import os
import signal
import socket
import subprocess
from contextlib import suppress
from pathlib import Path

import pytest
from asking import events, stat
from contents import assert_sound, text, values
from endpoint import free_address
from running import Client, Daemon, Start, eventually, output_of, wald
from tracing import traced

from wald.daemon.startup import open_journal


def publish(daemon: Daemon, route: str, payload: bytes) -> str:
    with Client(daemon.socket_path) as client:
        client.publish(route, payload)
        return client.reply()


def test_a_second_daemon_names_the_first_and_leaves(start: Start, root: Path) -> None:
    address = free_address()
    first = start(metrics=address)
    second = start(metrics=address, ready=False)

    assert second.wait() == 5
    assert f"{root}/lock: another daemon writes to this root (pid {first.process.pid} on " in second.log
    assert "  hint: stop the running daemon" in second.log
    assert first.ask("PING") == "OK pong"
    assert stat(first)["epoch"] == 1


def test_a_stop_takes_what_is_in_the_pipes_and_no_request_that_is_half_sent(start: Start, root: Path) -> None:
    """Whole lines of two FIFOs, more than one turn takes; the socket is gone, and the root is free."""
    daemon = start()
    data = (b"." * 49 + b"\n") * 15_000
    for route in ("a", "b"):
        daemon.ask(f"ROUTE ADD {route} fifo")
    daemon.ask("ROUTE ADD r")
    with (
        Client(daemon.socket_path) as client,
        (root / "routes/a/in").open("wb", buffering=0) as a,
        (root / "routes/b/in").open("wb", buffering=0) as b,
    ):
        assert client.ask(b"PUB r 2\nx\nPUB r 9\nhalf\n") == "OK 1 1"
        daemon.process.send_signal(signal.SIGSTOP)
        assert a.write(data) == b.write(data) == len(data)
        daemon.process.send_signal(signal.SIGINT)
        daemon.process.send_signal(signal.SIGCONT)
        assert daemon.wait() == 0
        assert client.reply() == ""

    assert text(root, "a") == text(root, "b") == data
    assert values(root, "r") == [b"x"]
    assert [event["head"] for event in events(daemon, "stopped")] == [30_001]
    assert not daemon.socket_path.exists()
    assert_sound(root)
    daemon.start_again()


def test_a_stop_takes_what_is_in_any_number_of_pipes(start: Start, root: Path, tmp_path: Path) -> None:
    """More than a fixed number of rounds could read; no other process has the pipes open."""
    names = [f"f{number}" for number in range(230)]
    config = tmp_path / "wald.toml"
    config.write_text("".join(f"[routes.{name}]\nfifo = true\n" for name in names))
    daemon = start("--config", config, sync="never")
    daemon.process.send_signal(signal.SIGSTOP)
    line = b"x" * 4095 + b"\n"
    written = 0
    for name in names:
        descriptor = os.open(root / "routes" / name / "in", os.O_WRONLY | os.O_NONBLOCK)
        with suppress(BlockingIOError):
            while True:
                written += os.write(descriptor, line * 16) // len(line)
        os.close(descriptor)
    daemon.process.send_signal(signal.SIGTERM)
    daemon.process.send_signal(signal.SIGCONT)

    assert daemon.wait() == 0
    assert [event["head"] for event in events(daemon, "stopped")] == [written]


@pytest.mark.parametrize(("held", "code"), [(True, 0), (False, 7)], ids=["held", "not held"])
def test_a_stop_that_loses_what_is_in_a_pipe_says_so(
    start: Start, root: Path, tmp_path: Path, held: bool, code: int
) -> None:
    """The disk is full; what another process holds waits in the pipe, and the rest would be lost without a report."""
    daemon = start(routes=["r fifo"])
    with (root / "routes/r/in").open("wb", buffering=0) as fifo:
        with traced(daemon.process.pid, tmp_path / "trace", "inject=/pwritev:error=ENOSPC"):
            fifo.write(b"line\n")
            if not held:
                fifo.close()
            assert daemon.stop() == code
        assert ("are lost (r)" in daemon.log) == (not held)
        if held:
            daemon.start_again()
            eventually(lambda: values(root) == [b"line"])


def test_a_producer_that_never_ends_does_not_hold_up_a_stop(start: Start, root: Path) -> None:
    """The daemon reads a pipe's contents once; the rest stays in it."""
    daemon = start(routes=["r fifo"])
    with (root / "routes/r/in").open("wb", 0) as fifo, subprocess.Popen(["yes"], stdout=fifo) as producer:
        eventually(lambda: stat(daemon)["head"] > 0)
        assert daemon.stop() == 0
        producer.kill()


def test_sighup_takes_over_what_can_change(start: Start, root: Path, tmp_path: Path) -> None:
    """Segment size and routes; settings that need a restart are reported and unchanged."""
    config = tmp_path / "wald.toml"
    config.write_text('segment_max_bytes = "64MiB"\n[routes.a]\n')
    daemon = start("--config", config)
    publish(daemon, "a", b"x" * 40_000 + b"\n")
    publish(daemon, "a", b"x" * 40_000 + b"\n")
    assert stat(daemon)["cuts"] == 0

    config.write_text('segment_max_bytes = "64KiB"\nsync = "never"\n[routes.b]\nfifo = true\nmode = "0600"\n')
    daemon.process.send_signal(signal.SIGHUP)
    eventually(lambda: events(daemon, "reloaded"))
    (reloaded,) = events(daemon, "reloaded")
    assert reloaded["applied"] == ["routes", "segment_max_bytes"]
    assert reloaded["needs_restart"] == ["sync"]
    assert (root / "routes/b/in").stat().st_mode & 0o7777 == 0o600
    with (root / "routes/b/in").open("wb", buffering=0) as fifo:
        fifo.write(b"through the new FIFO\n")
        eventually(lambda: values(root, "b") == [b"through the new FIFO"])
    for _ in range(3):
        publish(daemon, "a", b"x" * 40_000 + b"\n")
    assert stat(daemon)["cuts"] >= 3


def test_sighup_with_a_broken_config_changes_nothing(start: Start, root: Path, tmp_path: Path) -> None:
    """The log names the reason, and the daemon continues."""
    config = tmp_path / "wald.toml"
    config.write_text(f"[routes.r]\nwriters = [{os.geteuid()}]\n")
    daemon = start("--config", config)
    (root / "routes/taken").write_text("")
    for number, (broken, message) in enumerate(
        [
            ("\nsegment_max_byte = 1\n", "wald.toml:2: there is no setting 'segment_max_byte'"),
            ("[routes.taken]\nfifo = true\n", "routes/taken"),
        ],
        start=1,
    ):
        config.write_text(f"{broken}[routes.r]\nwriters = [{os.geteuid() + 1}]\n")
        daemon.process.send_signal(signal.SIGHUP)
        eventually(lambda number=number: len(events(daemon, "reload failed")) == number)  # type: ignore[misc]
        assert message in events(daemon, "reload failed")[-1]["reason"]
        assert publish(daemon, "r", b"x\n") == f"OK {number} {number}"


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ("snyc = 'commit'", "wald.toml:1: there is no setting 'snyc'"),
        ("[routes.'a b']", "wald.toml:1: illegal route name 'a b'"),
    ],
)
def test_settings_it_cannot_run_with_are_reported(
    start: Start, root: Path, tmp_path: Path, settings: str, expected: str
) -> None:
    """Exit code 2, one line and a hint; once they are right, nothing is in the way."""
    config = tmp_path / "wald.toml"
    config.write_text(settings)
    daemon = start("--config", config, ready=False)

    assert daemon.wait() == 2
    message, hint = daemon.log.splitlines()[-2:]
    assert message.startswith("wald: ")
    assert expected in message
    assert hint.startswith("  hint: ")
    assert "Traceback" not in daemon.log
    config.write_text("")
    daemon.start_again()


def test_a_reload_changes_the_level_of_a_journal_that_is_open(capsys: pytest.CaptureFixture[str]) -> None:
    journal = open_journal("json", "warning")
    journal.info("before")
    open_journal("json", "info")
    journal.info("after")

    assert [json.loads(line)["event"] for line in capsys.readouterr().err.splitlines()] == ["after"]


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
    os.mkfifo(root / "recovery/0000000009.json")  # a report that is no file keeps nobody from starting
    daemon.start_again()


def test_a_dead_daemons_state_is_not_shown_as_if_it_were_alive(start: Start, root: Path) -> None:
    daemon = start(routes=["a"])
    output_of("append", "a", "--root", root, stdin=b"x\n")
    assert json.loads(output_of("head", "--json", "--root", root))["no_daemon"] == ""
    daemon.kill()
    message = "no daemon runs: the last one (epoch 1) was not stopped: it was killed or crashed"
    for command in (("head",), ("route", "list"), ("explain",)):
        assert said(*command, root=root) == f"{message}\n  hint: wald --root {root} run\n", command
    report = json.loads(wald("head", "--json", "--root", root).stdout)
    assert report["no_daemon"] == message


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
        daemon = start(routes=["r fifo"])
        daemon.kill()
        before = contents(root)
        refuse()
        assert contents(root) == before
    assert said("head", root=root).splitlines()[0].endswith("(epoch 1) was not stopped: it was killed or crashed")
    assert file.read_text() == "precious"


def test_a_start_that_fails_later_is_no_crash(start: Start, root: Path) -> None:
    """An error that the code does not expect: here the directory of the FIFOs' state is in the way."""
    start().stop()
    (root / "transfers").unlink()
    (root / "transfers").mkdir()
    assert start(ready=False).wait() != 0
    assert str(report(root, 2)["ended"]) not in ("", "stopped")
    assert "(epoch 2) failed at " in said("head", root=root)
