"""Configuration of every test: mark those that start Spark, allow slow machines, and pass interrupts to programs."""

from __future__ import annotations

import gc
import os
import shutil
import signal
from collections.abc import Generator
from pathlib import Path

import programs
import pytest
from hypothesis import HealthCheck, settings
from sharing import ByFixtures, begins_elsewhere
from users import lack
from xdist.remote import Producer

_NEED_JAVA = {"spark", "cluster"}  # tests that start Spark in another process are marked by hand
_NEED_BROWSER = {"chromium"}

settings.register_profile("any machine", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("any machine")

gc.disable()  # each worker collects all tests, and they are not garbage; see pytest_collection_finish

# A shell starts a command in the background with this signal ignored, and every program that a test starts inherits it.
signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.hookimpl(wrapper=True)
def pytest_make_collect_report(
    collector: pytest.Collector,
) -> Generator[None, pytest.CollectReport, pytest.CollectReport]:
    report = yield
    if isinstance(collector, pytest.Directory):
        report.result = begins_elsewhere(report.result, collector.config)
    return report


@pytest.hookimpl(tryfirst=True)  # before -m chooses by our marker
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    items.sort(key=lambda item: item.path)  # the same in all workers
    for item in items:
        if _NEED_JAVA.intersection(getattr(item, "fixturenames", ())):
            item.add_marker("spark")
        if _NEED_BROWSER.intersection(getattr(item, "fixturenames", ())):
            item.add_marker("slow")


def pytest_collection_finish() -> None:
    gc.freeze()
    gc.enable()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_setup(item: pytest.Item) -> Generator[None, object, object]:
    return (yield from _skip_without_program())


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Generator[None, object, object]:
    return (yield from _skip_without_program())


def _skip_without_program() -> Generator[None, object, object]:
    try:
        return (yield)
    except (FileNotFoundError, PermissionError) as error:
        name = str(error.filename)
        if name in programs.PACKAGES and shutil.which(name) is None:
            programs.lack(programs.missing(name))
        raise


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Name the packages without which tests were skipped; add the names of those tests to $SKIPPED_TO."""
    skipped = terminalreporter.stats.get("skipped", [])
    packages = programs.packages_of([str(report.longrepr[2]) for report in skipped])
    if packages:
        terminalreporter.write_line(f"skipped for want of programs: apt-get install {' '.join(packages)}")
    if to := os.environ.get("SKIPPED_TO"):
        with Path(to).open("a") as file:  # what failed may run once more
            file.writelines(f"{report.nodeid}\n" for report in skipped)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Producer) -> ByFixtures | None:
    """With ``--dist loadscope``; the other ways are as xdist has them."""
    return ByFixtures(config, log) if config.getoption("dist") == "loadscope" else None


@pytest.fixture(scope="session")
def other_users() -> None:
    """Skips a test that needs some, where there can be none."""
    if why := lack():
        pytest.skip(why)
