"""Commands run by other users: the log's owner, a member of its group, and a stranger.

The ids need no entry in the user database. Only root can change its user, and the other users need read access to the
interpreter and this checkout; tests that need them are skipped elsewhere, visibly.
"""

import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest
from running import Daemon

needs_root = pytest.mark.usefixtures("other_users")


@dataclass(frozen=True)
class User:
    """A user with one or more groups."""

    name: str
    user_id: int
    group_id: int
    groups: tuple[int, ...] = ()

    @property
    def prefix(self) -> list[str]:
        """Return a prefix that runs a command line as this user."""
        setpriv = shutil.which("setpriv")
        assert setpriv, "these tests need setpriv: apt-get install util-linux"
        groups = f"--groups={','.join(map(str, self.groups))}" if self.groups else "--clear-groups"
        return [setpriv, f"--reuid={self.user_id}", f"--regid={self.group_id}", groups]


def lack() -> str:
    """Return the reason why no test can run our programs as another user, or ""."""
    if os.geteuid() != 0:
        return "only root can become another user"
    done = subprocess.run([*OWNER.prefix, sys.executable, "-c", "import wald.cli"], capture_output=True, check=False)
    return "" if done.returncode == 0 else f"other users cannot run wald from here: {done.stderr.decode()[-200:]}"


@contextmanager
def acting_as(user_id: int) -> Iterator[None]:
    """Act as another user within the block, for the kernel, which records who connects."""
    before = os.geteuid()
    os.seteuid(user_id)
    try:
        yield
    finally:
        os.seteuid(before)


CONSUMERS = 54330  # a group
OWNER = User("owner", 54321, 54321)
MEMBER = User("member", 54322, 54321)
STRANGER = User("stranger", 54323, 54323)
HOST = User("host", OWNER.user_id, OWNER.group_id, (CONSUMERS,))
"""The owner, as a member of the group of the consumers."""
ALICE = User("alice", 54324, 54324, (OWNER.group_id, CONSUMERS))
BOB = User("bob", 54325, 54325, (OWNER.group_id, CONSUMERS))


@contextmanager
def place_of_owner() -> Iterator[Path]:
    """Yield a directory of ``OWNER`` that other users can reach, unlike pytest's directories."""
    with tempfile.TemporaryDirectory() as name:
        place = Path(name)
        os.chown(place, OWNER.user_id, OWNER.group_id)
        place.chmod(0o755)
        yield place


def with_root(line: list[str], root: Path) -> list[str]:
    """Return a command line with the option ``--root``, which precedes the command of a drain."""
    at = line.index("--") if "--" in line else len(line)
    return [*line[:at], "--root", str(root), *line[at:]]


@contextmanager
def daemon_of(user: User, settings: str = "") -> Iterator[Daemon]:
    """Start a daemon of this user with these settings."""
    with place_of_owner() as parent:
        config = parent / "wald.toml"
        config.write_text(settings)
        with Daemon(parent / "log", "--config", config, prefix=user.prefix) as daemon:
            yield daemon
