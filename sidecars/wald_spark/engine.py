"""The entry point by which ``wald-archive`` finds the engine on Spark, which starts when the first bundle is made."""

from __future__ import annotations

from contextlib import ExitStack
from functools import cache
from importlib.util import find_spec

from wald.errors import NotFound
from wald.log import Log
from wald_archive.api import Destination, Engine
from wald_spark.session import find_java, require_java


def is_there() -> bool:
    """Whether PySpark and a Java for it are installed."""
    return all(map(find_spec, ("pyspark", "pyarrow"))) and find_java() is not None


def start(log: Log, destination: Destination, master: str | None, stack: ExitStack) -> Engine:
    """The engine on ``master``, a URL of Spark; None: all cores of this machine. Spark stops when ``stack`` closes.

    Raises:
        NotFound: PySpark or its Java is not installed.
    """
    try:
        from wald_spark.archiving import SparkEngine
        from wald_spark.session import LOCAL, session
    except ImportError as error:
        raise NotFound(
            f"{error}, which --engine spark needs", hint="in a clone of wald: pip install '.[spark]'"
        ) from error
    require_java()
    return SparkEngine(
        log, destination, cache(lambda: stack.enter_context(session("wald-archive", master=master or LOCAL)))
    )
