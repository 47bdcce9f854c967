"""A file of settings in TOML: read, with the line of each setting, and errors that name it and what was meant."""

from __future__ import annotations

import difflib
import re
import tomllib
from codecs import BOM_UTF8
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from wald.errors import InvalidInput
from wald.setting_types import SettingType


@dataclass(frozen=True, slots=True)
class SettingFile:
    """The content of a file.

    Attributes:
        tables: as TOML has it.
    """

    path: Path
    text: str
    tables: dict[str, Any]

    @classmethod
    def read(cls, path: Path) -> SettingFile:
        """
        Raises:
            InvalidInput: the file cannot be read, or is no TOML.
        """
        try:
            # An editor may have added a byte order mark. The codec that strips it is a module of its own, which a user
            # other than the one that started Python may be unable to import.
            text = path.read_bytes().removeprefix(BOM_UTF8).decode()
            return cls(path, text, tomllib.loads(text))
        except OSError as error:
            raise InvalidInput(f"{path}: {error.strerror}", hint=f"ls -l {path}") from error
        except UnicodeDecodeError as error:
            raise InvalidInput(f"{path}: not text, at offset {error.start}", hint=f"file {path}") from error
        except tomllib.TOMLDecodeError as error:
            is_twice = re.match("Cannot (declare|overwrite)", str(error))
            reason = "a table and a setting may be there once" if is_twice else "in TOML text is quoted"
            raise InvalidInput(f"{path}: not TOML: {error}", hint=f"edit {path}; {reason}") from error

    def place(self, key: str, *, after: str = "") -> str:
        """``path:line`` of ``key`` in the table whose name has ``after``; the parser does not keep lines itself."""
        start = 0
        heading = rf"""^\s*\[.*(?<![\w-]){re.escape(after)}(?![\w-]).*\]"""
        if after and (table := re.search(heading, self.text, re.MULTILINE)):
            start = table.end()
        sought = re.compile(rf"""^\s*(\[.*)?["']?(?<![\w-]){re.escape(key)}["']?\s*[]=.]""", re.MULTILINE)
        found = sought.search(self.text, start)
        return f"{self.path}:{self.text.count(chr(10), 0, found.end()) + 1}" if found else str(self.path)


def parse_setting(name: str, value: object, type_: SettingType, place: str, *, help_command: str) -> Any:
    """The checked value.

    Raises:
        InvalidInput: it is out of bounds, or of another type.
    """
    try:
        return type_.parse(value)
    except ValueError as error:
        raise InvalidInput(f"{place}: {name} must be {error}", hint=f"{help_command} lists every setting") from None


def unknown_setting(name: str, known: Iterable[str], place: str, *, table: str = "", help_command: str) -> InvalidInput:
    """The error for a setting that does not exist; its hint is the nearest one."""
    nearest = difflib.get_close_matches(name, known, n=1)
    hint = f"did you mean {nearest[0]!r}?" if nearest else f"{help_command} lists every setting"
    return InvalidInput(f"{place}: there is no setting {name!r}{table}", hint=hint)
