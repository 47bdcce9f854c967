"""The documented names of ``import wald``, each loaded on first use."""

from __future__ import annotations

import subprocess
import sys

import pytest

import wald


def test_every_name_is_there() -> None:
    for name in wald.__all__:
        assert getattr(wald, name) is not None
        assert name in dir(wald)
    assert {"Batch", "Consumer", "Cursor", "Log", "Producer", "Record", "errors", "open"} <= set(wald.__all__)


def test_a_name_that_is_not_there_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="'Customer'"):
        wald.Customer  # type: ignore[attr-defined]  # noqa: B018


def test_the_import_alone_loads_nothing() -> None:
    script = "import sys, wald; print(*[name for name in sys.modules if name.startswith('wald')])"
    loaded = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)

    assert loaded.stdout.split() == ["wald"]


def test_a_star_import_gives_the_documented_names() -> None:
    script = "from wald import *; Producer, Consumer, Log, Batch, Record, Cursor, errors"
    subprocess.run([sys.executable, "-c", script], check=True)
