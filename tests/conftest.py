"""What holds for every test: those of one file run in one process, and all of Spark in one, with one session."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from xdist.remote import Producer
    from xdist.scheduler import LoadFileScheduling

_SPARK = Path(__file__).parent / "sidecars" / "spark"
_NEED_JAVA = {"spark", "cluster"}  # the fixtures; who starts Spark in a process of its own is marked by hand
_OWN_JVM = {"cluster"}


@pytest.hookimpl(tryfirst=True)  # before -m chooses by our marker
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """The tests of Spark come first: where there are several processes, the longest work has to start at once."""
    items.sort(key=lambda item: _SPARK not in item.path.parents)
    for item in items:
        if _NEED_JAVA.intersection(getattr(item, "fixturenames", ())):
            item.add_marker("spark")
        if _OWN_JVM.intersection(getattr(item, "fixturenames", ())):
            item.add_marker("own_jvm")


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Producer) -> LoadFileScheduling | None:
    """``--dist loadfile``, but for Spark; ``loadgroup`` would be the way, but with pytest 9.2 it groups nothing."""
    if config.getvalue("dist") != "loadfile":
        return None
    from xdist.scheduler import LoadFileScheduling

    spark = _SPARK.relative_to(config.rootpath).as_posix()

    class OneSession(LoadFileScheduling):  # type: ignore[misc]  # it has no types
        def _split_scope(self, nodeid: str) -> str:
            return spark if nodeid.startswith(f"{spark}/") else str(super()._split_scope(nodeid))

    return OneSession(config, log)
