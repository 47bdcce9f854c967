"""A root, and daemons on it that do not outlive their test."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
from running import Daemon

Start = Callable[..., Daemon]


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """Where a log will be."""
    return tmp_path / "log"


@pytest.fixture
def start(root: Path) -> Iterator[Start]:
    """Start a daemon; settings are keywords, as ``segment_max_bytes="64KiB"``."""
    with ExitStack() as running:

        def started(*arguments: object, at: Path = root, **options: Any) -> Daemon:
            # Any: settings are strings, and the rest is what Daemon takes.
            passed = {name: options.pop(name) for name in ("stdin", "pass_fds", "ready", "anew") if name in options}
            env = options.pop("env", {}) | {f"WALD_{name.upper()}": str(value) for name, value in options.items()}
            return running.enter_context(Daemon(at, *arguments, env=env, **passed))

        yield started
