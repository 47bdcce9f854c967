"""``wald-gate``: serve a log over HTTP and manage the clients allowed to use it."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

import wald
from wald.cli.command import Command, examples, run
from wald.cli.options import DefaultGroup, root_option
from wald.errors import InvalidInput

if TYPE_CHECKING:
    from wald.settings import Setting
    from wald_gate.auth.tokens import Client
    from wald_gate.settings import Settings

_FILE = click.Path()


def _tables() -> Iterator[tuple[str, list[Setting]]]:
    from wald.settings import reference
    from wald_gate.settings import GroupSettings, LimitSettings, Settings

    yield "Settings, in the config file; * marks what SIGHUP reloads", reference(Settings)
    yield "In the table [limits]", reference(LimitSettings)
    yield 'In a table [groups."ROUTE/GROUP"]', reference(GroupSettings)


@click.group(
    cls=DefaultGroup,
    alone=True,
    context_settings={"help_option_names": ["-h", "--help"]},
    subcommand_metavar="[OPTION]... | token ...",
)
@click.option("--root", type=click.Path(path_type=Path), help="The directory of the log.  [env: WALD_ROOT]")
@click.version_option(wald.__version__, message="%(prog)s %(version)s")
@click.pass_context
def command(ctx: click.Context, root: Path | None) -> None:
    """Serve a log over HTTP; manage its clients.

    `wald-gate --root DIR` is short for `wald-gate serve --root DIR`; see `wald-gate serve --help`.
    """
    ctx.obj = root


@command.command(
    cls=Command,
    tables=_tables,
    epilog=examples(
        "wald-gate --root /var/lib/wald", "wald-gate --listen 0.0.0.0:7700 --certificate gate.pem --tokens tokens.toml"
    ),
)
@root_option
@click.option("--config", type=click.Path(path_type=Path), help="A TOML file of settings; options override it.")
@click.option("--listen", metavar="HOST:PORT", help="Listen on TCP; '' disables it.  [default: 127.0.0.1:7700]")
@click.option("--uds", type=_FILE, help="Also listen on a unix socket.")
@click.option("--certificate", type=_FILE, help="A PEM file, for TLS. SIGHUP reloads it.")
@click.option("--key", type=_FILE, help="The key of the certificate, if it is in another file.")
@click.option("--client-ca", type=_FILE, help="CA file for client certificates, which replace tokens.")
@click.option("--tokens", type=_FILE, help="The token file: clients and their rights. SIGHUP reloads it.")
@click.option("--host", "hosts", multiple=True, metavar="NAME", help="A host name that clients may use. Repeatable.")
@click.option(
    "--trusted-proxy",
    "trusted_proxies",
    multiple=True,
    metavar="ADDRESS",
    help="A proxy or network whose X-Forwarded-For and X-Forwarded-Proto are trusted. Repeatable.",
)
@click.option("--insecure", is_flag=True, help="Allow other machines to connect without TLS or tokens.")
@click.option("--log-requests", is_flag=True, help="Log every request to stderr, not only failures.")
@click.option("--check", "only_check", is_flag=True, help="Only check the settings and the files that they name.")
def serve(root: Path, config: Path | None, only_check: bool, **options: Any) -> None:
    """Serve a log over HTTP until SIGTERM.

    SIGHUP reloads the certificates, the token file, and the limits and hosts of the config file. If one of them is
    invalid, that is reported, and the previous one remains effective.
    """
    from wald_gate.settings import load

    def settings() -> Settings:
        return load(config, {name: value for name, value in options.items() if value or value == ""})

    try:
        from wald_gate import serving
    except ModuleNotFoundError as error:
        message = f"{(error.name or '').partition('.')[0]}, which it needs, is not installed"
        raise InvalidInput(message, hint="in a clone of wald: pip install '.[gate]'") from error
    if only_check:
        for line in serving.check(root, settings()):
            click.echo(f"wald-gate: {line}", err=True)
        return
    serving.serve(root, settings)


@command.group()
def token() -> None:
    """Manage the clients of the gate in its token file.

    A running gate reloads the file on SIGHUP.
    """


_tokens_option = click.option("--tokens", type=click.Path(path_type=Path), required=True, help="The token file.")


@token.command(
    "add",
    epilog=examples(
        "wald-gate token add shop --tokens tokens.toml --write orders",
        "wald-gate token add billing --tokens tokens.toml --work orders/billing",
    ),
)
@click.argument("name")
@_tokens_option
@click.option(
    "--read",
    multiple=True,
    metavar="ROUTE",
    help="A route that the client may read, or a pattern such as app.*. Repeatable.",
)
@click.option("--write", multiple=True, metavar="ROUTE", help="A route that the client may write to. Repeatable.")
@click.option(
    "--work",
    multiple=True,
    metavar="ROUTE[/GROUP]",
    help="A group that the client may work for and whose cursor it may move; without GROUP: all. Repeatable.",
)
@click.option("--admin", is_flag=True, help="Grant the client all rights.")
@click.option("--user", default="", help="Identify the client as this user on the unix socket.")
@click.option("--certificate", default="", metavar="NAME", help="Identify the client by a certificate with this name.")
def add_token(name: str, tokens: Path, admin: bool, user: str, certificate: str, **patterns: tuple[str, ...]) -> None:
    """Add a client and print its token.

    The token is not stored: the file has only its SHA-256.

    A client that works for a group leases its records, acknowledges them and moves its cursor. wald-reclaim may delete
    records that every group has passed. Without --read, --write, --work and --admin a client may read /metrics, the
    head, and an empty list of routes.

    A new file has mode 0600; an existing one keeps owner, group and mode, so that the gate's user can read it.
    """
    from wald_gate.auth.tokens import Client, add, is_user

    if user and certificate:
        raise InvalidInput("a client has a token, a user or a certificate", hint="--user USER, or --certificate NAME")
    way = "user" if user else "certificate" if certificate else ""
    client = Client(name, patterns["read"], patterns["write"], patterns["work"], admin, way, user or certificate)
    if made := add(tokens, client):
        click.echo(made)
    click.echo(f"wald-gate: {name} may: {_rights(client)}", err=True)
    if user and not is_user(user):
        click.echo(f"wald-gate: there is no user {user!r} on this machine", err=True)
    if "*" in certificate:
        click.echo(
            f"wald-gate: matches only the exact certificate name {certificate!r}: '*' is not a wildcard", err=True
        )
    _remind()


@token.command(
    "list", epilog=examples("wald-gate token list --tokens tokens.toml", "wald gate token list --tokens tokens.toml")
)
@_tokens_option
def list_tokens(tokens: Path) -> None:
    """List the clients and their rights."""
    from wald_gate.auth.tokens import clients_in

    for each in clients_in(tokens):
        way = "token" if each.way == "sha256" else f"{each.way} {each.known_by}"
        click.echo(f"{each.name}: {way}: {_rights(each)}")


@token.command(
    "remove",
    epilog=examples(
        "wald-gate token remove shop --tokens tokens.toml", "wald gate token remove shop --tokens tokens.toml"
    ),
)
@click.argument("name")
@_tokens_option
def remove_token(name: str, tokens: Path) -> None:
    """Remove a client."""
    from wald_gate.auth.tokens import remove

    remove(tokens, name)
    _remind()


def _rights(client: Client) -> str:
    said = ("read", client.reads), ("write", client.writes), ("work", client.works)
    rights = [f"{what} {' '.join(routes)}" for what, routes in said if routes]
    return "; ".join(["admin"] * client.admin + rights) or "no route, only /metrics and the head"


def _remind() -> None:
    click.echo(
        "wald-gate: a running gate reloads the file on SIGHUP: kill -HUP PID, or systemctl reload wald-gate", err=True
    )


def main() -> None:
    sys.exit(run(command, "wald-gate", sys.argv[1:]))
