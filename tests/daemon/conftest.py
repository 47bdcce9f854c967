"""A root, daemons on it that do not outlive their test, and a daemon that tests of a module share."""

from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
from asking import REQUEST_MAX
from contents import assert_sound
from full_disk import small_file_system
from running import Client, Daemon, Start


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """Path of the log."""
    return tmp_path / "log"


@pytest.fixture
def start(root: Path, request: pytest.FixtureRequest) -> Iterator[Start]:
    """Start a daemon, and add routes such as "a fifo"; settings are keywords, as ``segment_max_bytes="64KiB"``.

    After the test, the last daemon of each root stops with 0, and its log is sound unless the test uses ``unsound``.
    """
    for name in {"disk", "small"}.intersection(request.fixturenames):
        request.getfixturevalue(name)  # a file system is unmounted after its daemon has ended
    daemons: dict[Path, Daemon] = {}
    with ExitStack() as running:

        def started(*arguments: object, at: Path = root, routes: Sequence[str] = (), **options: Any) -> Daemon:
            # Any: settings are strings, and the rest is what Daemon takes.
            passed = {name: options.pop(name) for name in ("stdin", "pass_fds", "ready", "anew") if name in options}
            env = options.pop("env", {}) | {f"WALD_{name.upper()}": str(value) for name, value in options.items()}
            daemon = daemons[at] = running.enter_context(Daemon(at, *arguments, env=env, **passed))
            for route in routes:
                assert daemon.ask(f"ROUTE ADD {route}").startswith("OK added ")
            return daemon

        yield started
        for at, daemon in daemons.items():
            assert daemon.process.poll() is not None or daemon.stop() == 0, daemon.log
            if (at / "log.json").exists() and "unsound" not in request.fixturenames:
                assert_sound(at)


@pytest.fixture
def unsound() -> None:
    """Mark a test that leaves a log with damage or without its first records."""


@pytest.fixture
def disk(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Path]:
    """A small file system of ``DISK_BYTES`` of the module."""
    with small_file_system(tmp_path / "disk", request.module.DISK_BYTES) as path:
        yield path


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Daemon]:
    """One daemon for tests that leave nothing behind or use a separate route; "gone" is retired."""
    env = {"WALD_REQUEST_MAX_BYTES": str(REQUEST_MAX), "WALD_SEGMENT_MAX_BYTES": "256KiB"}
    with Daemon(tmp_path_factory.mktemp("shared") / "log", env=env) as daemon:
        for words in ("ROUTE ADD r", "ROUTE ADD gone", "ROUTE RETIRE gone", "ROUTE ADD in fifo"):
            assert daemon.ask(words).startswith("OK ")
        yield daemon


@pytest.fixture
def route(shared: Daemon, request: pytest.FixtureRequest) -> str:
    """A route of the test's own."""
    name = request.node.name.translate(str.maketrans("[]", "--"))[:100]
    assert shared.ask(f"ROUTE ADD {name}") == f"OK added {name}"
    return str(name)


@pytest.fixture
def client(shared: Daemon) -> Iterator[Client]:
    with Client(shared.socket_path) as connected:
        yield connected
