"""What ``wald-audit`` says: a row for each log and each archive, all that is wrong in full, and how fast it went."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator
from typing import Any

import click

from wald.cli.output import aligned
from wald.kinds import bytes_in_words
from wald.store.checking.finding import Level
from wald_spark.audit.result import ArchiveReport, Audit, LogReport

_LOGS = ("log", "segments", "records", "raw", "reclaimed", "expired", "bundles", "errors")
_ARCHIVES = ("archive", "bags", "bundles", "stored", "errors")


def tell(audit: Audit, *, as_json: bool) -> None:
    """Everything, at once."""
    if as_json:
        click.echo(json.dumps(_told(audit)))
        return
    for found in audit.found:
        if found.level is Level.ERROR:
            at = f" offset {found.offset}:" if found.offset is not None else ""
            click.echo(f"error  {found.where}:{at} {found.message}")
    for line in _tables(audit):
        click.echo(line)
    counts = Counter(found.level for found in audit.found)
    judged = "damaged" if audit.errors else "good"
    click.echo(
        f"{judged}: {counts[Level.INFO]} info, {counts[Level.ERROR]} error; "
        f"{bytes_in_words(audit.raw_bytes)} in {audit.seconds:.1f} s, {audit.megabytes_per_second:.0f} MB/s"
    )


def _tables(audit: Audit) -> Iterator[str]:
    rows = [
        (
            log.root,
            *map(str, (log.segments, log.records)),
            bytes_in_words(log.raw_bytes),
            *map(str, (log.reclaimed, log.expired, log.bundles, log.errors)),
        )
        for log in audit.logs
    ]
    yield from aligned([_LOGS, *rows], range(1, len(_LOGS)))
    if audit.archives:
        yield ""
        places = [
            (each.place, str(each.bags), str(each.bundles), bytes_in_words(each.stored_bytes), str(each.errors))
            for each in audit.archives
        ]
        yield from aligned([_ARCHIVES, *places], range(1, len(_ARCHIVES)))


def _told(audit: Audit) -> dict[str, Any]:  # Any: it is JSON
    return {
        "logs": [_log(log) for log in audit.logs],
        "archives": [_archive(archive) for archive in audit.archives],
        "found": [
            {"level": found.level.value, "where": found.where, "offset": found.offset, "message": found.message}
            for found in audit.found
        ],
        "errors": audit.errors,
        "raw_bytes": audit.raw_bytes,
        "seconds": round(audit.seconds, 3),
        "megabytes_per_second": round(audit.megabytes_per_second, 1),
    }


def _log(log: LogReport) -> dict[str, Any]:
    return {
        "root": log.root,
        "segments": log.segments,
        "records": log.records,
        "raw_bytes": log.raw_bytes,
        "reclaimed": log.reclaimed,
        "expired": log.expired,
        "bundles": log.bundles,
        "errors": log.errors,
    }


def _archive(archive: ArchiveReport) -> dict[str, Any]:
    return {
        "place": archive.place,
        "bags": archive.bags,
        "bundles": archive.bundles,
        "bytes": archive.stored_bytes,
        "errors": archive.errors,
    }
