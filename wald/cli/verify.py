"""``wald verify``: check every byte of the log, and change nothing."""

from __future__ import annotations

import time
from collections import Counter
from contextlib import closing, nullcontext
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING

import click

from wald.cli.command import examples
from wald.cli.options import json_option, root_option
from wald.cli.output import json_line
from wald.errors import Damaged
from wald.files.disk import Disk
from wald.files.identity import read_identity
from wald.files.layout import Root
from wald.format.names import VERIFY_LEDGER

if TYPE_CHECKING:
    from wald.checking.checker import Level
    from wald.checking.verifier import Verification
    from wald.files.ledger_write import Ledger


@click.command(epilog=examples("wald verify", "wald verify --record"))
@root_option
@click.option("--record", is_flag=True, help="Write the result into ledger/verify.jsonl, from which metrics have it.")
@json_option
def verify(root: Path, record: bool, as_json: bool) -> int:
    """Read every byte of the log, check it against its checksums, digests and neighbours, and change nothing.

    Print one line for each file and each finding; the exit code is 4 if there is an error. A daemon may be running.
    """
    from wald.checking.checker import Level

    here = Root(root)
    log_id = read_identity(here).log_id
    with _ledger(here) if record else nullcontext() as ledger:
        counts = _report(here, root, log_id, as_json=as_json)
        if ledger is not None:
            errors = counts[Level.ERROR]
            ledger.cut()
            ledger.append({"event": "verified", "ok": counts[Level.OK], "errors": errors, "at": time.time_ns()})
    return Damaged.exit_code if counts[Level.ERROR] else 0


def _ledger(root: Root) -> closing[Ledger]:
    """Open the ledger of verifications, which one process at a time can write."""
    from wald.files.ledger_write import Ledger

    return closing(Ledger(root.ledger / VERIFY_LEDGER, Disk(), owner="verification with --record"))


def _report(here: Root, root: Path, log_id: bytes, *, as_json: bool) -> Counter[Level]:
    """Print every finding; return the number of each level."""
    from wald.checking.checker import Level
    from wald.checking.verifier import Verification
    from wald.work.snapshot import check_journals

    counts: Counter[Level] = Counter()
    began = time.monotonic()
    verification = Verification(here)
    journals = (finding for _, finding in check_journals(here, log_id))
    for finding in chain(verification.findings(), journals):
        counts[finding.level] += 1
        if as_json:
            fields = {"kind": "finding", "level": finding.level.value, "path": str(finding.path)}
            click.echo(json_line("verify", fields | {"offset": finding.offset, "message": finding.message}))
        else:
            place = finding.path.relative_to(root) if finding.path.is_relative_to(root) else finding.path
            at = f" offset {finding.offset}:" if finding.level is Level.ERROR else ""
            click.echo(f"{finding.level.value:5}  {place}:{at} {finding.message}")
    errors = counts[Level.ERROR]
    if as_json:
        click.echo(json_line("verify", _summary(verification, counts, time.monotonic() - began)))
    else:
        verdict, plural = "damaged" if errors else "OK", "s" * (errors != 1)
        click.echo(f"{verdict}: {counts[Level.OK]} ok, {counts[Level.INFO]} info, {errors} error{plural}")
    return counts


def _summary(verification: Verification, counts: Counter[Level], seconds: float) -> dict[str, object]:
    from wald.checking.checker import Level

    return {
        "kind": "summary",
        "good": not counts[Level.ERROR],
        "segments": verification.segments,
        "records": verification.records,
        "raw_bytes": verification.raw_bytes,
        "findings": {level.value: counts[level] for level in Level},
        "seconds": round(seconds, 3),
    }
