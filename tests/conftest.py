"""What holds for every test: what starts Spark is marked, no machine is too slow, an interrupt ends a program."""

from __future__ import annotations

import signal

import pytest
from hypothesis import HealthCheck, settings
from sharing import ByFixtures
from users import lack
from xdist.remote import Producer

_NEED_JAVA = {"spark", "cluster"}  # the fixtures; who starts Spark in a process of its own is marked by hand

settings.register_profile("any machine", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("any machine")

# A shell starts a command in the background with this signal ignored, and every program that a test starts inherits it.
signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.hookimpl(tryfirst=True)  # before -m chooses by our marker
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if _NEED_JAVA.intersection(getattr(item, "fixturenames", ())):
            item.add_marker("spark")


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Producer) -> ByFixtures | None:
    """With ``--dist loadscope``; the other ways are as xdist has them."""
    return ByFixtures(config, log) if config.getoption("dist") == "loadscope" else None


@pytest.fixture(scope="session")
def other_users() -> None:
    """Skips a test that needs some, where there can be none."""
    if why := lack():
        pytest.skip(why)
