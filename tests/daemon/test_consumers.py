"""The consumers of a route while a daemon of another user runs: opening, changing and closing; what they may plant."""

from __future__ import annotations

import grp
import json
import os
import re
import shutil
import signal
import stat
from collections.abc import Callable
from pathlib import Path

import programs
import pytest
from running import Daemon, command, eventually, refused, run, sidecar
from users import ALICE, BOB, CONSUMERS, HOST, MEMBER, OWNER, User, daemon_of, needs_root

from wald.errors import InvalidInput, NotFound, NotPermitted

pytestmark = needs_root


def wald(daemon: Daemon, user: User, *words: object, stdin: bytes = b"") -> str:
    """What a command that succeeds prints."""
    done = run([*user.prefix, *command(*words, "--root", daemon.root)], stdin=stdin)
    assert done.returncode == 0, done.stderr.decode()
    return done.stdout.decode()


def refusal(daemon: Daemon, user: User, *words: object) -> tuple[int, str, str]:
    return refused(run([*user.prefix, *command(*words, "--root", daemon.root)]))


def group_and_mode(path: Path) -> tuple[int, int]:
    status = path.stat()
    return status.st_gid, stat.S_IMODE(status.st_mode)


def reload(daemon: Daemon, settings: str) -> None:
    daemon.root.with_name("wald.toml").write_text(settings)
    before = len(re.findall("reloaded", daemon.log))
    daemon.process.send_signal(signal.SIGHUP)
    eventually(lambda: len(re.findall("reloaded", daemon.log)) > before)


def test_the_group_changes_with_the_settings_and_cursors_stay() -> None:
    with daemon_of(HOST, f"[routes.a]\nconsumers = {CONSUMERS}\n") as daemon:
        consumers = daemon.root / "routes/a/consumers"
        assert group_and_mode(consumers) == (CONSUMERS, 0o1775)
        wald(daemon, HOST, "append", "a", stdin=b"x\n" * 5)
        assert wald(daemon, ALICE, "cursor", "set", "a", 2, "--group", "g") == "2\n"
        assert (consumers / "g.cursor").stat().st_uid == ALICE.user_id

        reload(daemon, "[routes.a]\n")
        assert group_and_mode(consumers) == (CONSUMERS, 0o1775)

        reload(daemon, '[routes.a]\nconsumers = "group"\n')
        assert group_and_mode(consumers) == (OWNER.group_id, 0o1775)
        assert wald(daemon, MEMBER, "cursor", "set", "a", 1, "--group", "member") == "1\n"

        reload(daemon, '[routes.a]\nconsumers = ""\n')
        assert group_and_mode(consumers) == (OWNER.group_id, 0o750)
        code, message, _ = refusal(daemon, ALICE, "cursor", "set", "a", 3, "--group", "g")
        assert (code, message) == (NotPermitted.exit_code, f"{consumers}/g.cursor: permission denied")
        assert (
            json.loads(wald(daemon, HOST, "cursor", "get", "a", "--group", "g", "--of-consumer", "--json"))["sequence"]
            == 2
        )
        code, _, hint = refusal(daemon, HOST, "cursor", "remove", "a", "--group", "g")
        removing = "cursor remove a --group g --of-consumer"
        assert (code, hint) == (NotFound.exit_code, f"wald --root {daemon.root} {removing}")
        assert wald(daemon, HOST, *removing.split()) == f"{consumers}/g.cursor\n"


def test_a_cursor_that_the_owner_moves_is_reported_as_taken_over() -> None:
    with daemon_of(HOST, f"[routes.a]\nconsumers = {CONSUMERS}\n") as daemon:
        wald(daemon, HOST, "append", "a", stdin=b"x\n" * 5)
        wald(daemon, ALICE, "cursor", "set", "a", 2, "--group", "g")
        setting = command("cursor", "set", "a", 3, "--group", "g", "--of-consumer", "--root", daemon.root)
        path = daemon.root / "routes/a/consumers/g.cursor"

        assert run(setting).stderr == b""  # as root, which gives it back
        assert path.stat().st_uid == ALICE.user_id
        done = run([*HOST.prefix, *setting])
        alice = str(ALICE.user_id)
        assert done.stderr.decode().startswith(
            f"wald: {path}: was left by user {alice}, who may not move it any more\n"
        )
        assert "hint: chown" in done.stderr.decode()
        code, _, hint = refusal(daemon, ALICE, "cursor", "set", "a", 4, "--group", "g")
        assert (code, hint) == (
            NotPermitted.exit_code,
            f"be user {OWNER.user_id}, who has left it; ls -l {path}",
        )


def test_a_record_is_skipped_for_the_consumer_whose_cursor_is_the_only_one_of_the_group() -> None:
    with daemon_of(HOST, f"[routes.a]\nconsumers = {CONSUMERS}\n") as daemon:
        wald(daemon, HOST, "append", "a", stdin=b"x\n" * 5)
        wald(daemon, ALICE, "cursor", "set", "a", 2, "--group", "g")
        path, root = daemon.root / "routes/a/consumers/g.cursor", User("root", 0, 0)
        shown = wald(daemon, HOST, "cursor", "show", "a", "--group", "g")
        assert "at 2, in consumers/" in shown
        assert "3 records, 3 to 5" in shown
        (reading,) = [line for line in shown.splitlines() if line.startswith("to read")]
        assert reading.endswith(" read a --from 3"), "the cursor that --group names is the owner's"

        code, message, hint = refusal(daemon, ALICE, "cursor", "skip", "a", 3, "--group", "g")
        assert (code, message) == (NotPermitted.exit_code, f"{daemon.root}/ledger/skips.lock: permission denied")
        skipping = f"wald --root {daemon.root} cursor skip a 3 --group g"
        assert hint == f"as user {OWNER.user_id} or root: {skipping}"

        wald(daemon, root, *skipping.split()[3:])
        assert not path.parents[1].joinpath("g.cursor").exists()
        assert path.stat().st_uid == ALICE.user_id
        assert wald(daemon, ALICE, "cursor", "set", "a", 4, "--group", "g") == "4\n"

        done = run([*HOST.prefix, *command("cursor", "skip", "a", 5, "--group", "g", "--root", daemon.root)])
        assert done.stdout == b"a/g is at 5; skipped: 1 record\n"
        assert f"hint: chown {ALICE.user_id} {path}, as root" in done.stderr.decode()


def test_of_consumer_says_which_cursor_is_shown_and_skipped_where_the_owner_has_that_group_too() -> None:
    with daemon_of(HOST, f"[routes.a]\nconsumers = {CONSUMERS}\n") as daemon:
        wald(daemon, HOST, "append", "a", stdin=b"x\n" * 5)
        wald(daemon, ALICE, "cursor", "set", "a", 2, "--group", "g")
        wald(daemon, HOST, "cursor", "set", "a", 1, "--group", "g")

        assert "at 1\n" in wald(daemon, HOST, "cursor", "show", "a", "--group", "g")
        assert "at 2, in consumers/" in wald(daemon, HOST, "cursor", "show", "a", "--group", "g", "--of-consumer")
        wald(daemon, HOST, "cursor", "skip", "a", 2, "--group", "g")
        wald(daemon, HOST, "cursor", "skip", "a", 3, "--group", "g", "--of-consumer")
        assert wald(daemon, HOST, "cursor", "get", "a", "--group", "g") == "2\n"
        assert wald(daemon, HOST, "cursor", "get", "a", "--group", "g", "--of-consumer") == "3\n"


def test_the_user_that_a_namespace_does_not_have_is_not_called_nobody() -> None:
    with daemon_of(HOST, f"[routes.a]\nconsumers = {CONSUMERS}\n") as daemon:
        path = daemon.root / "routes/a/consumers/g.cursor"
        path.write_text("0\n")
        os.chown(path, 65534, 65534)
        _, _, hint = refusal(daemon, ALICE, "cursor", "set", "a", 0, "--group", "g")
    assert hint == f"be the user who has left it; ls -l {path}"


def test_a_reader_is_refused_with_the_command_that_helps() -> None:
    with daemon_of(HOST, f"[routes.a]\nconsumers = {CONSUMERS}\n") as daemon:
        consumers = daemon.root / "routes/a/consumers"
        code, _, hint = refusal(daemon, MEMBER, "cursor", "set", "a", 0)
    assert code == NotPermitted.exit_code
    joining = f"usermod --append --groups {CONSUMERS} {MEMBER.user_id}, and log in again"
    assert hint == f"{joining}; ls -ld {consumers}"


def test_only_a_member_gives_a_route_to_a_group() -> None:
    """And the daemon's user is one once it was added and the daemon was started again."""
    with daemon_of(OWNER, "[routes.a]\n") as daemon:
        code, message, hint = refusal(daemon, OWNER, "route", "add", "a", "--consumers", CONSUMERS)
        directory = daemon.root / "routes/a/consumers"
        not_in = f"{directory}: user {OWNER.user_id} is not in group {CONSUMERS}, or was not when this program started"
        assert (code, message) == (NotPermitted.exit_code, not_in)
        assert hint == f"usermod --append --groups GROUP {OWNER.user_id}, and start the daemon again"

        code, message, hint = refusal(daemon, MEMBER, "route", "add", "a", "--consumers", CONSUMERS)
        assert (code, hint) == (NotPermitted.exit_code, f"leave out --consumers, or be user {OWNER.user_id}")

        reload(daemon, f"[routes.a]\nconsumers = {CONSUMERS}\n")
        assert not_in in daemon.log
        assert group_and_mode(directory) == (OWNER.group_id, 0o750)
        assert daemon.stop() == 0

        line = command("run", "--root", daemon.root, "--config", daemon.root.with_name("wald.toml"))
        code, message, hint = refused(run([*OWNER.prefix, *line]))
        assert (code, message) == (NotPermitted.exit_code, not_in)
        assert hint.startswith(f"usermod --append --groups {CONSUMERS} {OWNER.user_id}")
        adding = command("route", "add", "a", "--consumers", CONSUMERS, "--root", daemon.root)
        assert run([*HOST.prefix, *adding]).returncode == 0
        assert group_and_mode(directory) == (CONSUMERS, 0o1775)


@pytest.mark.parametrize("group", ["no-such-group", "4294967295", "-1", "a b"])
def test_a_group_that_is_none_is_refused_where_it_is_named(tmp_path: Path, group: str) -> None:
    config = tmp_path / "wald.toml"
    config.write_text(f'[routes.a]\nfifo = true\nconsumers = "{group}"\n')
    code, message, _ = refused(run(command("run", "--root", tmp_path / "log", "--config", config)))
    assert (code, message.startswith(f"{config}:3: routes.a.consumers must be an OS group")) == (
        InvalidInput.exit_code,
        True,
    )

    code, message, hint = refused(run(command("route", "add", "a", "--consumers", group, "--root", tmp_path)))
    assert (code, hint) == (InvalidInput.exit_code, "getent group")


@pytest.mark.parametrize("group", ["no-such-group", "4294967295", "9999999999", "-1"])
def test_a_group_that_is_none_is_refused_by_the_daemon(start: Callable[..., Daemon], group: str) -> None:
    daemon = start()
    assert daemon.ask(f"ROUTE ADD a consumers={group}").startswith("ERR bad-request ")
    assert not daemon.root.joinpath("routes/a").exists()
    assert daemon.ask("PING") == "OK pong"


def test_a_group_may_be_named(tmp_path: Path) -> None:
    name = grp.getgrall()[1].gr_name
    run(command("init", "--root", tmp_path / "log"))
    assert run(command("route", "add", "a", "--consumers", name, "--root", tmp_path / "log")).returncode == 0
    assert group_and_mode(tmp_path / "log/routes/a/consumers") == (grp.getgrnam(name).gr_gid, 0o1775)
    assert b"consumers=" + name.encode() in run(command("routes", "--root", tmp_path / "log")).stdout


def test_a_consumer_takes_no_group_of_the_owners_programs_away() -> None:
    """Who takes the name first, and plants the lock of it, neither moves the owner's group nor stops it."""
    with daemon_of(HOST, f"[routes.a]\nconsumers = {CONSUMERS}\n") as daemon:
        route, destination = daemon.root / "routes/a", daemon.root.with_name("archive")
        wald(daemon, HOST, "append", "a", stdin=b"x\n" * 4)
        wald(daemon, HOST, "cut")
        for group in ("archive", "drain"):
            wald(daemon, ALICE, "cursor", "set", "a", 4, "--group", group)
            lock = route / "consumers" / f"{group}.drain"
            assert run([*ALICE.prefix, "touch", str(lock)]).returncode == 0

        packing = sidecar("archive", "pack", "a", "--group", "archive", "--root", daemon.root, "--dest", destination)
        done = run([*HOST.prefix, *packing])
        assert done.returncode == 0, done.stderr.decode()
        assert list(destination.rglob("manifest*")), done.stdout.decode()
        draining = sidecar("drain", "a", "--root", daemon.root, "--group", "drain", "--exit-at-end", "--", "cat")
        done = run([*HOST.prefix, *draining])
        assert (done.returncode, done.stdout) == (0, b"x\n" * 4), done.stderr.decode()
        assert f"{route}/consumers/drain.cursor: is the cursor of another user's group drain" in done.stderr.decode()
        assert {path.stat().st_uid for path in route.glob("*.cursor")} == {OWNER.user_id}


def test_of_two_cursors_of_one_name_the_lower_one_holds_back() -> None:
    with daemon_of(HOST, f"[routes.a]\nconsumers = {CONSUMERS}\n") as daemon:
        segments, reclaiming = daemon.root / "segments", sidecar("reclaim", "--grace", 0, "--root", daemon.root)
        wald(daemon, HOST, "append", "a", stdin=b"x\n" * 4)
        wald(daemon, HOST, "cut")
        eventually(lambda: list(segments.glob("*.zst")))
        wald(daemon, ALICE, "cursor", "set", "a", 4, "--group", "g")
        wald(daemon, HOST, "cursor", "set", "a", 1, "--group", "g")
        for _ in range(2):
            assert run([*HOST.prefix, *reclaiming]).returncode == 0
            assert len(list(segments.glob("*.zst"))) == 1
            assert "has two cursors" in wald(daemon, HOST, "explain")
            (shown,) = json.loads(wald(daemon, HOST, "routes", "--json"))["routes"]
            assert [each["sequence"] for each in shown["groups"]] == [1]
            wald(daemon, HOST, "cursor", "set", "a", 4, "--group", "g")
            wald(daemon, HOST, "cursor", "set", "a", 1, "--group", "g", "--of-consumer", "--rewind")
        listed = wald(daemon, HOST, "cursor", "list", "a").splitlines()
        assert [line.split()[2:] for line in listed[1:]] == [["4", "valid"], ["1", "valid,", "in", "consumers/"]]

        wald(daemon, HOST, "cursor", "remove", "a", "--group", "g", "--of-consumer")
        assert run([*HOST.prefix, *reclaiming]).returncode == 0
        assert not list(segments.glob("*.zst"))


PLANTS = {
    "fifo": 'mkfifo "$1"',
    "device": 'ln -s /dev/zero "$1"',
    "terminal": 'ln -s /dev/tty "$1"',
    "fifo elsewhere": 'mkfifo fifo; ln -s fifo "$1"',
    "outside": 'ln -s /etc/passwd "$1"',
    "huge": 'truncate -s 1T huge; ln -s huge "$1"',
    "huge file": 'truncate -s 1T "$1"',
    "hard link": 'echo 4 > number; ln number "$1"',
    "directory": 'mkdir "$1"; mkdir "$1/deep"; ln -s / "$1/deep/root"',
    "loop": 'ln -s "$1" "$1"',
    "socket": 'exec python3 -c "import socket, sys; socket.socket(socket.AF_UNIX).bind(sys.argv[1])" "$1"',
    "beyond": 'echo 4000000 > "$1"',
    "unreadable": 'echo 4 > "$1"; chmod 0 "$1"',
}
NAMES = ("retired", "in", "in.found-1", "evil.drain", "evil.command", "evil.cursor")


def test_what_a_consumer_plants_frees_nothing_and_is_never_waited_for() -> None:
    """Four records in a complete segment; each group but those that are planted has read them."""
    with daemon_of(HOST, f"[routes.a]\nfifo = true\nconsumers = {CONSUMERS}\n") as daemon:
        consumers = daemon.root / "routes/a/consumers"
        wald(daemon, HOST, "append", "a", stdin=b"x\n" * 4)
        wald(daemon, HOST, "cut")
        eventually(lambda: list((daemon.root / "segments").glob("*.zst")))
        for name, script in PLANTS.items():
            cursor = consumers / f"{name.replace(' ', '-')}.cursor"
            done = run([*ALICE.prefix, "sh", "-euc", f"cd {consumers}; {script}", "sh", cursor.name])
            assert done.returncode == 0, (name, done.stderr)
        for name in NAMES[:3]:
            assert run([*ALICE.prefix, "touch", str(consumers / name)]).returncode == 0
        wald(daemon, BOB, "cursor", "set", "a", 4, "--group", "bob")

        looks = [
            sidecar("reclaim", "--grace", 0, "--root", daemon.root),
            *(command(*words, "--root", daemon.root) for words in LOOKS),
        ]
        for line in looks:
            done = run([*HOST.prefix, *line], timeout=30)
            assert done.returncode in (0, 4), (line, done.stderr.decode())  # verify reports damage
        assert len(list((daemon.root / "segments").glob("*.zst"))) == 1
        listed = [json.loads(line) for line in wald(daemon, HOST, "cursor", "list", "--json").splitlines()]
        states = {each["group"]: each["state"] for each in listed}
        assert states.pop("bob") == "valid"
        assert {group for group, state in states.items() if state == "valid"} == set()
        assert states["hard-link"] == "linked"
        assert states["beyond"] == "beyond"

        assert daemon.stop() == 0
        daemon.start_again()
        assert stat.S_ISFIFO((daemon.root / "routes/a/in").stat().st_mode)
        assert wald(daemon, HOST, "append", "a", stdin=b"y\n") == "5 5\n"

        planted = [str(consumers / f"{name.replace(' ', '-')}.cursor") for name in PLANTS]
        removing = [*HOST.prefix, "rm", "-rf", *planted]  # which the owner of the directory may
        assert run(removing).returncode == 1  # but for what is in a directory of another user
        shutil.rmtree(consumers / "directory.cursor")
        run([*HOST.prefix, *looks[0]])
        assert not list((daemon.root / "segments").glob("*.zst"))


LOOKS = (
    ("explain",),
    ("top", "--once"),
    ("cursor", "list"),
    ("routes",),
    ("where", 1),
    ("verify",),
    ("read",),
)


def test_no_open_of_what_is_planted_could_wait_or_follow(tmp_path: Path) -> None:
    """As the kernel sees it: none without O_NONBLOCK and O_NOFOLLOW, and none for writing."""
    strace = programs.program("strace")
    with daemon_of(HOST, f"[routes.a]\nconsumers = {CONSUMERS}\n") as daemon:
        consumers = daemon.root / "routes/a/consumers"
        wald(daemon, HOST, "append", "a", stdin=b"x\n")
        wald(daemon, HOST, "cut")
        assert run([*ALICE.prefix, "mkfifo", str(consumers / "evil.cursor")]).returncode == 0
        trace = tmp_path / "trace"
        opened = []
        for line in (command("explain"), command("cursor", "list"), sidecar("reclaim")):
            tracing = [strace, "--follow-forks", "--trace=open,openat,openat2", f"--output={trace}"]
            assert run([*tracing, *line, "--root", str(daemon.root)], timeout=60).returncode == 0
            opened += [found for found in trace.read_text().splitlines() if "evil" in found]
    assert len(opened) >= 3
    for found in opened:
        assert "O_RDONLY|O_NONBLOCK|O_NOFOLLOW" in found, found
