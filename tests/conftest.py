"""What holds for every test: what starts Spark is marked, no machine is too slow, an interrupt ends a program.

Workers are given tests one by one (``--dist loadgroup``), so that none is left with a long file at the end; only tests
that share a fixture of their file stay together.
"""

from __future__ import annotations

import signal

import pytest
from hypothesis import HealthCheck, settings
from users import lack

_NEED_JAVA = {"spark", "cluster"}  # the fixtures; who starts Spark in a process of its own is marked by hand
_SHARED = {"class", "module", "package"}  # the scopes of fixtures for which tests stay together

settings.register_profile("any machine", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("any machine")

# A shell starts a command in the background with this signal ignored, and every program that a test starts inherits it.
signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.hookimpl(tryfirst=True)  # before -m chooses by our marker
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if _NEED_JAVA.intersection(getattr(item, "fixturenames", ())):
            item.add_marker("spark")
        if _SHARED.intersection(_scopes(item)):
            item.add_marker(pytest.mark.xdist_group(_file_of(item.nodeid)))


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    """Report a test by the name that one types to run it, without the group that it has for xdist."""
    name, _, group = report.nodeid.rpartition("@")
    if group and group == _file_of(name):
        report.nodeid = name


def _file_of(nodeid: str) -> str:
    return nodeid.partition("::")[0]


def _scopes(item: pytest.Item) -> set[str]:
    """The scopes of what a test is given."""
    assert isinstance(item, pytest.Function)
    return {found.scope for fixtures in item._fixtureinfo.name2fixturedefs.values() for found in fixtures}


@pytest.fixture(scope="session")
def other_users() -> None:
    """Skips a test that needs some, where there can be none."""
    if why := lack():
        pytest.skip(why)
