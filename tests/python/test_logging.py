"""The logging handler: each message is in the log once, or on stderr with a reason, and no call blocks for too long."""

import io
import logging
import logging.config
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from running import Daemon, eventually

import wald
from wald.errors import InvalidInput
from wald.logging import WaldHandler

PROGRAM = """
import logging, sys
from wald.logging import WaldHandler
handler = WaldHandler(sys.argv[1], "a", close_for=float(sys.argv[2]))
logging.basicConfig(handlers=[handler], level=logging.INFO, format="%(message)s")
for number in range(int(sys.argv[3])):
    logging.info("message %d", number)
"""


@pytest.fixture
def logger() -> Iterator[logging.Logger]:
    made = logging.Logger("test")  # noqa: LOG001 - outside the hierarchy, so no other handler gets its records
    yield made
    for handler in made.handlers:
        handler.close()


def values(daemon: Daemon) -> list[str]:
    return [record.value.decode() for record in wald.open(daemon.root).records("a")]


def test_a_record_has_its_text_time_level_and_logger(daemon: Daemon, logger: logging.Logger) -> None:
    """The name of a logger and of a level may be no text of UTF-8."""
    handler = WaldHandler(daemon.root, "a")
    handler.setFormatter(logging.Formatter("%(levelname)s %(message)s"))
    logger.addHandler(handler)
    before = time.time_ns()
    logger.warning("größer als %d\nund mehr \ud800", 7)
    for name, level in (("caf\udce9", "INFO"), ("b", 7)):
        handler.handle(logging.makeLogRecord({"name": name, "levelname": level, "msg": "text"}))
    handler.flush()

    record, *others = wald.open(daemon.root).records("a")
    assert record.value.decode() == "WARNING größer als 7\nund mehr \\ud800"
    assert record.headers == b'{"level":"WARNING","logger":"test"}'
    assert record.event_time_ns is not None
    assert before - 10**6 <= record.event_time_ns <= time.time_ns()
    found = [each.headers for each in others]
    assert found == [b'{"level":"INFO","logger":"caf\\\\udce9"}', b'{"level":"7","logger":"b"}']
    assert handler.lost == 0


def test_threads_lose_and_double_nothing(daemon: Daemon, logger: logging.Logger) -> None:
    handler = WaldHandler(daemon.root, "a", capacity=50, block_for=60)
    logger.addHandler(handler)

    def log(thread: int) -> None:
        for number in range(200):
            logger.info("%d %d", thread, number)

    with ThreadPoolExecutor(4) as threads:
        list(threads.map(log, range(4)))
    handler.close()

    found = [value.split() for value in values(daemon)]
    for name in "0123":
        assert [number for thread, number in found if thread == name] == [str(number) for number in range(200)]
    assert handler.lost == 0


def test_it_closes_well_at_exit_and_without_a_daemon_everything_is_on_stderr(daemon: Daemon, tmp_path: Path) -> None:
    def ran(*arguments: object) -> str:
        done = subprocess.run([sys.executable, "-c", PROGRAM, *map(str, arguments)], capture_output=True, check=True)
        return done.stderr.decode()

    assert ran(daemon.root, 60, 2500) == ""
    assert values(daemon) == [f"message {number}" for number in range(2500)]
    first, *rest = ran(tmp_path, 0.1, 3).splitlines()
    assert first.startswith("wald.logging: not delivered to route a: the daemon did not answer within 0.1 s")
    assert rest == ["message 0", "message 1", "message 2"]
    with pytest.raises(InvalidInput):
        WaldHandler(tmp_path, "not/a/route")


def test_a_daemon_may_come_later_and_restart(daemon: Daemon, logger: logging.Logger) -> None:
    daemon.kill()
    handler = WaldHandler(daemon.root, "a", close_for=60)
    logger.addHandler(handler)
    logger.info("before")
    daemon.start_again()
    handler.flush()
    daemon.kill()
    logger.info("between")
    daemon.start_again()
    handler.close()

    assert values(daemon) == ["before", "between"]


def test_a_full_queue_blocks_each_thread_no_longer_than_allowed(
    daemon: Daemon, logger: logging.Logger, capfd: pytest.CaptureFixture[str]
) -> None:
    """The waits of threads do not add up; dropped messages are on stderr, and their count is in the log."""
    daemon.kill()
    handler = WaldHandler(daemon.root, "a", capacity=1, block_for=0.3, close_for=60)
    logger.addHandler(handler)
    logger.info("taken by the thread")
    eventually(lambda: handler._in_flight)
    logger.info("queued")
    took: list[float] = []

    def log(number: int) -> None:
        started = time.monotonic()
        logger.info("lost %d", number)
        took.append(time.monotonic() - started)

    with ThreadPoolExecutor(8) as threads:
        list(threads.map(log, range(8)))
    assert all(0.3 <= seconds < 8 * 0.3 for seconds in took)
    assert handler.lost == 8
    assert capfd.readouterr().err.count("not delivered to route a: the queue is full (1 records)\nlost ") == 8
    daemon.start_again()
    handler.close()

    assert values(daemon) == ["8 log records were lost", "taken by the thread", "queued"]


def test_what_the_daemon_refuses_is_on_stderr_and_the_next_one_is_sent(
    daemon: Daemon, logger: logging.Logger, capfd: pytest.CaptureFixture[str]
) -> None:
    handler = WaldHandler(daemon.root, "later")
    logger.addHandler(handler)
    logger.info("refused")
    handler.flush()
    assert "no route 'later'" in capfd.readouterr().err
    daemon.ask("ROUTE ADD later")
    logger.info("taken")
    handler.flush()

    found = [record.value for record in wald.open(daemon.root).records("later")]
    assert found == [b"1 log records were lost", b"taken"]


def test_a_record_that_is_refused_takes_no_other_along(
    daemon: Daemon, logger: logging.Logger, capfd: pytest.CaptureFixture[str]
) -> None:
    """Messages before and after it are in the log once, and messages in the log are not reported as lost."""
    daemon.kill()
    daemon.env["WALD_REQUEST_MAX_BYTES"] = "128KiB"
    handler = WaldHandler(daemon.root, "a", close_for=60)
    logger.addHandler(handler)
    texts = [f"message {number} {'x' * 200}" for number in range(2000)]
    too_large = "y" * 200_000
    for number, text in enumerate(texts):  # no daemon is running, so they are sent together
        logger.info(text)
        if number in (500, 501, 1500):
            logger.info(too_large)
    daemon.start_again()
    handler.close()

    notices = ("1 log records were lost", "2 log records were lost", "3 log records were lost")
    assert [value for value in values(daemon) if value not in notices] == texts
    assert handler.lost == 3
    lines = capfd.readouterr().err.splitlines()
    assert [line for line in lines if "not delivered" not in line] == [too_large] * 3


def test_what_a_closed_handler_has_reported_is_not_reported_again(
    daemon: Daemon, logger: logging.Logger, capfd: pytest.CaptureFixture[str]
) -> None:
    daemon.kill()
    handler = WaldHandler(daemon.root, "nothing", close_for=0.1)
    logger.addHandler(handler)
    logger.info("late")
    handler.close()
    assert handler.lost == 1
    thread = handler._thread
    assert thread is not None
    daemon.start_again()
    thread.join(30)

    assert not thread.is_alive()
    assert handler.lost == 1
    assert capfd.readouterr().err.count("late\n") == 1


class Logging(io.StringIO):
    """Stderr that logs the text written to it, as some programs do."""

    def __init__(self, logger: logging.Logger) -> None:
        super().__init__()
        self._logger = logger

    def write(self, text: str) -> int:
        self._logger.error(text)
        return len(text)


def test_a_closed_handler_writes_to_stderr_unless_that_logs(
    daemon: Daemon, logger: logging.Logger, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """Otherwise, reports of lost messages would go to the handler that lost them, in an endless loop."""
    handler = WaldHandler(daemon.root, "a")
    logger.addHandler(handler)
    handler.close()
    logger.info("late")
    assert capfd.readouterr().err.endswith("the handler is closed\nlate\n")
    monkeypatch.setattr(sys, "stderr", Logging(logger))
    logger.info("later")

    assert handler.lost == 2
    assert capfd.readouterr().err.endswith("later\n")


def test_a_fork_has_a_queue_of_its_own(daemon: Daemon, logger: logging.Logger) -> None:
    handler = WaldHandler(daemon.root, "a")
    logger.addHandler(handler)
    logger.info("parent")
    child = os.fork()
    if child == 0:
        logger.info("child")
        handler.close()
        os._exit(handler.lost)
    assert os.waitpid(child, 0)[1] == 0
    handler.close()

    assert sorted(values(daemon)) == ["child", "parent"]


def test_a_record_that_cannot_be_formatted_is_reported(
    daemon: Daemon, logger: logging.Logger, capfd: pytest.CaptureFixture[str]
) -> None:
    handler = WaldHandler(daemon.root, "a")
    logger.addHandler(handler)
    logger.info("%d", "x")
    logger.addFilter(lambda record: record.msg != "unwanted")
    logger.info("unwanted")
    handler.addFilter(lambda record: record.msg != "filtered")
    logger.info("filtered")
    logger.info("next")
    handler.flush()

    assert "--- Logging error ---" in capfd.readouterr().err
    assert values(daemon) == ["next"]


def test_a_configuration_may_name_it(daemon: Daemon) -> None:
    handler = {"class": "wald.logging.WaldHandler", "at": str(daemon.root), "route": "a", "level": "INFO"}
    logging.config.dictConfig(
        {
            "version": 1,
            "disable_existing_loggers": False,
            "handlers": {"log": handler},
            "loggers": {"configured": {"handlers": ["log"], "level": "DEBUG", "propagate": False}},
        }
    )
    logger = logging.getLogger("configured")
    logger.debug("too fine")
    logger.info("taken")
    for each in list(logger.handlers):
        each.close()
        logger.removeHandler(each)

    assert values(daemon) == ["taken"]
