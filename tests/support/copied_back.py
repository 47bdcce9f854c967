"""Restore of an older copy of a log under a running gate."""

import shutil
from pathlib import Path

from running import Daemon


def copy(daemon: Daemon, root: Path, to: Path) -> None:
    """Copy the log while its daemon is stopped."""
    daemon.stop()
    shutil.copytree(root, to, ignore=shutil.ignore_patterns("gate", "wald.sock"))
    daemon.start_again()


def copy_back(daemon: Daemon, root: Path, source: Path) -> None:
    """Restore the log; keep the gate's files."""
    daemon.stop()
    for path in root.iterdir():
        if path.name != "gate":
            shutil.rmtree(path) if path.is_dir() else path.unlink()
    shutil.copytree(source, root, dirs_exist_ok=True)
    daemon.start_again()
