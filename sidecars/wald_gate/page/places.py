"""The views that the navigation of the page names, and who sees them there."""

from __future__ import annotations

from dataclasses import dataclass

from wald_gate.rights.clients import Client, Right


@dataclass(frozen=True)
class Place:
    """A view.

    Attributes:
        right: without it, its link is not shown; its row in the table asks for it.
    """

    title: str
    path: str
    right: Right = Right.KNOWN


OVERVIEW = Place("Overview", "/")
ROUTES = Place("Routes", "/routes")
RECORDS = Place("Records", "/records")
HISTORY = Place("History", "/history", Right.ADMIN)
PLACES: tuple[Place, ...] = (OVERVIEW, ROUTES, RECORDS, HISTORY)


def places_of(client: Client) -> list[Place]:
    """The views that a client may see."""
    return [place for place in PLACES if client.may(place.right, None)]
