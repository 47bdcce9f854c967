"""The settings in force: the value of each, as it is written in the file, and where that comes from."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from wald.config import ROUTE_TYPES, Config, setting_types
from wald.limits import Retention

DEFAULT = "default"


@dataclass(frozen=True, slots=True)
class SettingInForce:
    """A setting as a daemon has it.

    Attributes:
        origin: a variable, a file and a line, or DEFAULT.
    """

    name: str
    value: str
    origin: str


def settings_in_force(config: Config) -> Iterator[SettingInForce]:
    """Every setting of the daemon; of [retention] and of routes what the file has."""
    for name, type_ in setting_types(Config).items():
        yield SettingInForce(name, type_.show(getattr(config, name)), config.origins.get(name, DEFAULT))
    retention = setting_types(Retention)
    for name, origin in config.origins.items():
        match name.split(".", 1):
            case ["retention", key]:
                yield SettingInForce(name, retention[key].show(getattr(config.retention, key)), origin)
            case ["routes", rest]:
                route, _, key = rest.rpartition(".")
                value = getattr(config.routes[route], key)
                shown = ROUTE_TYPES[key].show(value) if key in ROUTE_TYPES else str(sorted(value))
                yield SettingInForce(name, shown, origin)
