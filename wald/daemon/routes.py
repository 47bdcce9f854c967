"""The daemon's table of routes: which routes exist, and which users may write to them or retire them."""

from __future__ import annotations

import os
from collections.abc import Collection, Mapping
from dataclasses import dataclass

from wald.errors import InvalidInput
from wald.format.protocol import Code, ProtocolError
from wald.store.files.directory import Root
from wald.store.writing.drafts import Route


@dataclass(frozen=True, slots=True)
class Entry:
    """A writable route; ``writers`` are the user ids that may write, None if every user may."""

    route: Route
    writers: Collection[int] | None


class Routes:
    """Looks a route up by the bytes of its name; it reads the directory only for a name that it has not seen yet."""

    def __init__(self, root: Root, writers: Mapping[str, Collection[int]]) -> None:
        self._root = root
        self._writers = writers
        self._entries: dict[bytes, Entry] = {}

    def find(self, name: bytes, user_id: int) -> Route:
        """The route of this name, for a user who writes to it.

        Raises:
            ProtocolError: no such route, an illegal name, a retired route, or one this user may not write to.
        """
        entry = self._entries.get(name) or self._look_up(name)
        if entry.writers is not None and user_id not in entry.writers:
            raise ProtocolError(Code.DENIED, f"user {user_id} may not write to {entry.route.name}")
        return entry.route

    def is_owner(self, user_id: int) -> bool:
        """Whether a user is the one the daemon runs as, or root."""
        return user_id in (0, os.geteuid())

    def has_writers(self, name: str) -> bool:
        """Whether the settings restrict the users that may write to a route."""
        return name in self._writers

    def lets_write(self, name: str, user_id: int) -> bool:
        """Whether a user may write to a route, retired or not."""
        writers = self._writers.get(name)
        return writers is None or user_id in writers

    def lets_retire(self, name: str, user_id: int) -> bool:
        """Whether a user may retire a route, whose unread records may then be deleted, or take it back."""
        return self.is_owner(user_id) or user_id in self._writers.get(name, ())

    def forget(self, name: str | None = None, *, writers: Mapping[str, Collection[int]] | None = None) -> None:
        """Read the directory again: for one route that changed, or for all of them under new settings."""
        if writers is not None:
            self._writers = writers
        if name is None:
            self._entries.clear()
        else:
            self._entries.pop(name.encode(), None)

    def _look_up(self, name: bytes) -> Entry:
        text = name.decode("utf-8", "replace")
        try:
            found = self._root.has_route(text)
        except InvalidInput as error:
            raise ProtocolError(Code.BAD_ROUTE, error.message) from None
        if not found:
            raise ProtocolError(Code.NO_ROUTE, f"there is no route {text!r}; ROUTE ADD {text} makes it")
        if self._root.retired(text).exists():
            raise ProtocolError(Code.NO_ROUTE, f"the route {text!r} is retired; ROUTE ADD {text} takes it back")
        entry = self._entries[name] = Entry(Route.named(text), self._writers.get(text))
        return entry
