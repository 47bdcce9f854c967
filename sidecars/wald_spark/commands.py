"""Options shared by the Spark commands. Anything that only a run needs is imported late, so that help is fast."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import click

import wald
from wald.cli.options import json_option
from wald.errors import InvalidInput
from wald.format.names import check_route

F = TypeVar("F", bound=Callable[..., Any])


def _roots(_: click.Context, __: click.Parameter, given: tuple[str, ...]) -> tuple[str, ...]:
    from wald_spark.locations import local_path

    roots = given or tuple(filter(None, [os.environ.get("WALD_ROOT")]))
    if not roots:
        raise InvalidInput("which logs? no root was given", hint="--root DIR, or export WALD_ROOT=DIR")
    return tuple(local_path(root, hint="--root DIR; logs are read in place") for root in roots)


def _out(_: click.Context, __: click.Parameter, given: str) -> Path:
    from wald_spark.locations import local_path

    given = local_path(given, hint="--out DIR, which may be a mounted store; then copy the files")
    if os.path.exists(given) and not os.path.isdir(given):
        raise InvalidInput(f"{given}: not a directory", hint="name a directory, existing or not, with --out")
    return Path(os.path.abspath(given))


def _all(*options: Callable[[F], F]) -> Callable[[F], F]:
    def decorate(function: F) -> F:
        for option in reversed(options):
            function = option(function)
        return function

    return decorate


# The command gets ``roots``: paths or patterns, or WALD_ROOT.
roots_option = click.option(
    "--root",
    "roots",
    multiple=True,
    metavar="DIR",
    callback=_roots,
    help="A log or, except for audit, shipped segments; * ? [ ] are wildcards. Repeatable.  [env: WALD_ROOT]",
)
# It gets ``out``, an absolute path, and ``routes``, sorted, or None for all.
table_options = _all(
    roots_option,
    click.option(
        "--out",
        required=True,
        metavar="DIR",
        callback=_out,
        help="Where the files go; on a cluster the same path on every machine.",
    ),
    click.option(
        "--route",
        "routes",
        multiple=True,
        metavar="ROUTE",
        callback=lambda _context, _option, given: tuple(sorted(map(check_route, set(given)))) or None,
        help="Only this route. Repeatable.  [default: all routes]",
    ),
)
damage_options = _all(
    click.option("--permissive", is_flag=True, help="Skip and report records that are damaged or reclaimed too early."),
    click.option(
        "--partial",
        "is_partial",
        is_flag=True,
        help="Accept a copy without the oldest segments; otherwise that counts as damage.",
    ),
)
spark_options = _all(
    click.option(
        "--master",
        default="local[*]",
        show_default=True,
        metavar="URL",
        help="Where Spark runs: spark://HOST:7077, yarn, …",
    ),
    json_option,
    click.version_option(wald.__version__, message="%(prog)s %(version)s"),
)
