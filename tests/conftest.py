"""What holds for every test: whatever starts Spark is marked."""

from __future__ import annotations

import pytest

_NEED_JAVA = {"spark", "cluster"}  # the fixtures; who starts Spark in a process of its own is marked by hand


@pytest.hookimpl(tryfirst=True)  # before -m chooses by our marker
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if _NEED_JAVA.intersection(getattr(item, "fixturenames", ())):
            item.add_marker("spark")
