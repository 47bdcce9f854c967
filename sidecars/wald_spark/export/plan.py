"""What a run has to do, and whether it goes with what earlier ones have done."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from wald.errors import Refused
from wald_spark.damage import Tolerance
from wald_spark.export.book import Exported, Shape
from wald_spark.locations import LogPlace
from wald_spark.progress import Chunk, Portion, since


@dataclass(frozen=True, slots=True)
class Due:
    """What is to be exported of one log, and what has been told of it before."""

    portion: Portion
    before: Exported

    def chunks(self, *, file_bytes: int, cores: int) -> list[Chunk]:
        """In chunks that make files of about ``file_bytes``, and that keep all cores at work.

        With many routes in the log a chunk has to be the larger, for it makes a file of each.
        """
        routes = self.before.shape.routes or self.portion.place.root.route_names()
        fair = self.portion.raw_bytes // (2 * cores)
        return self.portion.chunks(min(file_bytes * max(1, len(routes)), max(fair, file_bytes)))


def look(places: Sequence[LogPlace], entries: Mapping[str, Exported], shape: Shape, tolerance: Tolerance) -> list[Due]:
    """What has come of each log, which may be nothing.

    Raises:
        Damaged, NotFound: as :func:`wald_spark.progress.since` does.
    """
    found = []
    for place in places:
        before = entries.get(place.log)
        portion = since(place, before.reached if before else None, shape.routes, tolerance)
        begun = portion.before.last
        found.append(Due(portion, before or Exported(place.log, shape, begun + 1, begun)))
    return found


def settled(shape: Shape, entries: Mapping[str, Exported], places: Sequence[LogPlace]) -> Shape:
    """``shape``, with the types that were found out before for its names.

    Raises:
        Refused: the files that are there are of another shape.
    """
    logs = {place.log for place in places}
    for log, entry in entries.items():
        other = entry.shape
        alike = other.names == shape.names if shape.names else (other.names, other.json) == ((), shape.json)
        if not alike or (log in logs and other.routes != shape.routes):
            raise Refused(
                f"log {log} was exported there with {other.in_words()}, not with {shape.in_words()}",
                hint="the same options again, or another --out",
            )
    known = next((entry.shape.json for entry in entries.values() if entry.shape.json), "")
    return Shape(shape.routes, shape.names, known if shape.names else shape.json)
