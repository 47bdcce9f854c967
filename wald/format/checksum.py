"""CRC-32C from the package ``crc32c``, without the cost of ``import crc32c``.

At import, the package reads its version, which takes three times as long as starting Python, so this module loads only
the extension.
"""

from __future__ import annotations

from importlib.machinery import PathFinder
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from crc32c import crc32c
else:
    try:
        package = PathFinder.find_spec("crc32c")
        extension = PathFinder.find_spec("crc32c._crc32c", package.submodule_search_locations)
        module = extension.loader.create_module(extension)
        extension.loader.exec_module(module)
        crc32c = module.crc32c
    except (ImportError, AttributeError):  # the package has another layout
        from crc32c import crc32c

__all__ = ["crc32c"]
