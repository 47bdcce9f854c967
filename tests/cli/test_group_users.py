"""Permissions of ``wald group`` for the log's owner, root, a consumer and a stranger, tried with real users."""

import json
import os
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest
from owning import Owning
from running import command, run
from users import ALICE, BOB, CONSUMERS, HOST, STRANGER, User, daemon_of, needs_root

pytestmark = needs_root

SETTINGS = f"[routes.a]\nconsumers = {CONSUMERS}\n"


@pytest.fixture(scope="module")
def root() -> Iterator[Path]:
    """A log of ``HOST`` with ten records; members of ``CONSUMERS`` may own cursors."""
    with daemon_of(HOST, SETTINGS) as daemon:
        assert run([*HOST.prefix, *command("append", "a", "--root", daemon.root)], stdin=b"x\n" * 10).returncode == 0
        yield daemon.root


def tried(user: User | None, *words: object, root: Path) -> tuple[int, str, str]:
    """Run a ``wald group`` command as a user, or as root if None; return exit code, output and errors."""
    done = run([*(user.prefix if user else []), *command("group", *words, "--root", root)])
    return done.returncode, done.stdout.decode(), done.stderr.decode()


def test_root_and_the_owner_of_the_log_help_a_group_of_the_owner(root: Path) -> None:
    with Owning(root, "a", "own", before=tuple(HOST.prefix)) as owner:
        owner.lease("worker-1", 3)
        assert tried(None, "skip", "a", "own", 1, root=root)[0] == 0
        made = (root / "routes/a/cursors/own.ask").stat()
        assert (made.st_uid, made.st_mode & 0o777) == (HOST.user_id, 0o600)
        assert tried(HOST, "release", "a", "own", "worker-1", root=root)[:2] == (
            0,
            "a/own: released from worker-1: 2 records\n",
        )
        assert tried(STRANGER, "show", "a", "own", root=root)[0] == 11
        assert tried(ALICE, "release", "a", "own", "worker-1", root=root)[0] in (3, 11)
    assert tried(None, "skip", "a", "own", 2, root=root)[0] == 0
    with Owning(root, "a", "own", before=tuple(HOST.prefix)) as owner:
        assert owner.lease("worker-1", 1) == [3]


def test_a_consumer_helps_their_own_group_and_others_only_look(root: Path) -> None:
    with Owning(root, "a", "alices", before=tuple(ALICE.prefix)) as owner:
        owner.lease("worker-1", 3)
        code, said, _ = tried(HOST, "list", "a", "--json", root=root)
        (found,) = [each for each in map(json.loads, said.splitlines()) if each["group"] == "alices"]
        assert (code, found["out_records"], found["owner"]["process"]) == (0, 3, owner.pid)
        for other in (HOST, BOB, None):
            code, _, errors = tried(other, "release", "a", "alices", "worker-1", root=root)
            assert (code, f"run it as user {ALICE.user_id}" in errors) == (11, True), errors
        assert tried(ALICE, "release", "a", "alices", "worker-1", root=root)[0] == 0
        code, _, errors = tried(ALICE, "skip", "a", "alices", 1, root=root)
        assert (code, "skips.jsonl" in errors or "ledger" in errors) == (11, True), errors
    assert tried(ALICE, "remove", "a", "alices", root=root)[0] == 0
    assert list((root / "routes/a/cursors").glob("alices.*")) == []


def test_what_another_consumer_has_planted_is_not_carried_out(root: Path) -> None:
    """Members of the OS group may create any unused name in the cursor directory."""
    planted = root / "routes/a/cursors/mine.ask"
    with Owning(root, "a", "mine", before=tuple(ALICE.prefix)) as owner:
        owner.lease("worker-1", 3)
        planted.unlink()
        with socket.socket(socket.AF_UNIX) as listener:
            listener.bind(str(planted))
        os.chown(planted, BOB.user_id, CONSUMERS)
        planted.chmod(0o666)
        code, _, errors = tried(ALICE, "release", "a", "mine", "worker-1", root=root)
        assert (code, f"run this command as user {BOB.user_id}" in errors) == (11, True), errors
        assert owner.ask("release", "worker-1") == 3
