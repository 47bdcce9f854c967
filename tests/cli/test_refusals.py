"""Bad input: one line that names the fault and its place, a hint, a documented exit code, and no change to the log."""

import json
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from running import Daemon, output_of, refusal_of, refused, run, wald

from wald.errors import Damaged, InvalidInput, Locked, NotFound, Refused, Unavailable, UnsupportedFormat

LONG = "x" * 200


def snapshot(root: Path) -> dict[str, bytes]:
    """Map every regular file below ``root`` except preallocated segments to its content."""
    files = (path for path in sorted(root.rglob("*")) if path.is_file() and not path.name.startswith("spare-"))
    return {str(path): path.read_bytes() for path in files}


def fill(daemon: Daemon) -> None:
    """Write ten records to route a, and set the cursor to 5."""
    output_of("route", "add", "a", "--root", daemon.root)
    output_of("append", "a", "--root", daemon.root, stdin=b"x\n" * 10)
    output_of("cursor", "set", "a", 5, "--root", daemon.root)


@pytest.fixture(scope="module")
def served_root(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Daemon]:
    """A running daemon, shared because no test may change its log."""
    with Daemon(tmp_path_factory.mktemp("served") / "log") as daemon:
        fill(daemon)
        yield daemon


@pytest.fixture(scope="module")
def stopped_root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same log without a daemon."""
    with Daemon(tmp_path_factory.mktemp("stopped") / "log") as daemon:
        fill(daemon)
        daemon.stop()
    return daemon.root


@pytest.fixture
def served(served_root: Daemon) -> Iterator[Path]:
    """The log of a running daemon; every byte must be unchanged after the test."""
    before = snapshot(served_root.root)
    yield served_root.root
    assert snapshot(served_root.root) == before
    assert served_root.ask("PING").startswith("OK")


@pytest.fixture
def stopped(stopped_root: Path) -> Iterator[Path]:
    """The log without a daemon; every byte must be unchanged after the test."""
    before = snapshot(stopped_root)
    yield stopped_root
    assert snapshot(stopped_root) == before


def test_no_such_root(tmp_path: Path) -> None:
    # Only `wald run` creates a root; every other command names the directory that has none.
    for arguments in (
        ("append", "a"),
        ("read",),
        ("head",),
        ("route", "add", "b"),
        ("cursor", "set", "a", 1),
        ("verify",),
    ):
        for path in (tmp_path / "absent", tmp_path):
            code, message, hint = refusal_of(*arguments, "--root", path, stdin=b"x\n")
            assert (code, message, hint) == (
                NotFound.exit_code,
                f"{path}: there is no log here",
                f"to create a log: wald --root {path} run",
            )
        assert list(tmp_path.iterdir()) == []

    # The hint for a directory of something else must work when typed, and `wald run` would refuse it.
    (tmp_path / "passwd").touch()
    code, message, hint = refusal_of("head", "--root", tmp_path)
    assert (code, message) == (NotFound.exit_code, f"{tmp_path}: there is no log here")
    assert "wald run" not in hint
    assert hint.endswith(f"find {tmp_path} -name log.json")

    # Run on a directory of something else.
    for path in (tmp_path, tmp_path / "passwd"):
        code, message, hint = refusal_of("run", "--root", path)
        assert code == InvalidInput.exit_code
        assert message.startswith(f"{path}: ")
        assert " not a" in message
    assert [path.name for path in tmp_path.iterdir()] == ["passwd"]


def test_root_of_a_newer_format(stopped: Path) -> None:
    for arguments in (("run",), ("append", "a"), ("read",), ("cut",), ("verify",)):
        path = stopped / "log.json"
        reported = path.read_bytes()
        path.write_text(json.dumps(json.loads(reported) | {"format": 99}))
        try:
            code, message, _ = refusal_of(*arguments, "--root", stopped)
        finally:
            path.write_bytes(reported)
        assert code == UnsupportedFormat.exit_code
        assert message.startswith(f"{path}: format 99 is newer")


def test_what_a_running_daemon_has_or_lacks_is_named(served: Path, served_root: Daemon, tmp_path: Path) -> None:
    # Second daemon says who holds the root.
    code, message, hint = refusal_of("run", "--root", served)
    assert code == Locked.exit_code
    assert str(served / "lock") in message
    assert f"pid {served_root.process.pid} " in message
    assert hint

    # Unknown route.
    for arguments in (
        ("append", "b"),
        ("read", "b"),
        ("read", "b", "--commit"),
        *((*words, "b") for words in (("route", "retire"), ("cursor", "get"))),
        ("cursor", "set", "b", 1),
    ):
        code, message, hint = refusal_of(*arguments, "--root", served, stdin=b"x\n")
        assert (code, message) == (NotFound.exit_code, f"{served / 'routes'}: there is no route 'b'")
        assert f"wald --root {served} route add b" in hint

    # Damaged cursor: A damaged cursor is not shown as a number, read from, or replaced without --rewind.
    path = served / "routes/a/cursors/processed.cursor"
    reported = path.read_bytes()
    path.write_bytes(b"nonsense\n")
    try:
        for words in (("cursor", "get", "a"), ("read", "a", "--from", "cursor"), ("cursor", "set", "a", 6)):
            code, message, hint = refusal_of(*words, "--root", served)
            assert code in (4, 9)
            assert message.startswith(f"{path}: offset 0: ")
            assert "--rewind" in hint
    finally:
        path.write_bytes(reported)

    # File to append is absent: the missing file is detected before any other file is sent.
    present = tmp_path / "present"
    present.write_bytes(b"x\n")
    for absent in (tmp_path / "absent", tmp_path):
        code, message, _ = refusal_of("append", "a", present, absent, "--root", served)
        assert code == InvalidInput.exit_code
        assert message.startswith(f"{absent}: ")


def test_illegal_route_name(stopped: Path) -> None:
    commands = (("read",), ("route", "retire"), ("cursor", "get"), ("cursor", "set", "--rewind"), ("run", "--stdin"))
    tried = [(line, name) for line in (*commands, ("append",), ("route", "add")) for name in ("../x", "")]
    tried += [(("append",), name) for name in (LONG, "a/b", ".hidden", "a b", "grün", "a\n")]
    for line, name in (*tried, (("route", "add"), LONG)):
        more = [1] if "set" in line else []
        code, message, hint = refusal_of("--root", stopped, *line, name, *more, stdin=b"x\n")
        assert (code, message.startswith("illegal route name '")) == (InvalidInput.exit_code, True), message
        assert "letter or digit" in hint


CURSOR = "{root}/routes/a/cursors/processed.cursor"
NO_POSITION = "end: neither a sequence (the number of a record) nor a time"
NEVER_ISSUED = "{root}: record 12 was never issued; the last one is 10"  # reading may start at the next one, 11
NO_DAEMON = "{root}/wald.sock: no daemon answers (No such file or directory)"
REFUSED_WITHOUT_A_DAEMON = [
    (("cursor", "get", "a", "--group", "../x"), InvalidInput, "illegal group name '../x'", ""),
    (("cursor", "set", "a", 1, "--group", "../x"), InvalidInput, "illegal group name '../x'", ""),
    (("read", "a", "--group", "../x"), InvalidInput, "illegal group name '../x'", ""),
    (("read", "--from", 12), NotFound, NEVER_ISSUED, "--follow"),
    (("read", "a", "--from", 12), NotFound, NEVER_ISSUED, "--follow"),
    (("read", "a", "--commit", "--from", 12), NotFound, NEVER_ISSUED, "--follow"),
    (("cursor", "set", "a", 11), Refused, f"{CURSOR}: 11 is beyond the last durable record, 10", "head"),
    (("cursor", "set", "a", 11, "--rewind"), Refused, f"{CURSOR}: 11 is beyond the last durable record, 10", "head"),
    (("cursor", "set", "a", 4), Refused, f"{CURSOR}: 4 would move the cursor backwards from 5", " --rewind"),
    (("cursor", "set", "a", "end"), InvalidInput, NO_POSITION, "wald --root {root} cursor set a 10 --group processed"),
    (("append", "a", "--retry-for", "0"), Unavailable, NO_DAEMON, "wald --root {root} run"),
    (("cut",), Unavailable, NO_DAEMON, "wald --root {root} run"),
]


def test_a_request_that_cannot_be_met_is_refused(stopped: Path) -> None:
    for arguments, error, reported, advice in REFUSED_WITHOUT_A_DAEMON:
        code, message, hint = refusal_of(*arguments, "--root", stopped, stdin=b"x\n")
        assert (code, message.startswith(reported.format(root=stopped))) == (error.exit_code, True), message
        assert advice.format(root=stopped) in hint


def test_an_invalid_position(stopped: Path) -> None:
    places = ("soon", "-1", "0", "1.5", "2026-13-01", "0001-01-01T00:00:00+14:00", "")
    for option, place in (*(("--from", each) for each in places), ("--to", "soon"), ("--to", "")):
        code, message, _ = refusal_of("read", "a", f"{option}={place}", "--root", stopped)
        assert (code, place in message) == (InvalidInput.exit_code, True), message
    for sequence in ("-1", "x", "1.5", ""):
        assert refusal_of("cursor", "set", "--root", stopped, "--", "a", sequence)[0] == InvalidInput.exit_code


def test_settings_that_cannot_be_read_are_refused(stopped: Path, tmp_path: Path) -> None:
    # An unreadable config.
    path = tmp_path / "wald.toml"
    for text, words in (
        ("segment_max_byte = 1", ":1: there is no setting"),
        ("sync = never", ": not TOML"),
        ("sync = 'x'", ":1: sync must"),
    ):
        path.write_text(text)
        code, message, _ = refusal_of("run", "--root", stopped, "--config", path)
        assert (code, message.startswith(f"{path}{words}")) == (InvalidInput.exit_code, True), message

    # Absent config.
    path.unlink()
    absent = tmp_path / "absent.toml"
    code, message, _ = refusal_of("run", "--root", stopped, "--config", absent)
    assert (code, message) == (InvalidInput.exit_code, f"{absent}: No such file or directory")
    refusal_of("run", "--root", tmp_path / "log", "--config", absent)
    assert list(tmp_path.iterdir()) == []

    # A directory named in the command is wrong input.
    code, message, hint = refusal_of("--root", tmp_path / "log", "run", "--config", tmp_path)
    assert (code, bool(hint)) == (InvalidInput.exit_code, True), message


def test_socket_left_behind_by_a_killed_daemon(daemon: Daemon, root: Path) -> None:
    """A socket without a listener does not count as a daemon."""
    daemon.kill()
    code, message, _ = refusal_of("append", "a", "--retry-for", "0", "--root", root, stdin=b"x\n")

    assert (code, message) == (Unavailable.exit_code, f"{root / 'wald.sock'}: no daemon answers (Connection refused)")


WRONG_USAGE = [
    *(("append", "a", *more) for more in (("--jsonl", "--key-separator", "="), ("--key-separator", ""))),
    *(("append",), ("append", "a", "--retry-for", "soon")),
    *(("read", "a", *more) for more in (("--limit", "-1"), ("--limit", "x"), ("--format", "xml"), ("b",))),
    *(("read", "--commit"), ("read", "a", "--from", "5", "--to", "4")),
    ("read", "a", "--from", "2026-11-21T10:00:00Z", "--to", "2026-11-21T10:00:00+01:00"),
    *(("cursor", "remove", "a"), ("where",), ("where", "x"), ("where", "0"), ("nonsense",), ("head", "--nonsense")),
    *(("route", "add", "b", *more) for more in (("--mode", "0620"), ("--fifo", "--mode", "999"))),
]


def test_wrong_usage(served: Path) -> None:
    for arguments in WRONG_USAGE:
        assert refusal_of("--root", served, *arguments, stdin=b"x\n")[0] == InvalidInput.exit_code, arguments


def test_an_offset_from_utc_of_a_day_or_more_is_refused(tmp_path: Path) -> None:
    """The operating system accepts such a time zone, but Python cannot represent its times."""
    with Daemon(tmp_path / "log") as daemon:
        output_of("route", "add", "a", "--root", daemon.root)
        done = wald("read", "a", "--since", "1h", "--root", daemon.root, env={"TZ": "UTC+25"})
    code, message, hint = refused(done)
    assert (code, message) == (InvalidInput.exit_code, "TZ=UTC+25: the offset from UTC is a day or more")
    assert hint == "TZ=UTC before the command"


IN_PLACES = [
    ("head", ["wald", "run"]),
    ("head", ["wald", "repair"]),
    ("lock", ["wald", "run"]),
    ("lock", ["wald", "repair"]),
    ("transfers", ["wald", "run"]),
    ("log.json", ["wald", "route", "list"]),
    ("ledger/segments.jsonl", ["wald", "run"]),
    ("ledger/reclaim.jsonl", ["wald_reclaim"]),
    ("ledger/reclaim.lock", ["wald_reclaim"]),
    ("ledger/archive.jsonl", ["wald_archive", "a"]),
    ("ledger/verify.jsonl", ["wald", "verify", "--record"]),
    ("ledger/skips.jsonl", ["wald", "cursor", "skip", "a", "6"]),
    ("routes/a/cursors/processed.drain", ["wald_drain", "a", "--", "true"]),
]


@pytest.mark.parametrize(
    ("name", "words"), IN_PLACES, ids=lambda each: each if isinstance(each, str) else " ".join(each)
)
def test_a_directory_in_the_place_of_a_file_is_named_with_what_to_type(
    stopped: Path, tmp_path: Path, name: str, words: list[str]
) -> None:
    root = Path(shutil.copytree(stopped, tmp_path / "log"))
    (root / name).unlink(missing_ok=True)
    (root / name).mkdir()
    module, *arguments = words
    done = run([sys.executable, "-m", module, "--root", str(root), *arguments])
    assert done.returncode == Damaged.exit_code, done.stderr
    message = done.stderr.decode()
    assert str(root / name) in message
    assert "hint: " in message
    assert (root / name).is_dir()


def test_a_file_in_the_place_of_a_directory_is_named_with_what_to_type(stopped: Path, tmp_path: Path) -> None:
    root = Path(shutil.copytree(stopped, tmp_path / "log"))
    shutil.rmtree(root / "ledger")
    (root / "ledger").write_bytes(b"")
    done = wald("run", "--root", root)
    assert done.returncode == Damaged.exit_code, done.stderr
    assert f"ls -ld {root / 'ledger'}" in done.stderr.decode()
