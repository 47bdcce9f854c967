"""``wald-drain`` as a user runs it: a real daemon, real commands, real signals, exit codes and messages."""

import json
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from contents import assert_sound, records, values
from draining import Gate, Start, drain, drain_command, drain_refusal
from logs import Built
from running import TIMEOUT_SECONDS, Daemon, eventually, output_of
from users import needs_root

import wald
from wald.cli.command import run
from wald.client.producer import Producer
from wald.retention.cursors import new_group_warning
from wald_drain.command import command

DRAIN = "$(ps -o ppid= -p $(ps -o ppid= -p $PPID))"  # ancestors of a command: its keeper, the runner, drain


class Stream:
    """A separate route on a running daemon."""

    def __init__(self, root: Path, name: str) -> None:
        self.root = root
        self.name = name
        with Producer(root) as producer:
            producer.command("ROUTE", "ADD", name)

    def append(self, *lines: str) -> None:
        with Producer(self.root) as producer:
            producer.publish(self.name, "".join(f"{line}\n" for line in lines).encode())
            producer.flush()

    def drain(self, *arguments: object) -> subprocess.CompletedProcess[bytes]:
        """Run wald-drain on the route until it exits."""
        return drain("--root", self.root, self.name, "--exit-at-end", *arguments)

    @property
    def sequences(self) -> list[int]:
        return [record.sequence for record in records(self.root, self.name)]

    @property
    def cursor(self) -> int:
        return wald.open(self.root).cursor(self.name).effective

    def is_processed(self) -> bool:
        return self.cursor == self.sequences[-1]


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Daemon]:
    """One daemon for all tests that do not stop it."""
    with Daemon(tmp_path_factory.mktemp("shared") / "log") as running:
        yield running


@pytest.fixture
def stream(shared: Daemon, tmp_path: Path) -> Stream:
    return Stream(shared.root, tmp_path.name)


@pytest.fixture
def own(daemon: Daemon) -> Stream:
    """A stream on a daemon that a test may stop."""
    return Stream(daemon.root, "a")


@pytest.fixture
def got(tmp_path: Path) -> Path:
    """Path to which commands write their input."""
    return tmp_path / "got"


def test_success_says_nothing_and_what_follows_two_dashes_is_the_commands(stream: Stream, got: Path) -> None:
    """Draining does not change the records; it leaves a cursor and a lock."""
    stream.append("one", "two")
    script = f'cat > {got}; printf "%s\\n" "$@"'
    done = stream.drain("--", "sh", "-c", script, "sh", "--group", "--", "-x")

    assert (done.returncode, done.stdout, done.stderr) == (0, b"--group\n--\n-x\n", b"")
    assert got.read_bytes() == b"one\ntwo\n"
    assert stream.is_processed()
    assert values(stream.root, stream.name) == [b"one", b"two"]
    files = (stream.root / "routes" / stream.name / "cursors").iterdir()
    assert sorted(path.name for path in files) == ["processed.cursor", "processed.drain"]


def test_what_is_given_up_is_in_the_dead_letter_route(own: Stream) -> None:
    """Dead letters keep order, key, time and headers; the cursor is past the records."""
    lines = b'{"key": "k", "value": "one", "event_time_ns": 5, "headers": {"h": "1"}}\n{"value": "two"}\n'
    output_of("append", "a", "--jsonl", "--root", own.root, stdin=lines)
    own.append("three")
    root = f"--root {own.root}"
    news = new_group_warning(wald.open(own.root).root, "a", "g")
    done = own.drain("--tries", 2, "--batch-records", 2, "--group", "g", "--", "sh", "-c", "exit 3")

    assert done.returncode == 10
    assert done.stderr.decode().splitlines() == [
        *f"wald-drain: {news}".splitlines(),
        "wald-drain: a 1 to 2: exit 3, try 1 of 2, retrying in 0.1 s",
        "wald-drain: a 1 to 2: exit 3, try 2 of 2, retrying in halves in 0.1 s",
        "wald-drain: a 1: exit 3, try 1 of 2, retrying in 0.1 s",
        "wald-drain: a 1: exit 3, try 2 of 2",
        "wald-drain: a 1: given up: exit 3 after 2 tries; sent to dead_letter as 4",
        "wald-drain: a 2: exit 3, try 1 of 2, retrying in 0.1 s",
        "wald-drain: a 2: exit 3, try 2 of 2",
        "wald-drain: a 2: given up: exit 3 after 2 tries; sent to dead_letter as 5",
        "wald-drain: a 3: exit 3, try 1 of 2, retrying in 0.1 s",
        "wald-drain: a 3: exit 3, try 2 of 2",
        "wald-drain: a 3: given up: exit 3 after 2 tries; sent to dead_letter as 6",
        "wald-drain: 3 records of a given up",
        f"  hint: wald {root} read dead_letter --format json; wald-drain {root} redrive dead_letter puts them back",
    ]
    dead = records(own.root, "dead_letter")
    assert [(record.key, record.value, record.event_time_ns) for record in dead] == [
        (b"k", b"one", 5),
        (None, b"two", None),
        (None, b"three", None),
    ]
    headers = [json.loads(record.headers or b"") for record in dead]
    assert headers[0]["h"] == "1"
    assert [reported["wald.origin.sequence"] for reported in headers] == ["1", "2", "3"]
    for reported in headers:
        assert reported["wald.origin.route"] == "a"
        assert reported["wald.origin.log"] == wald.open(own.root).identity.log_id.hex()
        assert (reported["wald.group"], reported["wald.tries"], reported["wald.reason"]) == (
            "g",
            "2",
            "exit 3 after 2 tries",
        )
    assert wald.open(own.root).cursor("a", "g").effective == 3
    assert_sound(own.root)


def test_a_daemon_that_is_away_leaves_the_cursor(own: Stream, daemon: Daemon, got: Path) -> None:
    own.append("one")
    daemon.stop()
    code, message, hint = drain_refusal("a", "--tries", 1, "--exit-at-end", "--root", own.root, "--", "false")

    assert code == 6
    assert message.startswith(f"{daemon.socket_path}: no daemon answers")
    assert hint == f"wald --root {own.root} run"
    assert own.cursor == 0
    done = own.drain("--", "sh", "-c", f"cat > {got}")  # success needs no daemon
    assert done.returncode == 0
    assert got.read_bytes() == b"one\n"
    assert own.is_processed()


def test_it_follows_until_it_is_told_to_stop(stream: Stream, got: Path, start: Start) -> None:
    process = start(stream.name, "--root", stream.root, "--", "sh", "-c", f"cat >> {got}")
    for line in ("one", "two", "three"):
        stream.append(line)
        eventually(stream.is_processed)
    process.send_signal(signal.SIGTERM)

    assert process.wait(TIMEOUT_SECONDS) == 0
    assert got.read_bytes() == b"one\ntwo\nthree\n"


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
def test_a_signal_lets_the_command_finish_and_starts_no_other(
    stream: Stream, got: Path, tmp_path: Path, start: Start, number: signal.Signals
) -> None:
    """A SIGTERM after the first signal does not interrupt the command; a second Ctrl-C would."""
    stream.append("one", "two")
    begun, done = Gate(tmp_path / "begun"), Gate(tmp_path / "done")
    script = f"cat >> {got}; echo > {begun.path}; read go < {done.path}"
    process = start(stream.name, "--batch-records", 1, "--root", stream.root, "--", "sh", "-c", script)
    begun.await_writer()
    process.send_signal(number)
    process.send_signal(signal.SIGTERM)
    done.let_reader_go()

    assert process.wait(TIMEOUT_SECONDS) == 0
    assert got.read_bytes() == b"one\n"
    assert stream.cursor == stream.sequences[0]


def test_a_route_may_have_the_name_of_a_command(own: Stream, got: Path) -> None:
    """A word followed by a command is a route, even in the short form."""
    for route in ("redrive", "feed"):
        output_of("route", "add", route, "--root", own.root)
        output_of("append", route, "--root", own.root, stdin=route.encode() + b"\n")
    done = drain("redrive", "--root", own.root, "--exit-at-end", "--", "sh", "-c", f"cat >> {got}")
    assert (done.returncode, got.read_bytes()) == (0, b"redrive\n")
    done = drain("feed", "feed", "--root", own.root, "--exit-at-end", "--", "sh", "-c", f"cat >> {got}")
    assert (done.returncode, got.read_bytes()) == (0, b"redrive\nfeed\n")


@pytest.mark.parametrize("workers", [(), ("--workers", 1)], ids=["alone", "a worker"])
def test_the_process_that_forks_has_one_thread(stream: Stream, got: Path, workers: tuple[object, ...]) -> None:
    """A forked child inherits locks held by other threads, and nothing releases them."""
    stream.append("one")
    script = f"grep Threads: /proc/$(($(ps -o ppid= -p $PPID)))/status > {got}"
    assert stream.drain(*workers, "--", "sh", "-c", script).returncode == 0
    assert got.read_text().split() == ["Threads:", "1"]


@needs_root
@pytest.mark.parametrize("workers", [(), ("--workers", 1)], ids=["alone", "a worker"])
def test_as_the_first_process_of_a_container_it_reaps_what_commands_leave(
    stream: Stream, tmp_path: Path, workers: tuple[object, ...]
) -> None:
    """Each run leaves a process that exits; the next run finds no zombies of earlier ones."""
    stream.append("one", "two", "three")
    last, zombies, orphan = tmp_path / "last", tmp_path / "zombies", tmp_path / "orphan"
    orphan.write_text("until grep -q '^PPid:.1$' /proc/$$/status; do :; done\n")
    script = f"""
        if [ -s {last} ] && [ -e /proc/$(cat {last}) ]; then echo zombie >> {zombies}; fi
        sh -c 'sh {orphan} & echo $! > {last}'
        until grep -q "^State:.Z" /proc/$(cat {last})/status; do :; done
    """
    line = drain_command("--root", stream.root, stream.name, "--exit-at-end", "--batch-records", 1, *workers)
    apart = ["unshare", "--pid", "--fork", "--mount-proc"]
    done = subprocess.run([*apart, *line, "--", "sh", "-c", script], capture_output=True, check=False)
    if b"unshare" in done.stderr:
        pytest.skip("this machine lets nobody make PID namespaces")

    assert done.returncode == 0, done.stderr.decode()
    assert last.exists()
    assert not zombies.exists()


def test_a_batch_that_fails_while_stopping_stays(stream: Stream, start: Start) -> None:
    stream.append("one")
    words = ("--tries", 1, "--dead-letter", "unwanted", "--", "sh", "-c", f"kill -TERM {DRAIN}; exit 1")
    process = start(stream.name, "--root", stream.root, *words)

    assert process.wait(TIMEOUT_SECONDS) == 0
    assert stream.cursor == 0
    assert "unwanted" not in wald.open(stream.root).routes()


def test_two_drains_do_not_share_batches(stream: Stream, got: Path, tmp_path: Path, start: Start) -> None:
    """The error of the second drain names where to look for the first; a drain of another group may run."""
    stream.append("one")
    begun, done = Gate(tmp_path / "begun"), Gate(tmp_path / "done")
    script = f"echo > {begun.path}; read go < {done.path}"
    process = start(stream.name, "--exit-at-end", "--root", stream.root, "--", "sh", "-c", script)
    begun.await_writer()
    code, message, hint = drain_refusal(stream.name, "--exit-at-end", "--root", stream.root, "--", "touch", got)

    assert code == 5
    assert f"another process works on route {stream.name} for group processed: process {process.pid}, " in message
    assert hint.startswith("wait until it has ended")
    assert not got.exists()
    assert stream.drain("--group", "g", "--", "touch", got).returncode == 0
    assert got.exists()
    done.let_reader_go()
    assert process.wait(TIMEOUT_SECONDS) == 0


@pytest.fixture(scope="module")
def untouched(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A log that a refused command must not change."""
    built = Built(tmp_path_factory.mktemp("refusals") / "log")
    built.lines("a", [b"one"])
    built.lines("dead_letter", [b"two"])
    return built.root.path


@pytest.mark.parametrize(
    ("arguments", "code", "words"),
    [
        (["a", "--", "nosuch-command"], 2, "nosuch-command: cannot be run: No such file or directory"),
        (["a", "--tries", "1", "--dead-letter", "a", "--", "true"], 2, "route a: cannot be its own dead-letter route"),
        (["dead_letter", "--tries", "1", "--", "true"], 2, "route dead_letter: cannot be its own dead-letter route"),
        (["a", "--dead-letter", "../b", "--", "true"], 2, "illegal route name '../b'"),
        (["a", "--group", "", "--", "true"], 2, "illegal group name ''"),
        (["a", "--batch-records", "0", "--", "true"], 2, "Invalid value for '--batch-records'"),
        (["a", "--tries", "0", "--", "true"], 2, "Invalid value for '--tries'"),
        (["a", "--format", "xml", "--", "true"], 2, "Invalid value for '--format'"),
        (["a"], 2, "Missing argument"),
        (["redrive", "nosuch"], 3, "there is no route 'nosuch'"),
        (["nosuch", "--", "true"], 3, "there is no route 'nosuch'"),
        (["a", "--root", "nosuch", "--", "true"], 3, "nosuch: there is no log here"),
    ],
)
def test_refusals_start_no_command(
    untouched: Path, capfd: pytest.CaptureFixture[str], arguments: list[str], code: int, words: str
) -> None:
    """A refusal prints one error line and one hint, and does not move the cursor."""
    assert run(command, "wald-drain", ["--root", str(untouched), *arguments]) == code

    message, hint = capfd.readouterr().err.splitlines()
    assert message.startswith("wald-drain: ")
    assert words in message
    assert hint.startswith("  hint: ")
    assert wald.open(untouched).cursor("a").effective == 0


def test_dead_letters_go_back_to_where_they_came_from(own: Stream) -> None:
    """Each dead letter is put back once, unchanged, on its original route; a second redrive does not repeat it."""
    lines = b'{"key": "k", "value": "one", "event_time_ns": 5, "headers": {"h": "1"}}\n{"value": "two"}\n'
    output_of("append", "a", "--jsonl", "--root", own.root, stdin=lines)
    other = Stream(own.root, "b")
    other.append("three")
    for stream in (own, other):
        assert stream.drain("--tries", 1, "--", "false").returncode == 10
    done = drain("--root", own.root, "redrive")

    assert (done.returncode, done.stdout) == (0, b"")
    assert done.stderr == b"wald-drain: dead_letter 4 to 6: 3 records put back as 7 to 9\n"
    for stream in (own, other):
        found = [(each.value, each.key, each.event_time_ns, each.headers) for each in records(own.root, stream.name)]
        half = len(found) // 2
        assert [(value, key, time) for value, key, time, _ in found[:half]] == [each[:3] for each in found[half:]]
    assert [json.loads(each.headers or b"null") for each in records(own.root, "a")[2:]] == [{"h": "1"}, None]
    again = drain("redrive", "--root", own.root)
    nothing = b"wald-drain: dead_letter: nothing to put back: group processed has processed every dead letter up to 6\n"
    assert (again.returncode, again.stderr) == (0, nothing)
    assert own.sequences == [1, 2, 7, 8]


def test_what_is_no_dead_letter_is_not_put_anywhere(own: Stream) -> None:
    """Dead letters before the record are put back; the error names the record, which can be skipped."""
    own.append("one")
    assert own.drain("--tries", 1, "--", "false").returncode == 10
    output_of("append", "dead_letter", "--root", own.root, stdin=b"somebody wrote here\n")
    for _ in range(2):
        code, message, hint = drain_refusal("redrive", "--root", own.root)
        assert (code, message) == (2, "dead_letter 3: is not a dead letter of this log")
        assert f"wald --root {own.root} cursor set dead_letter 3 skips it" in hint
    assert values(own.root, "a") == [b"one", b"one"]
