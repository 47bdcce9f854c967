"""CRC-32C from the package ``crc32c``, without the cost of ``import crc32c``.

The package reads its own version at import (``importlib.metadata``, ``email``), which takes three times as long as
starting Python. So only its extension module is loaded, by path, with a plain import as the fallback.
"""

from __future__ import annotations

from importlib.machinery import PathFinder
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from crc32c import crc32c


def load_extension(package: str, extension: str) -> Any:
    """Load an extension module without importing its package, or raise ImportError."""
    found = PathFinder.find_spec(package)
    places = found.submodule_search_locations if found is not None else None
    inner = PathFinder.find_spec(f"{package}.{extension}", places) if places else None
    if inner is None or inner.loader is None:
        raise ImportError(f"package {package} has no module {extension}")
    module = inner.loader.create_module(inner)
    if module is None:
        raise ImportError(f"{package}.{extension} is not an extension module")
    inner.loader.exec_module(module)
    return module


if not TYPE_CHECKING:
    try:
        crc32c = load_extension("crc32c", "_crc32c").crc32c
    except (ImportError, AttributeError):
        from crc32c import crc32c

__all__ = ["crc32c"]
