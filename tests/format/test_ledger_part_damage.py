"""The index of a ledger's part with a right checksum and wrong content is damage like any other."""

from __future__ import annotations

import pytest
from crc32c import crc32c

from wald.format.ledger_part import _FOOTER, _MAGIC, INDEX_FRAME_MAGIC, BadPart, decode_index
from wald.format.sealed import SKIPPABLE

HEAD = b'{"line": 1, "lines": 1, "prev": "", "tip": "", "clock": [0, "", 0], "seen": [], "reclaimed": [], "kept": [], '


@pytest.mark.parametrize(
    "text",
    [b"[" * 200_000, HEAD + b'"frames": [[]], "archived": {}}', HEAD + b'"frames": [], "archived": []}', b"[]", b"{}"],
    ids=["deep", "an empty frame", "a list for an object", "a list", "nothing"],
)
def test_wrong_content_is_damage(text: bytes) -> None:
    footer = _FOOTER.pack(len(text), crc32c(text), _MAGIC)
    with pytest.raises(BadPart, match="not one of a ledger's part"):
        decode_index(SKIPPABLE.pack(INDEX_FRAME_MAGIC, len(text) + len(footer)) + text + footer)
