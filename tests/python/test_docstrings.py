"""The examples in the docstrings of the public API run unmodified on a log with records, and terminate."""

import ast
import asyncio
import inspect
import logging
import sys
import textwrap
import time
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path
from types import FunctionType

import pytest
from running import Daemon, output_of

import wald
from wald import aio, loop
from wald.logging import WaldHandler

DOCUMENTED = [
    wald.open,
    wald.Log,
    wald.Batch,
    wald.Producer,
    wald.Consumer,
    wald.WorkGroup,
    WaldHandler,
    aio.Producer,
    aio.Consumer,
    aio.WorkGroup,
]
METHODS = [
    method
    for each in DOCUMENTED
    if inspect.isclass(each)
    for name, method in vars(each).items()
    if isinstance(method, FunctionType) and not name.startswith("_") and "Example::" in (method.__doc__ or "")
]
OBJECTS = [*DOCUMENTED, *METHODS, inspect.unwrap(loop.stop_on_signals)]


def example(documented: object) -> str:
    """Return the code of the example in a docstring, changed to stop at the end of the log instead of following it."""
    code = inspect.cleandoc(documented.__doc__ or "").partition("Example::\n\n")[2]
    assert code, "no example"
    return textwrap.dedent(code).replace("follow=True", "follow=False")


@pytest.fixture(scope="module")
def daemon(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Daemon]:
    """A daemon with the routes that the examples name."""
    with Daemon(tmp_path_factory.mktemp("examples") / "log") as running:
        for route in ("orders", "app"):
            output_of("route", "add", route, "--root", running.root)
        yield running


@pytest.fixture
def root(daemon: Daemon) -> Iterator[Path]:
    """A log with more records than an example processes."""
    with wald.Producer(daemon.root) as producer:
        producer.send("orders", [str(number) for number in range(1999)])
    yield daemon.root
    for handler in list(logging.root.handlers):
        if isinstance(handler, WaldHandler):
            logging.root.removeHandler(handler)
            handler.close()


@pytest.mark.parametrize("documented", OBJECTS, ids=lambda documented: documented.__qualname__)
def test_the_example_runs(root: Path, documented: object, capfd: pytest.CaptureFixture[str]) -> None:
    async def handle_soon(record: wald.Record) -> None:
        await asyncio.sleep(0)

    code = compile(
        example(documented).replace("/var/spool/wald", str(root)),
        documented.__qualname__,  # type: ignore[attr-defined]
        "exec",
        flags=ast.PyCF_ALLOW_TOP_LEVEL_AWAIT,
    )
    with wald.open(root) as log, wald.Producer(root) as producer, wald.Consumer(root, "orders") as consumer:
        names = {
            "wald": wald,
            "aio": aio,
            "logging": logging,
            "sys": sys,
            "time": time,
            "datetime": datetime,
            "UTC": UTC,
            "WaldHandler": WaldHandler,
            "stop_on_signals": loop.stop_on_signals,
            "root": root,
            "log": log,
            "producer": producer,
            "consumer": consumer,
            "handle": handle_soon if "await handle" in example(documented) else lambda record: "enough",
        }
        logging.root.handlers, before = [], logging.root.handlers
        try:
            done = eval(code, names)
            if inspect.isawaitable(done):
                asyncio.run(asyncio.wait_for(_of(done), 60))
        finally:
            logging.root.handlers += before


async def _of(awaitable: object) -> None:
    assert inspect.isawaitable(awaitable)
    await awaitable
