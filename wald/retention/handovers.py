"""Pins of unfinished handovers (docs/format.md, "The pin of a handover").

A handover copies records to a dead-letter route, or back. After a crash, the retry looks for these copies, so until
then ``routes/R/cursors/G.pin`` pins their routes, as a cursor would.

A pin by another user counts only with a valid cursor by the same user. If pins cannot be read, all routes count as
pinned.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from wald.errors import Damaged
from wald.files.cursor_directory import file_owner, is_own_file, make_cursor_directory, not_permitted
from wald.files.disk import Disk
from wald.files.layout import Root, scan_cursor_directory
from wald.files.safe_open import read_start
from wald.format.head import CURSOR_MAX_BYTES, BadCursor, decode_cursor
from wald.format.ledger_lines import decode_line, encode_line
from wald.format.names import CURSORS, PIN_SUFFIX, SEQUENCE_MAX, cursor_name, is_route
from wald.retention.cursors import read_with_status

Part = Literal["drain", "work"]
Parts = dict[Part, dict[str, int]]
_VERSION = 1
_MODE = 0o644  # as for cursors
PIN_MAX_BYTES = 4096
ROUTES_MAX = 12  # of one part; two parts with the longest names fit into a file


class BadPin(ValueError):
    """Bytes that are not a pin of this log."""


@dataclass(frozen=True, slots=True)
class HandoverPin:
    """Pin of one group."""

    route: str
    group: str
    path: Path  # the cursor directory if that is unreadable
    positions: Mapping[str, int] = field(default_factory=dict)  # last unpinned record by route
    problem: str = ""

    @property
    def message(self) -> str:
        if self.problem:
            return f"{self.path}: {self.problem}; it pins {'all routes' if self.positions else 'nothing'}"
        return f"group {self.group} of route {self.route} has not finished a handover; its next start finishes it"


class PinWriter:
    """Writer of one part of a group's pin, for the process that owns the group. The other part is kept."""

    def __init__(self, root: Root, disk: Disk, route: str, group: str, log_id: bytes, part: Part) -> None:
        self._root, self._disk, self._route, self._log_id = root, disk, route, log_id
        self._path = root.cursor_directory(route) / f"{group}{PIN_SUFFIX}"
        self._part: Part = part

    def pin(self, positions: Mapping[str, int]) -> None:
        """Durably pin up to :data:`ROUTES_MAX` routes after their positions."""
        data = encode_pin(self._log_id, self._parts() | {self._part: dict(positions)})
        make_cursor_directory(self._root, self._disk, self._route)
        try:
            self._disk.replace(self._path, data, mode=_MODE)
        except PermissionError as error:
            raise not_permitted(self._root, self._route, self._path, error) from error

    def unpin(self) -> None:
        """Remove the pin without a sync. If it reappears after a power cut, the group's next owner removes it."""
        if not os.path.lexists(self._path):
            return
        parts = self._parts()
        if any(positions for part, positions in parts.items() if part != self._part):
            self.pin({})
        else:
            self._disk.unlink(self._path)

    def _parts(self) -> Parts:
        try:
            if not is_own_file(self._path):
                return {}
            return decode_pin(read_start(self._path, PIN_MAX_BYTES + 1), self._log_id)
        except (OSError, Damaged, BadPin):  # an invalid pin pins nothing
            return {}


def encode_pin(log_id: bytes, parts: Parts) -> bytes:
    return encode_line({"pin": _VERSION, "log": log_id.hex(), "drain": {}, "work": {}} | parts)


def decode_pin(data: bytes, log_id: bytes) -> Parts:
    if len(data) > PIN_MAX_BYTES:
        raise BadPin("too large for a pin")
    match decode_line(data):
        case {"pin": 1, "log": str(log), "drain": dict(drain), "work": dict(work)}:
            if log != log_id.hex():
                raise BadPin("belongs to another log")
            positions = [*drain.items(), *work.items()]
            if all(is_route(route) and type(at) is int and 0 <= at <= SEQUENCE_MAX for route, at in positions):
                return {"drain": drain, "work": work}
    raise BadPin("not a pin, or its checksum does not match")


def handover_pins(root: Root, log_id: bytes) -> list[HandoverPin]:
    """Return all pins. The contents of files never raise an error."""
    routes = root.route_names()
    all_routes = dict.fromkeys(routes, 0)
    pins: list[HandoverPin] = []
    for route in routes:
        directory = root.cursor_directory(route)
        try:
            owner = directory.stat().st_uid
            names = sorted(each.name for each in scan_cursor_directory(directory, PIN_SUFFIX))
        except (FileNotFoundError, NotADirectoryError):
            continue
        except OSError as error:
            pins.append(HandoverPin(route, CURSORS, directory, all_routes, error.strerror or str(error)))
            continue
        for name in names:
            path, group = directory / name, name.removesuffix(PIN_SUFFIX)
            try:
                pins.append(_read_pin(route, group, path, log_id, owner))
            except OSError as error:  # it may be a valid pin
                pins.append(HandoverPin(route, group, path, all_routes, error.strerror or str(error)))
    return [each for each in pins if each.positions or each.problem]


def _read_pin(route: str, group: str, path: Path, log_id: bytes, owner: int) -> HandoverPin:
    positions: dict[str, int] = {}
    try:
        if not is_route(group):
            raise BadPin("no group can have this name")
        content, status = read_with_status(path, PIN_MAX_BYTES + 1)
        for part in decode_pin(content, log_id).values():
            for target, at in part.items():
                positions[target] = min(at, positions.get(target, at))
        if status.st_uid not in (0, owner):
            _require_own_cursor(path.with_name(cursor_name(group)), log_id, status)
        return HandoverPin(route, group, path, positions)
    except FileNotFoundError:  # the handover has just finished
        return HandoverPin(route, group, path)
    except Damaged:
        problem = "not a regular file"
    except PermissionError:
        if file_owner(path) in (None, owner):
            raise
        problem = "permission denied"
    except BadPin as error:
        problem = str(error)
    return HandoverPin(route, group, path, problem=problem)


def _require_own_cursor(path: Path, log_id: bytes, pin: os.stat_result) -> None:
    try:
        content, cursor = read_with_status(path, CURSOR_MAX_BYTES + 1)
        lines = decode_cursor(content)
    except (FileNotFoundError, PermissionError, Damaged, BadCursor):
        raise BadPin(f"{path.name} is missing or not a valid cursor") from None
    if max(pin.st_nlink, cursor.st_nlink) > 1 or lines.log_id not in (None, log_id):
        raise BadPin(f"{path.name} is not a valid cursor, or one of the two files has another hard link")
    if pin.st_uid != cursor.st_uid:
        raise BadPin(f"{path.name} and this file belong to different users")
