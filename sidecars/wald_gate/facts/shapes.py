"""Answers of the verbs that change the log."""

from __future__ import annotations

from msgspec import Struct


class RouteMade(Struct):
    """A route that exists now."""

    route: str


class Cut(Struct):
    """The active segment, and whether the one before it was cut (not, if it has no record yet)."""

    cut: bool
    segment: int
