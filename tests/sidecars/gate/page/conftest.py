"""Fixture: one browser for all tests of a module."""

from collections.abc import Iterator

import pytest
from browsing import Chromium, lack


@pytest.fixture(scope="module")
def chromium() -> Iterator[Chromium]:
    """A running browser; without Chromium the test is skipped, unless CHROMIUM_REQUIRED is set."""
    if why := lack():
        pytest.skip(why)
    with Chromium() as browser:
        yield browser
