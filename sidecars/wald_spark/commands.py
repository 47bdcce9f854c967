"""Options, output lock and run report that the commands on Spark share."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click

from wald.cli.output import progress
from wald.errors import Damaged, InvalidInput, Locked, NotFound, Refused
from wald.files.disk import Disk
from wald.format.names import check_route
from wald_spark.damage import PARTIAL_HINT, PARTIAL_OPTION
from wald_spark.locations import local_path
from wald_spark.session import LOCAL

if TYPE_CHECKING:
    from wald_spark.progress import NewRecords

F = TypeVar("F", bound=Callable[..., Any])


def roots_option(function: F) -> F:
    """``--root``, repeatable, or WALD_ROOT; the command gets ``roots``, paths or patterns."""
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
    """``--route``, repeatable; the command gets ``routes``, sorted, or None for all."""
    return click.option(
        "--route",
        "routes",
        multiple=True,
        metavar="ROUTE",
        callback=_routes,
        help="Only this route. Repeatable; without it: all.",
    )(function)


def partial_option(function: F) -> F:
    """``--partial``; the command gets ``is_partial``."""
    return click.option(
        "--partial",
        "is_partial",
        is_flag=True,
        help="Allow a copy without the oldest segments, which is damage otherwise; begin with its oldest record.",
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
    """Replace a hint about an option of the data source by one about ``--permissive``.

    Args:
        outcome: state after the error; part of the message.
    """
    try:
        yield
    except (Damaged, NotFound) as error:
        if ".option(" not in error.hint:
            raise
        hint = "--permissive skips unreadable records"
        if error.hint.startswith(PARTIAL_HINT):
            hint = f"{PARTIAL_HINT.replace(PARTIAL_OPTION, '--partial')}; {hint}"
        raise type(error)(f"{error.message}; {outcome}", hint=hint) from error


def _out(_: click.Context, __: click.Parameter, given: str) -> Path:
    given = local_path(given, hint="--out DIR, which may be a mounted store; then copy the files")
    if os.path.exists(given) and not os.path.isdir(given):
        raise InvalidInput(f"{given}: not a directory", hint="name a directory, existing or not, with --out")
    return Path(os.path.abspath(given))


def _roots(_: click.Context, __: click.Parameter, given: tuple[str, ...]) -> tuple[str, ...]:
    roots = given or tuple(filter(None, [os.environ.get("WALD_ROOT")]))
    if not roots:
        raise InvalidInput("which logs? no root was given", hint="--root DIR, or export WALD_ROOT=DIR")
    return tuple(local_path(root, hint="--root DIR; logs are read in place") for root in roots)


def _routes(_: click.Context, __: click.Parameter, given: tuple[str, ...]) -> tuple[str, ...] | None:
    return tuple(sorted({check_route(route) for route in given})) or None


@contextmanager
def locked_by(program: str, directory: Path, disk: Disk) -> Iterator[None]:
    """Lock ``directory/lock``, which names the owning program; create the directory if it is missing."""
    disk.make_directory(directory)
    path = directory / "lock"
    descriptor = disk.open_lock(path)
    try:
        locked = disk.lock(descriptor)
        owner = path.read_text().strip()
        if owner not in ("", program):
            raise Refused(
                f"{directory.parent}: created by {owner}; {program} needs a separate directory", hint="another --out"
            )
        if not locked:
            raise Locked(
                f"{directory.parent}: another {program} writes there",
                hint="wait until it has ended, or choose another --out",
            )
        if not owner:
            disk.write(descriptor, [f"{program}\n".encode()], 0)
        yield
    finally:
        disk.close(descriptor)


@dataclass(slots=True)
class RunReport:
    """Report of a run in addition to its result: progress, and routes left for the next run.

    Attributes:
        held_back: a JSON object for each route with an unfinished record.
    """

    as_json: bool
    held_back: list[dict[str, str | int]] = field(default_factory=list)
    _began: float = field(default_factory=time.monotonic)
    _bar: ExitStack = field(default_factory=ExitStack)
    _advance: Callable[[int], None] = field(default=lambda _: None)

    @property
    def seconds(self) -> float:
        """Duration of the run so far."""
        return time.monotonic() - self._began

    def add_held_back(self, new: NewRecords) -> None:
        self.held_back += [
            {"root": str(new.location.root.path), "route": route, "sequence": last + 1}
            for route, last in sorted(new.after.held_back.items())
        ]

    def begin(self, label: str, raw_bytes: int) -> None:
        """Show a progress bar."""
        self._advance = self._bar.enter_context(progress(label, raw_bytes))

    def advance(self, raw_bytes: int) -> None:
        self._advance(raw_bytes)

    def close(self) -> None:
        """Remove the progress bar."""
        self._bar.close()

    def lines(self) -> Iterator[str]:
        """Yield a line for each route that an unfinished record delays."""
        for each in self.held_back:
            yield (
                f"{each['root']}: route {each['route']} waits: record {each['sequence']} has begun but not ended; "
                "other routes continue"
            )
