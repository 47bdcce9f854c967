"""``wald-archive``: pack routes into bundles, verify an archive, restore records from one."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import click

import wald
from wald.cli.command import examples, run
from wald.cli.options import (
    DefaultGroup,
    SequenceNumber,
    count_option,
    group_option,
    json_option,
    root_option,
    size_option,
)
from wald.cli.output import ignore_stdout, stdout_is_a_report
from wald.errors import InvalidInput
from wald.format.names import check_route

F = TypeVar("F", bound=Callable[..., Any])
_ROOT = click.Path(path_type=Path, readable=False)


def _ledger_option(function: F) -> F:
    return click.option(
        "--root",
        type=_ROOT,
        help="A log whose ledger lists the expected bundles. An archive needs no log, so WALD_ROOT is not used.",
    )(function)


@click.group(
    cls=DefaultGroup,
    context_settings={"help_option_names": ["-h", "--help"]},
    subcommand_metavar="ROUTE... | COMMAND [ARGS]...",
)
@click.option("--root", type=_ROOT, help="The directory of the log.  [env of pack: WALD_ROOT]")
@click.version_option(wald.__version__, message="%(prog)s %(version)s")
@click.pass_context
def command(ctx: click.Context, root: Path | None) -> None:
    """Pack routes into bundles that tar and sha256sum can check; verify an archive; restore records from it.

    `wald-archive ROUTE...` is short for `wald-archive pack ROUTE...`, see `wald-archive pack --help`.
    """
    ctx.obj = root


@command.command(
    epilog=examples("wald-archive access --dest /srv/archive", "wald-archive pack access orders --codec gz")
)
@click.argument("routes", nargs=-1, required=True, metavar="ROUTE...")
@root_option
@click.option(
    "--dest",
    envvar="ARCHIVE_DEST",
    show_envvar=True,
    metavar="DIR|URL",
    help="Destination of the bags.  [default: ROOT/archive]",
)
@group_option
@count_option("--records-per-bundle", help_text="Number of records in each bundle.")
@size_option("--bytes-per-bundle", None, "Maximum size of the records in a bundle.  [default: 256MiB]")
@click.option(
    "--to", type=SequenceNumber(), metavar="SEQ", help="Last record to pack; later ones are left for another run."
)
@click.option(
    "--engine",
    type=click.Choice(["auto", "local", "spark"]),
    default="auto",
    show_default=True,
    help="Program that makes the bundles, which are the same either way. auto: Spark with --master, or if it and its "
    "Java are installed, there are more than 4 cores, and more than about 8 GiB to pack; otherwise this process.",
)
@click.option("--master", metavar="URL", help="Cluster for Spark.  [default: local[*], this machine]")
@click.option(
    "--codec",
    type=click.Choice(["zst", "gz", "none"]),
    default="zst",
    show_default=True,
    help="Compression of the bundles.",
)
@json_option
@stdout_is_a_report
def pack(root: Path, routes: tuple[str, ...], **settings: Any) -> None:
    """Archive the records that the group has not processed.

    All such records of each ROUTE are packed, then the group's cursor moves. Each run makes a BagIt bag at
    DEST/ROUTE/FIRST-LAST: bundles, each a tar of records with a sha256 file, and a manifest. Everything is read back
    before the cursor moves. An interrupted run is finished first, with its own sizes and codec. Nothing at the
    destination is ever overwritten.
    """
    from wald_archive.pack import pack_routes

    pack_routes(root, routes, **settings, write=click.echo, warn=_warn)


@command.command(
    epilog=examples("wald-archive verify /srv/archive", "wald-archive verify /srv/archive --root /var/lib/wald")
)
@click.argument("destinations", nargs=-1, required=True, metavar="DEST...")
@_ledger_option
@json_option
@click.pass_context
def verify(ctx: click.Context, destinations: tuple[str, ...], root: Path | None, as_json: bool) -> int:
    """Verify every byte at each DEST; change nothing.

    Everything is checked against the manifests. Several DESTs are verified together: a bundle may follow one at another
    DEST. With --root, every bundle that the log's ledger records must be there, too. It prints one line for each
    finding; the exit code is 4 if anything is wrong.
    """
    from wald_archive.verify import report_findings

    return report_findings(destinations, root or ctx.find_object(Path), as_json=as_json, write=click.echo)


@command.command(
    epilog=examples(
        "wald-archive restore /srv/archive access --from 250", "wald-archive restore /srv/archive --into ./restored"
    )
)
@click.argument("address", metavar="DEST")
@click.argument("routes", nargs=-1, metavar="[ROUTE]...")
@_ledger_option
@click.option(
    "--into",
    type=_ROOT,
    metavar="ROOT",
    help="Create a new log at ROOT from the given routes, or from the whole archive.",
)
@click.option("--from", "start", type=SequenceNumber(), metavar="SEQ", help="The first record.")
@click.option("--to", "last", type=SequenceNumber(), metavar="SEQ", help="The last record.")
@click.option(
    "--format",
    "form",
    type=click.Choice(["raw", "json"]),
    default="raw",
    show_default=True,
    help="Format of the records on stdout; json: one object per line.",
)
@click.option("--json", "as_json", is_flag=True, help="With --into: print the result as JSON.")
@click.pass_context
def restore(
    ctx: click.Context,
    address: str,
    routes: tuple[str, ...],
    root: Path | None,
    into: Path | None,
    start: int | None,
    last: int | None,
    form: str,
    as_json: bool,
) -> None:
    """Write archived records to stdout, or create a log from them.

    The records of ROUTE in the archive DEST are written as `wald read` would write them; no log is needed. The digest
    of a bundle is checked before any of its records is written. If the archive does not cover the range from --from to
    --to (without --to: to the last record in the ledger of --root), the records that it has are written, and the exit
    code is 3.

    With --into the records become a new log, with the sequences and times that they had. It has a new id; cursors and
    the senders of records are not in an archive. `wald where N` shows which sequences are in no bundle.
    """
    first = 1 if start is None else start
    if last is not None and first > last:
        message = f"--from {first} --to {last}: the end is before the start"
        raise InvalidInput(message, hint=f"--from {last} --to {first}")
    for route in routes:
        check_route(route)
    if into is None and (len(routes) != 1 or as_json):
        wrong = "--json needs --into" if as_json else "one ROUTE goes to stdout; several, or all, need --into"
        raise InvalidInput(wrong, hint=f"wald-archive restore {shlex.quote(address)} ROUTE, or --into ROOT")
    from wald_archive.restore import restore_to_root, restore_to_stdout

    if into is None:
        ledger = root or ctx.find_object(Path)
        restore_to_stdout(address, routes[0], ledger, start, last, as_json=form == "json")
    else:
        ignore_stdout()
        restore_to_root(address, routes, into, first, last, as_json=as_json, write=click.echo)


def _warn(message: str) -> None:
    click.echo(f"wald-archive: {message}", err=True)


def main() -> None:
    sys.exit(run(command, "wald-archive", sys.argv[1:]))
