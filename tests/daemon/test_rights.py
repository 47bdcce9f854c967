"""Permissions of users towards the daemon: FIFOs, their modes, and routes with writers."""

from __future__ import annotations

import os
import stat
from pathlib import Path

from running import Client, Daemon, command, refused, run, wald
from users import MEMBER, OWNER, User, daemon_of, needs_root

from wald.errors import InvalidInput, NotPermitted

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


def test_a_members_request_opens_no_fifo_to_others() -> None:
    with daemon_of(OWNER, f"[routes.secure]\nwriters = [{OWNER.user_id}]\n") as daemon:
        fifo = daemon.root / "routes/secure/in"
        for options in (b"fifo mode=0666", b"fifo", b"fifo mode=0600", b"mode=0666"):
            assert ask(daemon, MEMBER, b"ROUTE ADD secure %s\n" % options).startswith("ERR denied "), options
        assert not fifo.exists()
        assert ask(daemon, OWNER, b"ROUTE ADD secure fifo mode=0620\n").startswith(
            "ERR denied route secure has configured writers"
        )
        assert ask(daemon, OWNER, b"ROUTE ADD secure fifo\n") == "OK added secure"
        assert mode(fifo) == 0o600


def test_a_member_changes_no_mode() -> None:
    """Not even back to the mode of a new FIFO."""
    with daemon_of(OWNER) as daemon:
        assert ask(daemon, OWNER, b"ROUTE ADD a fifo mode=0600\n") == "OK added a"
        assert ask(daemon, MEMBER, b"ROUTE ADD a fifo\n") == "OK added a"
        assert ask(daemon, MEMBER, b"ROUTE ADD a fifo mode=0666\n").startswith("ERR denied ")
        assert ask(daemon, MEMBER, b"ROUTE ADD b fifo mode=0666\n").startswith("ERR denied ")
        assert ask(daemon, MEMBER, b"ROUTE ADD c fifo\n") == "OK added c"
        assert [mode(daemon.root / f"routes/{name}/in") for name in "ac"] == [0o600, 0o620]
        assert not (daemon.root / "routes/b").exists()


def test_a_fifo_that_was_there_first_is_closed_to_all_but_the_owner() -> None:
    with daemon_of(OWNER) as daemon:
        assert ask(daemon, OWNER, b"ROUTE ADD a fifo\n") == "OK added a"
        config = daemon.root.with_name("wald.toml")
        config.write_text(f"[routes.a]\nwriters = [{OWNER.user_id}]\n")
        assert daemon.stop() == 0
        daemon.start_again()
        assert mode(daemon.root / "routes/a/in") == 0o600


def test_a_retired_route_with_writers_is_taken_back_by_them_only() -> None:
    with daemon_of(OWNER, f"[routes.a]\nwriters = [{OWNER.user_id}]\n") as daemon:
        assert ask(daemon, OWNER, b"ROUTE RETIRE a\n") == "OK retired a"
        assert ask(daemon, MEMBER, b"ROUTE ADD a\n").startswith("ERR denied ")
        assert (daemon.root / "routes/a/retired").exists()
        assert ask(daemon, OWNER, b"ROUTE ADD a\n") == "OK added a"


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
            (
                MEMBER,
                ("append", "old"),
                f"as {owner}, or a user in writers of [routes.old], reactivate the route: ",
            ),
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


def test_settings_do_not_say_both(tmp_path: Path) -> None:
    config = tmp_path / "wald.toml"
    config.write_text('[routes.a]\nfifo = true\nmode = "0620"\nwriters = [1]\n')
    done = wald("run", "--root", tmp_path / "log", "--config", config)

    assert done.returncode == InvalidInput.exit_code
    assert f"{config}:3: routes.a has writers" in done.stderr.decode()


def test_who_may_run_no_daemon_is_told_so_while_one_runs() -> None:
    """Not that there is one already, which the user could do nothing about."""
    with daemon_of(OWNER) as daemon:
        code, message, _ = refused(run([*MEMBER.prefix, *command("run", "--root", daemon.root)]))
    assert (code, message.startswith(f"{daemon.root}/lock: ")) == (NotPermitted.exit_code, True), message
