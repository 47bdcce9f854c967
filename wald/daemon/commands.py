"""Socket commands (every request but PUB), and the table of routes with their permissions.

All users may add routes, and write to those without configured writers. The log's owners are root and the daemon's
user.
"""

from __future__ import annotations

import json
import os
import re
import time
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass

from wald.daemon.committer import Committer
from wald.daemon.intake import Intake
from wald.errors import Damaged, InvalidInput, NotFound, NotPermitted
from wald.files.cursor_directory import is_cursor_group
from wald.files.disk import Disk
from wald.files.layout import Root
from wald.files.routes import OWNERS_FIFO_MODE, add_route, has_fifo, retire_route
from wald.files.uptime import ClockStep
from wald.format.head import encode_head
from wald.format.protocol import Code, Command, ProtocolError, encode_err, encode_ok
from wald.format.times import utc
from wald.segments.durable_end import seconds_ahead
from wald.writing.writer import Route, Writer


class Routes:
    """Cache of the routes by name."""

    def __init__(self, root: Root, writers: Mapping[str, Collection[int]]) -> None:
        self.writers = writers  # user ids by route; all users may write to other routes
        self._root = root
        self._entries: dict[bytes, tuple[Route, Collection[int] | None]] = {}

    def find(self, name: bytes, user_id: int) -> Route:
        """Return the route; raise ProtocolError if it is missing or retired, or the user may not write to it."""
        route, writers = self._entries.get(name) or self._load(name)
        if writers is not None and user_id not in writers:
            raise _denied(user_id, f"write to route {route.name}")
        return route

    def forget(self) -> None:
        """Clear the cache after a change of routes or writers."""
        self._entries.clear()

    def _load(self, name: bytes) -> tuple[Route, Collection[int] | None]:
        text = name.decode("utf-8", "replace")
        try:
            exists = self._root.has_route(text)
        except InvalidInput as error:
            raise ProtocolError(Code.BAD_ROUTE, error.message) from None
        if not exists:
            raise ProtocolError(Code.NO_ROUTE, f"there is no route {text!r}; ROUTE ADD {text} creates it")
        if self._root.retired(text).exists():
            raise ProtocolError(Code.NO_ROUTE, f"route {text!r} is retired; ROUTE ADD {text} reactivates it")
        entry = self._entries[name] = Route.named(text), self.writers.get(text)
        return entry


_USAGE = (
    "PING | HEAD | STAT | CUT | CLOCK STEP | ROUTE ADD <name> [fifo] [mode=<octal>] [consumers=<group>] | "
    "ROUTE RETIRE <name>"
)

_MODE = re.compile("mode=([0-7]+)")
_CONSUMERS = "consumers="
_OWNER_ONLY = "only the log's owner"
_CUT_SECONDS = 1.0  # between cuts, each of which costs syncs, a file and a ledger line


@dataclass(slots=True, eq=False)
class Commands:
    """Executor of socket commands; ``_status`` returns the reply to STAT."""

    _root: Root
    _disk: Disk
    _writer: Writer
    _committer: Committer
    _intake: Intake
    _routes: Routes
    _status: Callable[[], dict[str, object]]
    _next_cut_at: float = 0.0  # for users other than the owner

    def execute(self, command: Command, user_id: int) -> bytes:
        try:
            match command.verb, command.arguments:
                case "PING", ():
                    return encode_ok("pong")
                case "HEAD", ():
                    return encode_ok(encode_head(self._committer.head).decode().strip())
                case "STAT", ():
                    return encode_ok(json.dumps(self._status()))
                case "CUT", ():
                    return self._cut(user_id)
                case "CLOCK", ("STEP",):
                    return self._step_clock(user_id)
                case "ROUTE", ("ADD", str(name), *options):
                    return self._add_route(name, options, user_id)
                case "ROUTE", ("RETIRE", str(name)):
                    return self._retire_route(name, user_id)
        except ProtocolError as error:
            return encode_err(error.code, error.message)
        except InvalidInput as error:
            return encode_err(Code.BAD_ROUTE, error.message)
        except NotFound as error:
            return encode_err(Code.NO_ROUTE, error.message)
        except NotPermitted as error:
            return encode_err(Code.DENIED, error.message)
        except (Damaged, OSError) as error:
            return encode_err(Code.FAILED, str(error))
        return encode_err(Code.BAD_REQUEST, _USAGE)

    def make_route(self, name: str, *, fifo: bool, mode: int | None, consumers: str | None) -> None:
        """Create or reactivate a route, and read its FIFO if it has one."""
        add_route(self._root, self._disk, name, fifo=fifo, mode=mode, consumers=consumers)
        if has_fifo(self._root, name):
            self._intake.add(name)
        self._routes.forget()

    def _cut(self, user_id: int) -> bytes:
        if not self._writer.has_advanced:
            return encode_ok(f"nothing-to-cut {self._writer.base_sequence}")
        now = time.monotonic()
        if not _is_owner(user_id):
            if now < self._next_cut_at:
                message = f"the log was cut less than {_CUT_SECONDS:g} s ago; retry later, or as the log's owner"
                return encode_err(Code.BUSY, message)
            self._next_cut_at = now + _CUT_SECONDS
        if not self._committer.cut():
            return encode_err(Code.FULL, "the disk lacks room for the next segment; the current segment stays active")
        return encode_ok(f"cut {self._writer.base_sequence}")

    def _step_clock(self, user_id: int) -> bytes:
        if not _is_owner(user_id):
            raise _denied(user_id, f"step the clock; {_OWNER_ONLY} may do so")
        state, now_ns = self._writer.state, time.time_ns()
        if not seconds_ahead(state.append_time_ns, now_ns):
            return encode_ok(f"nothing-to-step {state.next_sequence}")
        if not self._committer.step_clock(ClockStep(state.next_sequence, state.append_time_ns, now_ns)):
            return encode_err(Code.BUSY, "a long line is unfinished, or the disk lacks room for the next segment")
        return encode_ok(f"stepped {state.next_sequence}")

    def _add_route(self, name: str, options: list[str], user_id: int) -> bytes:
        fifo, mode, consumers = False, None, None
        for option in options:
            if option == "fifo":
                fifo = True
            elif match := _MODE.fullmatch(option):
                mode = int(match[1], 8) & 0o777
            elif option.startswith(_CONSUMERS) and is_cursor_group(option.removeprefix(_CONSUMERS)):
                consumers = option.removeprefix(_CONSUMERS)
            else:
                message = f"unknown option {option!r}; the options are fifo, mode=<octal> and consumers=<group id>"
                return encode_err(Code.BAD_REQUEST, message)
        writers = self._routes.writers.get(name)
        if self._root.retired(name).exists():
            self._require_retire_permission(name, user_id, f"reactivate route {name}")
        if not _is_owner(user_id):
            if mode is not None:
                raise _denied(user_id, f"set the mode of a FIFO; {_OWNER_ONLY} may do so")
            if consumers is not None:
                raise _denied(user_id, f"set consumers; {_OWNER_ONLY} may do so")
            if writers is not None and (fifo or user_id not in writers):
                raise _denied(user_id, f"change route {name}; only its configured writers may do so")
        if fifo and writers is not None:
            mode = OWNERS_FIFO_MODE if mode is None else mode
            if mode & ~OWNERS_FIFO_MODE:
                limit = f"the mode of its FIFO must not exceed {OWNERS_FIFO_MODE:o}, or other users could write to it"
                return encode_err(Code.DENIED, f"route {name} has configured writers: {limit}")
        self.make_route(name, fifo=fifo, mode=mode, consumers=consumers)
        return encode_ok(f"added {name}")

    def _retire_route(self, name: str, user_id: int) -> bytes:
        self._require_retire_permission(name, user_id, f"retire route {name}")
        retire_route(self._root, self._disk, name, now=utc(time.time_ns(), 3))
        self._routes.forget()
        self._intake.close_route(name)
        return encode_ok(f"retired {name}")

    def _require_retire_permission(self, name: str, user_id: int, action: str) -> None:
        """Raise ProtocolError unless the user may retire the route, which lets its unread records be deleted."""
        if not _is_owner(user_id) and user_id not in self._routes.writers.get(name, ()):
            raise _denied(user_id, f"{action}; {_OWNER_ONLY} and the route's writers may do so")


def _is_owner(user_id: int) -> bool:
    return user_id in (0, os.geteuid())


def _denied(user_id: int, action: str) -> ProtocolError:
    return ProtocolError(Code.DENIED, f"user {user_id} may not {action}")
