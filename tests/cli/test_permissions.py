"""Missing permissions: a distinct exit code and the user or group to run as, never reported as damage."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from running import command, output_of, refused, run, sidecar
from users import MEMBER, OWNER, STRANGER, User, daemon_of, needs_root, with_root

from wald.errors import NotPermitted

pytestmark = needs_root


@pytest.fixture(scope="module")
def log() -> Iterator[Path]:
    """A log of ``OWNER`` with two records on route a; no daemon runs, and the tests change nothing."""
    with daemon_of(OWNER) as daemon:
        output_of("route", "add", "a", "--fifo", "--root", daemon.root)
        output_of("append", "a", "--root", daemon.root, stdin=b"x\ny\n")
        assert daemon.stop() == 0
        yield daemon.root


def refusal(user: User, line: list[str]) -> tuple[int, str, str]:
    return refused(run([*user.prefix, *line], stdin=b"x\n"))


READING = [command(*words) for words in (("head",), ("explain",), ("append", "a"), ("cut",), ("run",))]
SETTING = command("cursor", "set", "a", 1)
RECLAIM, DRAIN = sidecar("reclaim"), sidecar("drain", "a", "--exit-at-end", "--", "cat")


@pytest.mark.parametrize("line", [*READING, SETTING, RECLAIM, DRAIN], ids=lambda line: " ".join(line[2:]))
def test_a_directory_that_hides_the_log_is_named(log: Path, line: list[str]) -> None:
    code, message, hint = refusal(STRANGER, with_root(line, log))

    assert (code, message.endswith(f"permission denied by {log}")) == (NotPermitted.exit_code, True), message
    assert hint == f"run this program as user {OWNER.user_id}, or as a member of group {OWNER.group_id}; ls -ld {log}"


def test_a_refusal_names_the_file_and_who_may_use_it(log: Path) -> None:
    # What is the owners is refused to a member of the group.
    for line, wanted in (
        (command("route", "add", "b"), "routes/b"),
        (command("route", "retire", "a"), "routes/a/retired"),
        (command("run"), "lock"),
        (RECLAIM, "ledger/reclaim.lock"),
        (sidecar("archive", "pack", "a"), "ledger/archive.lock"),
    ):
        code, message, hint = refusal(MEMBER, with_root(line, log))
        assert (code, message.startswith(f"{log / wanted}")) == (NotPermitted.exit_code, True), message
        assert hint.startswith(f"run this program as user {OWNER.user_id}; ls -ld "), hint  # already in the group

    # The hint for a reader is how to become a consumer.
    opening = f"allow an OS group to keep cursors here: wald --root {log} route add a --consumers GROUP"
    for line, wanted in ((SETTING, "processed.cursor"), (DRAIN, "processed.drain")):
        code, message, hint = refusal(MEMBER, with_root(line, log))
        assert (code, message) == (NotPermitted.exit_code, f"{log}/routes/a/cursors/{wanted}: permission denied")
        assert hint == f"run this command as user {OWNER.user_id}; or, as {OWNER.user_id}, {opening}"

    # A file that root has made is to be given to the logs owner.
    lock = log / "ledger/reclaim.lock"
    lock.touch(mode=0o600)
    code, message, hint = refusal(OWNER, sidecar("reclaim", "--root", log))
    lock.unlink()
    assert (code, message) == (NotPermitted.exit_code, f"{lock}: permission denied")
    assert hint == f"as root: chown {OWNER.user_id} {lock}; ls -ld {lock}"

    # A file that is not the groups is not damaged.
    log.joinpath("log.json").chmod(0o600)
    try:
        code, message, hint = refusal(MEMBER, command("head", "--root", log))
    finally:
        log.joinpath("log.json").chmod(0o640)
    assert (code, message) == (NotPermitted.exit_code, f"{log}/log.json: permission denied")
    assert hint == f"run this program as user {OWNER.user_id}; ls -ld {log}/log.json"
