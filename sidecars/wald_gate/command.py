"""``wald-gate``: serves a log over HTTP."""

from __future__ import annotations

import logging
import os
import sys
from pathlib import Path

import click

import wald
from wald.cli.entry import run
from wald.cli.options import root_option
from wald.errors import InvalidInput
from wald.systemd import Systemd


@click.command(context_settings={"help_option_names": ["-h", "--help"]})
@root_option
@click.option("--listen", default="127.0.0.1:7700", show_default=True, metavar="HOST:PORT", help="'' for no TCP.")
@click.option("--uds", type=click.Path(path_type=Path), help="Listen on a unix socket, too.")
@click.option("--certificate", type=click.Path(path_type=Path), help="For TLS: a file in PEM. SIGHUP reads it again.")
@click.option("--key", type=click.Path(path_type=Path), help="Its key, if it is in another file.")
@click.option("--authorities", type=click.Path(path_type=Path), help="Each client must show a certificate of these.")
@click.option("--tokens", type=click.Path(path_type=Path), help="Who may what. SIGHUP reads it again.")
@click.option("--insecure", is_flag=True, help="Listen for other machines without TLS or tokens all the same.")
@click.option("--log-requests", is_flag=True, help="A line about each request on stderr, and not of failures only.")
@click.version_option(wald.__version__, message="%(prog)s %(version)s")
def command(
    root: Path,
    listen: str,
    uds: Path | None,
    certificate: Path | None,
    key: Path | None,
    authorities: Path | None,
    tokens: Path | None,
    insecure: bool,
    log_requests: bool,
) -> None:
    """Serve a log over HTTP until SIGTERM."""
    try:
        from wald_gate import serving
        from wald_gate.transport.server import Listening
    except ModuleNotFoundError as error:
        raise InvalidInput(
            f"{(error.name or '').partition('.')[0]}, which it needs, is not installed",
            hint="in a clone of wald: pip install '.[gate]'",
        ) from error
    systemd = Systemd(os.environ)
    listening = Listening(*_address(listen), uds, certificate, key, authorities, systemd.take_sockets())
    listening.require_safe(has_tokens=tokens is not None, insecure=insecure)
    logging.basicConfig(format="%(message)s", level=logging.INFO)
    serving.serve(root, listening, tokens, systemd, log_requests=log_requests)


def main() -> None:
    """The console script."""
    sys.exit(run(command, "wald-gate", sys.argv[1:]))


def _address(given: str) -> tuple[str, int]:
    if not given:
        return "", 0
    host, colon, port = given.rpartition(":")
    if not (colon and port.isascii() and port.isdecimal() and int(port) < 1 << 16):
        raise InvalidInput(f"--listen {given}: is not HOST:PORT", hint="--listen 127.0.0.1:7700")
    return host.removeprefix("[").removesuffix("]") or "0.0.0.0", int(port)  # noqa: S104 - --insecure is asked for
