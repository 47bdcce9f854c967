"""Configuration of all tests: mark tests that start Spark, allow slow machines, and restore the handling of SIGINT."""

import asyncio
import gc
import inspect
import os
import shutil
import signal
from collections.abc import Generator
from pathlib import Path

import programs
import pytest
from hypothesis import HealthCheck, settings
from running import TIMEOUT_SECONDS
from sharing import ByFixtures, begins_elsewhere
from users import lack
from xdist.remote import Producer

_NEED_JAVA = {"spark", "cluster"}  # tests that start Spark in another process carry the mark explicitly
_NEED_BROWSER = {"chromium"}

settings.register_profile("any machine", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("any machine")

gc.disable()  # no garbage arises while each worker collects all tests; see pytest_collection_finish

# A shell ignores this signal in background commands, and every program that a test starts would inherit that.
signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.hookimpl(wrapper=True)
def pytest_make_collect_report(
    collector: pytest.Collector,
) -> Generator[None, pytest.CollectReport, pytest.CollectReport]:
    report = yield
    if isinstance(collector, pytest.Directory):
        report.result = begins_elsewhere(report.result, collector.config)
    return report


@pytest.hookimpl(tryfirst=True)  # before -m selects by these marks
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    items.sort(key=lambda item: item.path)  # same order in all workers
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


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> bool | None:
    """Run a coroutine function in an event loop of its own."""
    if not inspect.iscoroutinefunction(pyfuncitem.obj):
        return None
    given = {name: pyfuncitem.funcargs[name] for name in inspect.signature(pyfuncitem.obj).parameters}
    asyncio.run(asyncio.wait_for(pyfuncitem.obj(**given), TIMEOUT_SECONDS))
    return True


def _skip_without_program() -> Generator[None, object, object]:
    try:
        return (yield)
    except (FileNotFoundError, PermissionError) as error:
        name = str(error.filename)
        if name in programs.PACKAGES and shutil.which(name) is None:
            programs.lack(programs.missing(name))
        raise


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Name the packages whose absence caused skips; append the names of skipped tests to $SKIPPED_TO."""
    skipped = terminalreporter.stats.get("skipped", [])
    packages = programs.packages_of([str(report.longrepr[2]) for report in skipped])
    if packages:
        terminalreporter.write_line(f"skipped for want of programs: apt-get install {' '.join(packages)}")
    if to := os.environ.get("SKIPPED_TO"):
        with Path(to).open("a") as file:  # append: failed tests may run again
            file.writelines(f"{report.nodeid}\n" for report in skipped)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Producer) -> ByFixtures | None:
    """Replace the scheduler of ``--dist loadscope``; other modes keep those of xdist."""
    return ByFixtures(config, log) if config.getoption("dist") == "loadscope" else None


@pytest.fixture(scope="session")
def other_users() -> None:
    """Skip a test that needs other Unix users if the machine cannot provide them."""
    if why := lack():
        pytest.skip(why)
