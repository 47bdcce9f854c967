"""Permissions of users towards the daemon, its FIFOs, routes and cursors, and harmful files that they may leave."""

import grp
import json
import os
import re
import shutil
import signal
import stat
from pathlib import Path

from running import Client, Daemon, command, eventually, refused, run, sidecar
from users import ALICE, BOB, CONSUMERS, HOST, MEMBER, OWNER, User, daemon_of, needs_root

from wald.errors import InvalidInput, NotPermitted, Refused
from wald.format.work import Commit, JournalStart, encode_work
from wald.log import Log
from wald.retention.blockers import read_cursor_snapshot
from wald.retention.handovers import encode_pin

pytestmark = needs_root


def ask(daemon: Daemon, user: User, line: bytes) -> str:
    """Return the daemon's answer to ``user``."""
    with connection(daemon, user) as client:
        return client.ask(line)


def connection(daemon: Daemon, user: User) -> Client:
    """Connect as ``user``; the kernel records the user at connect(2)."""
    before = os.getgroups()
    os.setgroups([])
    os.setegid(user.group_id)
    os.seteuid(user.user_id)
    try:
        return Client(daemon.socket_path)
    finally:
        os.seteuid(0)
        os.setegid(0)
        os.setgroups(before)


def mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


def test_a_members_request_changes_no_mode_and_opens_no_fifo_or_route_to_others() -> None:
    """Not even back to the mode of a new FIFO; a FIFO that was there first is closed when its route gets writers."""
    settings = f"[routes.secure]\nwriters = [{OWNER.user_id}]\n"
    with daemon_of(OWNER, settings) as daemon:
        fifo = daemon.root / "routes/secure/in"
        for options in (b"fifo mode=0666", b"fifo", b"fifo mode=0600", b"mode=0666"):
            assert ask(daemon, MEMBER, b"ROUTE ADD secure %s\n" % options).startswith("ERR denied "), options
        assert not fifo.exists()
        assert ask(daemon, OWNER, b"ROUTE ADD secure fifo mode=0620\n").startswith(
            "ERR denied route secure has configured writers"
        )
        assert ask(daemon, OWNER, b"ROUTE ADD secure fifo\n") == "OK added secure"
        assert ask(daemon, OWNER, b"ROUTE RETIRE secure\n") == "OK retired secure"
        assert ask(daemon, MEMBER, b"ROUTE ADD secure\n").startswith("ERR denied ")
        assert (daemon.root / "routes/secure/retired").exists()
        assert ask(daemon, OWNER, b"ROUTE ADD secure\n") == "OK added secure"

        assert ask(daemon, OWNER, b"ROUTE ADD a fifo mode=0600\n") == "OK added a"
        assert ask(daemon, MEMBER, b"ROUTE ADD a fifo\n") == "OK added a"
        for name in (b"a", b"b"):
            assert ask(daemon, MEMBER, b"ROUTE ADD %b fifo mode=0666\n" % name).startswith("ERR denied ")
        assert ask(daemon, MEMBER, b"ROUTE ADD c fifo\n") == "OK added c"
        assert [mode(daemon.root / f"routes/{name}/in") for name in ("secure", "a", "c")] == [0o600, 0o600, 0o620]
        assert not (daemon.root / "routes/b").exists()

        daemon.root.with_name("wald.toml").write_text(f"{settings}[routes.c]\nwriters = [{OWNER.user_id}]\n")
        assert daemon.stop() == 0
        daemon.start_again()
        assert mode(daemon.root / "routes/c/in") == 0o600


def test_retiring_is_for_the_owner_and_who_is_named() -> None:
    """Unread records of a retired route may be deleted, so only the same users may add it again."""
    with daemon_of(OWNER, f"[routes.named]\nwriters = [{MEMBER.user_id}]\n[routes.all]\n") as daemon:
        retired = daemon.root / "routes/all/retired"
        permitted = "only the log's owner and the route's writers may do so"
        refusal = f"ERR denied user {MEMBER.user_id} may not retire route all; {permitted}"
        assert ask(daemon, MEMBER, b"PUB all 2\nx\n") == "OK 1 1"
        assert ask(daemon, MEMBER, b"ROUTE RETIRE all\n") == refusal
        assert not retired.exists()
        for name in (b"all", b"named"):
            assert ask(daemon, OWNER, b"ROUTE RETIRE %b\n" % name) == f"OK retired {name.decode()}"
        assert ask(daemon, MEMBER, b"ROUTE ADD all\n") == refusal.replace("retire route all", "reactivate route all")
        assert retired.exists()
        for _ in range(2):  # an answer may be lost and the request repeated
            assert ask(daemon, MEMBER, b"ROUTE ADD named\n") == "OK added named"
            assert ask(daemon, MEMBER, b"ROUTE RETIRE named\n") == "OK retired named"


def test_others_than_the_owner_cut_no_more_than_once_a_second() -> None:
    """A flood of cuts would create a flood of segments; a log without new records needs no wait."""
    with (
        daemon_of(OWNER, "[routes.a]\n") as daemon,
        connection(daemon, MEMBER) as member,
        connection(daemon, OWNER) as owner,
    ):
        answers = []
        for _ in range(50):
            assert member.ask(b"PUB a 2\nx\n").startswith("OK ")
            answers.append(member.ask(b"CUT\n"))
        assert answers[0] == "OK cut 2"
        assert any(answer.startswith("ERR busy the log was cut less than 1 s ago") for answer in answers)
        assert owner.ask(b"PUB a 2\nx\nCUT\n") == "OK 51 51"
        assert owner.reply() == "OK cut 52"
        assert member.ask(b"CUT\n") == "OK nothing-to-cut 52"


def test_who_is_denied_something_is_told_what_helps() -> None:
    """Each with the reason for which it was: another user, other options, or the settings."""
    owner = f"user {OWNER.user_id}"
    with daemon_of(OWNER, f"[routes.secure]\nwriters = [{OWNER.user_id}]\n[routes.a]\n[routes.old]\n") as daemon:
        assert ask(daemon, OWNER, b"ROUTE RETIRE old\n") == "OK retired old"
        adding = f"wald --root {daemon.root} route add old"
        for user, line, wanted in (
            (MEMBER, ("append", "secure"), "add this user to writers in [routes.secure] of the daemon's configuration"),
            (MEMBER, ("append", "old"), f"as {owner}, or a user in writers of [routes.old], reactivate the route: "),
            (OWNER, ("append", "old"), f"to reactivate the route: {adding}"),
            (MEMBER, ("route", "add", "a", "--fifo", "--mode", "0666"), f"omit --mode, or run this command as {owner}"),
            (OWNER, ("route", "add", "secure", "--fifo", "--mode", "0666"), "use --mode 0600, or omit --mode"),
            (MEMBER, ("route", "add", "secure", "--fifo"), f"run this command as {owner}"),
            (
                MEMBER,
                ("route", "retire", "a"),
                f"run this command as {owner}, or as a user listed under writers in [routes.a]",
            ),
        ):
            _, _, hint = refused(run([*user.prefix, *command(*line, "--root", daemon.root)], stdin=b"x\n"))
            assert hint.startswith(wanted), (line, hint)
        # Not that there is a daemon already, which the user could do nothing about.
        code, message, _ = refused(run([*MEMBER.prefix, *command("run", "--root", daemon.root)]))
        assert (code, message.startswith(f"{daemon.root}/lock: ")) == (NotPermitted.exit_code, True), message


def succeed(daemon: Daemon, user: User, *words: object, stdin: bytes = b"") -> str:
    """Return the output of a successful command."""
    done = run([*user.prefix, *command(*words, "--root", daemon.root)], stdin=stdin)
    assert done.returncode == 0, done.stderr.decode()
    return done.stdout.decode()


def refusal(daemon: Daemon, user: User, *words: object) -> tuple[int, str, str]:
    return refused(run([*user.prefix, *command(*words, "--root", daemon.root)]))


def wald_exits(daemon: Daemon, user: User, code: int, *words: object) -> str:
    """Return the output of a command that exits with ``code``."""
    done = run([*user.prefix, *command(*words, "--root", daemon.root)])
    assert done.returncode == code, done.stderr.decode()
    return done.stdout.decode()


def group_and_mode(path: Path) -> tuple[int, int]:
    status = path.stat()
    return status.st_gid, stat.S_IMODE(status.st_mode)


def reload(daemon: Daemon, settings: str) -> None:
    daemon.root.with_name("wald.toml").write_text(settings)
    before = len(re.findall("reloaded|reload failed", daemon.log))
    daemon.process.send_signal(signal.SIGHUP)
    eventually(lambda: len(re.findall("reloaded|reload failed", daemon.log)) > before)


def test_the_group_changes_with_the_settings_and_cursors_stay() -> None:
    with daemon_of(HOST, f"[routes.a]\nconsumers = {CONSUMERS}\n") as daemon:
        consumers = daemon.root / "routes/a/cursors"
        assert group_and_mode(consumers) == (CONSUMERS, 0o3775)
        succeed(daemon, HOST, "append", "a", stdin=b"x\n" * 5)
        assert succeed(daemon, ALICE, "cursor", "set", "a", 2, "--group", "g") == "2\n"
        assert (consumers / "g.cursor").stat().st_uid == ALICE.user_id

        reload(daemon, "[routes.a]\n")
        assert group_and_mode(consumers) == (CONSUMERS, 0o3775)

        reload(daemon, '[routes.a]\nconsumers = "group"\n')
        assert group_and_mode(consumers) == (OWNER.group_id, 0o3775)
        assert succeed(daemon, MEMBER, "cursor", "set", "a", 1, "--group", "member") == "1\n"

        reload(daemon, '[routes.a]\nconsumers = ""\n')
        assert group_and_mode(consumers) == (OWNER.group_id, 0o1750)
        code, message, _ = refusal(daemon, ALICE, "cursor", "set", "a", 3, "--group", "g")
        assert (code, message) == (NotPermitted.exit_code, f"{consumers}/g.cursor: permission denied")
        assert succeed(daemon, HOST, "cursor", "get", "a", "--group", "g") == "2\n"
        assert succeed(daemon, HOST, "cursor", "remove", "a", "--group", "g") == f"{consumers}/g.cursor\n"


def test_the_log_owner_refuses_a_cursor_of_another_user_and_root_moves_it() -> None:
    with daemon_of(HOST, f"[routes.a]\nconsumers = {CONSUMERS}\n") as daemon:
        succeed(daemon, HOST, "append", "a", stdin=b"x\n" * 5)
        succeed(daemon, ALICE, "cursor", "set", "a", 2, "--group", "g")
        path, root = daemon.root / "routes/a/cursors/g.cursor", User("root", 0, 0)
        shown = succeed(daemon, HOST, "cursor", "show", "a", "--group", "g")
        assert f"at 2, of user {ALICE.user_id}" in shown
        assert "3 records, 3 to 5" in shown
        (reading,) = [line for line in shown.splitlines() if line.startswith("to read")]
        assert reading.endswith(" read a --from 3"), "not --group, which the log's owner may not use"
        assert f"valid, of user {ALICE.user_id}" in succeed(daemon, HOST, "cursor", "list", "a")

        for words in (
            ("cursor", "set", "a", 3, "--group", "g"),
            ("cursor", "set", "a", 0, "--group", "g", "--rewind"),
            ("cursor", "skip", "a", 3, "--group", "g"),
            ("read", "a", "--from", "cursor", "--group", "g"),
            ("read", "a", "--group", "g", "--commit"),
        ):
            code, message, hint = refusal(daemon, HOST, *words)
            assert (code, message) == (
                Refused.exit_code,
                f"{path}: the cursor belongs to user {ALICE.user_id}, who could make the log's owner skip records",
            ), words
            assert f"remove this one: wald --root {daemon.root} cursor remove a --group g;" in hint
        code, message, hint = refusal(daemon, ALICE, "cursor", "skip", "a", 3, "--group", "g")
        assert (code, message) == (NotPermitted.exit_code, f"{daemon.root}/ledger/skips.lock: permission denied")
        assert hint == f"as user {OWNER.user_id} or root: wald --root {daemon.root} cursor skip a 3 --group g"
        assert path.read_text().startswith("2\n")

        succeed(daemon, root, "cursor", "skip", "a", 3, "--group", "g")
        succeed(daemon, root, "cursor", "set", "a", 4, "--group", "g")
        assert path.stat().st_uid == ALICE.user_id
        assert succeed(daemon, ALICE, "cursor", "set", "a", 5, "--group", "g") == "5\n"
        code, _, _ = refusal(daemon, root, "read", "a", "--from", "cursor", "--group", "g")
        assert code == Refused.exit_code


def test_no_program_of_the_log_owner_starts_from_a_cursor_that_another_user_left() -> None:
    with daemon_of(HOST, f"[routes.a]\nconsumers = {CONSUMERS}\n") as daemon:
        destination = daemon.root.with_name("archive")
        succeed(daemon, HOST, "append", "a", stdin=b"x\n" * 4)
        succeed(daemon, HOST, "cut")
        succeed(daemon, ALICE, "cursor", "set", "a", 4, "--group", "g")
        consuming = f"import wald\nwith wald.Consumer('{daemon.root}', 'a', 'g') as c:\n    list(c)"
        working = f"import wald\nwith wald.WorkGroup('{daemon.root}', 'a', 'g') as g:\n    g.lease('w', 1)"
        looking = f"import wald\nprint(wald.open('{daemon.root}').cursor('a', 'g').effective)"
        python = command()[0]
        for line in (
            sidecar("archive", "pack", "a", "--group", "g", "--root", daemon.root, "--dest", destination),
            sidecar("drain", "a", "--root", daemon.root, "--group", "g", "--exit-at-end", "--", "cat"),
            sidecar("drain", "a", "--root", daemon.root, "--group", "g", "--workers", 2, "--exit-at-end", "--", "cat"),
            [python, "-c", consuming],
            [python, "-c", working],
            [python, "-c", looking],
        ):
            for prefix in (HOST.prefix, []) if "pack" in line else (HOST.prefix,):  # the log's owner, and root
                done = run([*prefix, *line])
                assert (done.returncode, done.stdout) == (1 if "-c" in line else Refused.exit_code, b""), done.stderr
                assert f"the cursor belongs to user {ALICE.user_id}" in done.stderr.decode()
        assert not list(destination.rglob("manifest*"))
        assert (daemon.root / "routes/a/cursors/g.cursor").stat().st_uid == ALICE.user_id

        succeed(daemon, HOST, "cursor", "remove", "a", "--group", "g")
        draining = sidecar("drain", "a", "--root", daemon.root, "--group", "g", "--exit-at-end", "--", "cat")
        done = run([*HOST.prefix, *draining])
        assert (done.returncode, done.stdout) == (0, b"x\n" * 4), done.stderr.decode()


def test_what_a_cursor_owner_leaves_beside_a_cursor_of_the_log_owner_has_no_effect() -> None:
    with daemon_of(HOST, f"[routes.a]\nconsumers = {CONSUMERS}\n[routes.b]\n") as daemon:
        succeed(daemon, HOST, "append", "a", stdin=b"x\n" * 4)
        succeed(daemon, HOST, "cursor", "set", "a", 1, "--group", "g")
        log = Log(daemon.root)
        directory = daemon.root / "routes/a/cursors"
        start = JournalStart(log.identity.log_id, "a", "g", 1, 4)
        planted = {
            ".work": encode_work(start, 0) + encode_work(Commit(done=[(2, 4)]), 0),
            ".pin": encode_pin(log.identity.log_id, {"drain": {"b": 0}}),
            ".drain": b"",
            ".command": b"",
        }
        for suffix, content in planted.items():
            path = directory / f"g{suffix}"
            done = run([*ALICE.prefix, "sh", "-c", 'cat > "$1"', "sh", str(path)], stdin=content)
            assert (done.returncode, path.stat().st_uid) == (0, ALICE.user_id)

        assert json.loads(succeed(daemon, HOST, "where", 3, "--json"))["processed"] == {"g": False}
        assert read_cursor_snapshot(log.root, log_id=log.identity.log_id).positions("b") == {"processed": 0}
        (seen,) = [
            json.loads(line) for line in wald_exits(daemon, HOST, 4, "group", "list", "a", "--json").splitlines()
        ]
        assert "another user than the cursor" in seen["damage"]
        assert succeed(daemon, HOST, "read", "a", "--group", "g", "--from", "cursor") == "x\n" * 3
        draining = sidecar("drain", "a", "--root", daemon.root, "--group", "g", "--exit-at-end", "--", "cat")
        done = run([*HOST.prefix, *draining])
        code, message, hint = refused(done)
        assert (code, message) == (NotPermitted.exit_code, f"{directory}/g.drain: permission denied")
        assert hint.endswith(f": rm {directory}/g.drain")
        for name in ("g.drain", "g.command"):
            assert run([*HOST.prefix, "rm", str(directory / name)]).returncode == 0
        done = run([*HOST.prefix, *draining])
        assert (done.returncode, done.stdout) == (0, b"x\n" * 3), done.stderr.decode()


def test_of_two_users_that_create_a_cursor_at_once_one_gets_the_name() -> None:
    """The log's owner, too, replaces no cursor that appears while it creates its own."""
    with daemon_of(HOST, f"[routes.a]\nconsumers = {CONSUMERS}\n") as daemon:
        succeed(daemon, HOST, "append", "a", stdin=b"x\n" * 4)
        path = daemon.root / "routes/a/cursors/g.cursor"
        racing = (
            "import os, sys\nfrom wald.files.disk import Disk\nfrom wald.log import Log\n"
            "write = Disk.write\n"
            "def late(*args):\n"
            "    path = sys.argv[2]\n"
            "    if not os.path.exists(path):\n"
            "        os.system(f'echo 4 > {path}; chown 54324 {path}')\n"
            "    return write(*args)\n"
            "Disk.write = late\n"
            "Log(sys.argv[1]).set_cursor('a', 1, 'g')\n"
        )
        done = run([command()[0], "-c", racing, str(daemon.root), str(path)])
        assert "Refused" in done.stderr.decode(), done.stderr.decode()
        assert (path.read_text(), path.stat().st_uid) == ("4\n", ALICE.user_id)


def test_a_refusal_names_the_command_that_helps() -> None:
    """The user that a namespace does not have is not called nobody."""
    with daemon_of(HOST, f"[routes.a]\nconsumers = {CONSUMERS}\n") as daemon:
        consumers = daemon.root / "routes/a/cursors"
        code, _, hint = refusal(daemon, MEMBER, "cursor", "set", "a", 0)
        joining = f"usermod --append --groups {CONSUMERS} {MEMBER.user_id}; then log in again"
        assert (code, hint) == (NotPermitted.exit_code, f"{joining}; ls -ld {consumers}")
        path = consumers / "g.cursor"
        path.write_text("0\n")
        os.chown(path, 65534, 65534)
        _, _, hint = refusal(daemon, ALICE, "cursor", "set", "a", 0, "--group", "g")
    assert hint == f"run this command as the user who created the file; ls -l {path}"


def test_only_a_member_gives_a_route_to_a_group() -> None:
    """And the daemon's user is one once it was added and the daemon was started again."""
    with daemon_of(OWNER, "[routes.a]\n") as daemon:
        code, message, hint = refusal(daemon, OWNER, "route", "add", "a", "--consumers", CONSUMERS)
        directory = daemon.root / "routes/a/cursors"
        not_in = (
            f"{directory}: user {OWNER.user_id} is not in group {CONSUMERS}, or was not in it when this program started"
        )
        assert (code, message) == (NotPermitted.exit_code, not_in)
        assert hint == f"usermod --append --groups GROUP {OWNER.user_id}; then restart the daemon"

        code, message, hint = refusal(daemon, MEMBER, "route", "add", "a", "--consumers", CONSUMERS)
        assert (code, hint) == (
            NotPermitted.exit_code,
            f"omit --consumers, or run this command as user {OWNER.user_id}",
        )

        for group in ("no-such-group", "4294967295", "9999999999", "-1"):
            assert daemon.ask(f"ROUTE ADD b consumers={group}").startswith("ERR bad-request ")
        assert not daemon.root.joinpath("routes/b").exists()

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
        assert group_and_mode(directory) == (CONSUMERS, 0o3775)


def test_settings_that_contradict_or_name_no_group_are_refused_and_a_group_may_be_named(tmp_path: Path) -> None:
    # Settings that contradict or name no group are refused.
    config, groups = tmp_path / "wald.toml", ("no-such-group", "4294967295")
    for line, message in (
        ('mode = "0620"\nwriters = [1]', "routes.a has writers"),
        *((f'consumers = "{group}"', "routes.a.consumers must be an OS group") for group in groups),
    ):
        config.write_text(f"[routes.a]\nfifo = true\n{line}\n")
        code, said, _ = refused(run(command("run", "--root", tmp_path / "log", "--config", config)))
        assert (code, said.startswith(f"{config}:3: {message}")) == (InvalidInput.exit_code, True), said
    for group in groups:
        code, _, hint = refused(run(command("route", "add", "a", "--consumers", group, "--root", tmp_path)))
        assert (code, hint) == (InvalidInput.exit_code, "getent group")

    # A group may be named.
    name = grp.getgrall()[1].gr_name
    run(command("init", "--root", tmp_path / "log"))
    assert run(command("route", "add", "a", "--consumers", name, "--root", tmp_path / "log")).returncode == 0
    assert group_and_mode(tmp_path / "log/routes/a/cursors") == (grp.getgrnam(name).gr_gid, 0o3775)
    assert b"consumers=" + name.encode() in run(command("route", "list", "--root", tmp_path / "log")).stdout


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
        consumers = daemon.root / "routes/a/cursors"
        succeed(daemon, HOST, "append", "a", stdin=b"x\n" * 4)
        succeed(daemon, HOST, "cut")
        eventually(lambda: list((daemon.root / "segments").glob("*.zst")))
        for name, script in PLANTS.items():
            cursor = consumers / f"{name.replace(' ', '-')}.cursor"
            done = run([*ALICE.prefix, "sh", "-euc", f"cd {consumers}; {script}", "sh", cursor.name])
            assert done.returncode == 0, (name, done.stderr)
        for name in NAMES[:3]:
            assert run([*ALICE.prefix, "touch", str(consumers / name)]).returncode == 0
        succeed(daemon, BOB, "cursor", "set", "a", 4, "--group", "bob")

        looks = [
            sidecar("reclaim", "--grace", 0, "--root", daemon.root),
            *(command(*words, "--root", daemon.root) for words in LOOKS),
        ]
        for line in looks:
            done = run([*HOST.prefix, *line], timeout=30)
            assert done.returncode in (0, 4), (line, done.stderr.decode())  # verify reports damage
        assert len(list((daemon.root / "segments").glob("*.zst"))) == 1
        listed = [json.loads(line) for line in succeed(daemon, HOST, "cursor", "list", "--json").splitlines()]
        states = {each["group"]: each["state"] for each in listed}
        assert states.pop("bob") == "valid"
        assert {group for group, state in states.items() if state == "valid"} == set()
        assert states["hard-link"] == "linked"
        assert states["beyond"] == "beyond"

        assert daemon.stop() == 0
        daemon.start_again()
        assert stat.S_ISFIFO((daemon.root / "routes/a/in").stat().st_mode)
        assert succeed(daemon, HOST, "append", "a", stdin=b"y\n") == "5 5\n"

        planted = [str(consumers / f"{name.replace(' ', '-')}.cursor") for name in PLANTS]
        removing = [*HOST.prefix, "rm", "-rf", *planted]  # which the owner of the directory may
        assert run(removing).returncode == 1  # except for files in a directory of another user
        shutil.rmtree(consumers / "directory.cursor")
        run([*HOST.prefix, *looks[0]])
        assert not list((daemon.root / "segments").glob("*.zst"))


LOOKS = (("explain",), ("top", "--once"), ("cursor", "list"), ("route", "list"), ("where", 1), ("verify",), ("read",))
