"""Look-up of one archived record by its sequence, for the entry point that ``wald show`` calls."""

from __future__ import annotations

from wald.errors import Damaged
from wald.files.disk import Disk
from wald.format.records import Record, record_from_json
from wald_archive.objects import Destination, open_destination
from wald_archive.parts import Form, IndexEntry, Part
from wald_archive.restore import bundles_of, checked_parts


def find_record(address: str, route: str | None, sequence: int) -> Record | None:
    """Return a record from the archive at ``address``, or None.

    Args:
        route: its route; None to search every route.
    """
    destination = open_destination(address, Disk())
    routes = [route] if route is not None else destination.listing("").folders
    found = (_in_route(destination, name, sequence) for name in routes)
    return next((record for record in found if record is not None), None)


def _in_route(destination: Destination, route: str, sequence: int) -> Record | None:
    for manifest, entry in bundles_of(destination, route):
        contents = entry.bundle.contents
        holds = any(part.first <= sequence <= part.last for part in contents.parts)
        if not holds:
            continue
        for part in checked_parts(destination, manifest.bag, manifest.codec, entry.bundle):
            run = next((run for run in part.runs if run.first <= sequence <= run.last), None)
            if run is not None:
                return _record(route, part, run, sequence)
    return None


def _record(route: str, part: Part, run: IndexEntry, sequence: int) -> Record:
    data = bytes(part.data[0][run.offset : run.offset + run.bytes])
    line = data.split(b"\n")[sequence - run.first]
    if part.form is Form.LINES:
        return Record(route, sequence, line, run.append_time_ns, terminated=run.terminated or sequence < run.last)
    try:
        return record_from_json(line)
    except ValueError as error:
        raise Damaged(f"{part.name}: record {sequence}: {error}", hint="wald-archive verify DEST") from error
