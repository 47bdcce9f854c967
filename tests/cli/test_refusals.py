"""Bad input: one line that names the fault and its place, a hint, a documented exit code, and no change to the log."""

import json
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from running import Daemon, output_of, refusal_of, refused, run, wald

from wald.errors import Damaged, InvalidInput, Locked, NotFound, Refused, Unavailable, UnsupportedFormat, WaldError

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


@pytest.mark.parametrize(
    "arguments",
    [("append", "a"), ("read",), ("head",), ("route", "add", "b"), ("cursor", "set", "a", 1), ("verify",)],
    ids=str,
)
def test_no_such_root(tmp_path: Path, arguments: tuple[object, ...]) -> None:
    """Only `wald run` creates a root; every other command names the directory that has none."""
    for path in (tmp_path / "absent", tmp_path):
        code, message, hint = refusal_of(*arguments, "--root", path, stdin=b"x\n")
        assert (code, message, hint) == (
            NotFound.exit_code,
            f"{path}: there is no log here",
            f"to create a log: wald --root {path} run",
        )
    assert list(tmp_path.iterdir()) == []


def test_a_directory_of_something_else_is_not_to_be_made_a_log(tmp_path: Path) -> None:
    """The hint must work when typed, and `wald run` would refuse the directory."""
    (tmp_path / "passwd").touch()
    code, message, hint = refusal_of("head", "--root", tmp_path)

    assert (code, message) == (NotFound.exit_code, f"{tmp_path}: there is no log here")
    assert "wald run" not in hint
    assert hint.endswith(f"find {tmp_path} -name log.json")


@pytest.mark.parametrize("arguments", [("run",), ("append", "a"), ("read",), ("cut",), ("verify",)], ids=str)
def test_root_of_a_newer_format(stopped: Path, arguments: tuple[object, ...]) -> None:
    path = stopped / "log.json"
    reported = path.read_bytes()
    path.write_text(json.dumps(json.loads(reported) | {"format": 99}))
    try:
        code, message, _ = refusal_of(*arguments, "--root", stopped)
    finally:
        path.write_bytes(reported)

    assert code == UnsupportedFormat.exit_code
    assert message.startswith(f"{path}: format 99 is newer")


def test_second_daemon_says_who_holds_the_root(served: Path, served_root: Daemon) -> None:
    code, message, hint = refusal_of("run", "--root", served)

    assert code == Locked.exit_code
    assert str(served / "lock") in message
    assert f"pid {served_root.process.pid} " in message
    assert hint


def test_run_on_a_directory_of_something_else(tmp_path: Path) -> None:
    (tmp_path / "letter.txt").write_text("not a log")
    for path in (tmp_path, tmp_path / "letter.txt"):
        code, message, _ = refusal_of("run", "--root", path)
        assert code == InvalidInput.exit_code
        assert message.startswith(f"{path}: ")
        assert " not a" in message
    assert [path.name for path in tmp_path.iterdir()] == ["letter.txt"]


@pytest.mark.parametrize(
    "arguments",
    [
        ("append", "b"),
        ("read", "b"),
        ("read", "b", "--commit"),
        ("route", "retire", "b"),
        ("cursor", "get", "b"),
        ("cursor", "set", "b", 1),
    ],
    ids=str,
)
def test_unknown_route(served: Path, arguments: tuple[object, ...]) -> None:
    code, message, hint = refusal_of(*arguments, "--root", served, stdin=b"x\n")

    assert (code, message) == (NotFound.exit_code, f"{served / 'routes'}: there is no route 'b'")
    assert f"wald --root {served} route add b" in hint


@pytest.mark.parametrize(
    ("arguments", "names"),
    [
        (("append",), ["../x", "", LONG, "a/b", ".hidden", "a b", "grün", "a\n"]),
        (("read",), ["../x", ""]),
        (("route", "add"), ["../x", "", LONG]),
        (("route", "retire"), ["../x", ""]),
        (("cursor", "get"), ["../x", ""]),
        (("cursor", "set", "--rewind"), ["../x", ""]),
        (("run", "--stdin"), ["../x", ""]),
    ],
    ids=str,
)
def test_illegal_route_name(stopped: Path, arguments: tuple[object, ...], names: list[str]) -> None:
    for name in names:
        more = [1] if "set" in arguments else []
        code, message, hint = refusal_of("--root", stopped, *arguments, name, *more, stdin=b"x\n")

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


@pytest.mark.parametrize(("arguments", "error", "reported", "advice"), REFUSED_WITHOUT_A_DAEMON, ids=str)
def test_a_request_that_cannot_be_met_is_refused(
    stopped: Path, arguments: tuple[object, ...], error: type[WaldError], reported: str, advice: str
) -> None:
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


def test_damaged_cursor(served: Path) -> None:
    """A damaged cursor is not shown as a number, read from, or replaced without --rewind."""
    path = served / "routes/a/cursors/processed.cursor"
    reported = path.read_bytes()
    path.write_bytes(b"nonsense\n")
    try:
        for arguments in (("cursor", "get", "a"), ("read", "a", "--from", "cursor"), ("cursor", "set", "a", 6)):
            code, message, hint = refusal_of(*arguments, "--root", served)
            assert code in (4, 9)
            assert message.startswith(f"{path}: offset 0: ")
            assert "--rewind" in hint
    finally:
        path.write_bytes(reported)


def test_an_unreadable_config(stopped: Path, tmp_path: Path) -> None:
    path = tmp_path / "wald.toml"
    for text, words in (
        ("segment_max_byte = 1", ":1: there is no setting"),
        ("sync = never", ": not TOML"),
        ("sync = 'x'", ":1: sync must"),
    ):
        path.write_text(text)
        code, message, _ = refusal_of("run", "--root", stopped, "--config", path)
        assert (code, message.startswith(f"{path}{words}")) == (InvalidInput.exit_code, True), message


def test_absent_config(stopped: Path, tmp_path: Path) -> None:
    code, message, _ = refusal_of("run", "--root", stopped, "--config", tmp_path / "absent.toml")

    assert (code, message) == (InvalidInput.exit_code, f"{tmp_path / 'absent.toml'}: No such file or directory")
    refusal_of("run", "--root", tmp_path / "log", "--config", tmp_path / "absent.toml")
    assert list(tmp_path.iterdir()) == []


def test_socket_left_behind_by_a_killed_daemon(daemon: Daemon, root: Path) -> None:
    """A socket without a listener does not count as a daemon."""
    daemon.kill()
    code, message, _ = refusal_of("append", "a", "--retry-for", "0", "--root", root, stdin=b"x\n")

    assert (code, message) == (Unavailable.exit_code, f"{root / 'wald.sock'}: no daemon answers (Connection refused)")


def test_file_to_append_is_absent(served: Path, tmp_path: Path) -> None:
    """The missing file is detected before any other file is sent."""
    present = tmp_path / "present"
    present.write_bytes(b"x\n")
    for absent in (tmp_path / "absent", tmp_path):
        code, message, _ = refusal_of("append", "a", present, absent, "--root", served)
        assert code == InvalidInput.exit_code
        assert message.startswith(f"{absent}: ")


@pytest.mark.parametrize(
    "arguments",
    [
        ("append", "a", "--jsonl", "--key-separator", "="),
        ("append", "a", "--key-separator", ""),
        ("append", "a", "--retry-for", "soon"),
        ("append",),
        ("read", "a", "--limit", "-1"),
        ("read", "a", "--limit", "x"),
        ("read", "--commit"),
        ("read", "a", "--format", "xml"),
        ("read", "a", "b"),
        ("read", "a", "--from", "5", "--to", "4"),
        ("read", "a", "--from", "2026-11-21T10:00:00Z", "--to", "2026-11-21T10:00:00+01:00"),
        ("cursor", "remove", "a"),
        ("where",),
        ("where", "x"),
        ("where", "0"),
        ("route", "add", "b", "--mode", "0620"),
        ("route", "add", "b", "--fifo", "--mode", "999"),
        ("nonsense",),
        ("head", "--nonsense"),
    ],
    ids=str,
)
def test_wrong_usage(served: Path, arguments: tuple[object, ...]) -> None:
    code, _, _ = refusal_of("--root", served, *arguments, stdin=b"x\n")

    assert code == InvalidInput.exit_code


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


def test_a_directory_named_in_the_command_is_wrong_input(tmp_path: Path) -> None:
    code, message, hint = refusal_of("--root", tmp_path / "log", "run", "--config", tmp_path)
    assert (code, bool(hint)) == (InvalidInput.exit_code, True), message
