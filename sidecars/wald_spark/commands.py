"""What the commands on Spark share: options, the lock of the output, what a run leaves for the next one."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click

from wald.errors import Damaged, InvalidInput, Locked, NotFound, Refused
from wald.format.names import check_route
from wald.store.files.disk import Disk
from wald_spark.locations import local_path
from wald_spark.session import LOCAL

if TYPE_CHECKING:
    from wald_spark.progress import Portion

F = TypeVar("F", bound=Callable[..., Any])


def roots_option(function: F) -> F:
    """``--root``, as often as one likes, or WALD_ROOT; the command gets ``roots``, paths or patterns."""
    return click.option(
        "--root",
        "roots",
        multiple=True,
        metavar="DIR",
        callback=_roots,
        help="A log; export and compact also take shipped segments. * ? [ ] match several. Repeatable.  "
        "[env: WALD_ROOT]",
    )(function)


def routes_option(function: F) -> F:
    """``--route``, as often as one likes; the command gets ``routes``, sorted, or None for all."""
    return click.option(
        "--route",
        "routes",
        multiple=True,
        metavar="ROUTE",
        callback=_routes,
        help="Only this route. Repeatable; without it: all.",
    )(function)


def out_option(function: F) -> F:
    """``--out``; the command gets ``out``, an absolute path."""
    return click.option(
        "--out",
        required=True,
        metavar="DIR",
        callback=_out,
        help="Where the files go; on a cluster the same path on every machine.",
    )(function)


def master_option(function: F) -> F:
    """``--master``."""
    return click.option(
        "--master", default=LOCAL, show_default=True, metavar="URL", help="Where Spark runs: spark://HOST:7077, yarn, …"
    )(function)


@contextmanager
def permissive_hint(outcome: str) -> Iterator[None]:
    """Where a hint is one for queries, as options of the data source are, ``--permissive`` is the one for commands.

    Args:
        outcome: what the error leaves behind, in words.
    """
    try:
        yield
    except (Damaged, NotFound) as error:
        if ".option(" not in error.hint:
            raise
        raise type(error)(f"{error.message}; {outcome}", hint="--permissive passes over what cannot be read") from error


def _out(_: click.Context, __: click.Parameter, given: str) -> Path:
    given = local_path(given, hint="--out DIR, which may be a mounted store; then copy the files")
    if os.path.exists(given) and not os.path.isdir(given):
        raise InvalidInput(f"{given}: not a directory", hint="name a directory, existing or not, with --out")
    return Path(os.path.abspath(given))


def _roots(_: click.Context, __: click.Parameter, given: tuple[str, ...]) -> tuple[str, ...]:
    roots = given or tuple(filter(None, [os.environ.get("WALD_ROOT")]))
    if not roots:
        raise InvalidInput("which logs? no root was given", hint="--root DIR, or export WALD_ROOT=DIR")
    return tuple(local_path(root, hint="--root DIR; logs are read where they lie") for root in roots)


def _routes(_: click.Context, __: click.Parameter, given: tuple[str, ...]) -> tuple[str, ...] | None:
    return tuple(sorted({check_route(route) for route in given})) or None


@contextmanager
def alone_in(directory: Path, disk: Disk, program: str) -> Iterator[None]:
    """Hold ``directory/lock``, which says whose it is; the directory is made if it is missing.

    Raises:
        Locked: another process has it.
        Refused: another program's files are there.
    """
    disk.make_directory(directory)
    path = directory / "lock"
    descriptor = disk.open_lock(path)
    try:
        if not disk.lock(descriptor):
            raise Locked(
                f"{directory.parent}: another {program} writes there",
                hint="wait until it has ended, or choose another --out",
            )
        owner = path.read_text().strip()
        if not owner:
            disk.write(descriptor, [f"{program}\n".encode()], 0)
        elif owner != program:
            raise Refused(
                f"{directory.parent}: made by {owner}; {program} needs a place of its own", hint="another --out"
            )
        yield
    finally:
        disk.close(descriptor)


@dataclass(slots=True)
class Held:
    """Of all logs of one run.

    Attributes:
        routes: as JSON has them, a dict for each.
    """

    routes: list[dict[str, str | int]] = field(default_factory=list)

    def add(self, portion: Portion) -> None:
        self.routes += [
            {"root": str(portion.place.root.path), "route": route, "record": last + 1}
            for route, last in sorted(portion.after.held.items())
        ]

    def lines(self) -> Iterator[str]:
        """A line for each route."""
        for each in self.routes:
            yield (
                f"{each['root']}: route {each['route']} waits: record {each['record']} has begun and not ended; "
                "other routes go on"
            )
