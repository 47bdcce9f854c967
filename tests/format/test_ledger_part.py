"""Index of a ledger part."""

from __future__ import annotations

import struct

import pytest
from crc32c import crc32c

from wald.format.ledger_lines import (
    _FOOTER,
    _MAGIC,
    GENESIS,
    INDEX_FRAME_MAGIC,
    BadPart,
    PartIndex,
    decode_part_index,
    encode_part_index,
)

HEAD = b'{"line": 1, "lines": 1, "prev": "", "tip": "", '


def test_an_index_with_what_the_previous_part_is_about_comes_back() -> None:
    index = PartIndex(11, 0, GENESIS, GENESIS, before=(1, 250))
    index.add(80, 100, [{"event": "reclaimed", "base": 5, "last": 9, "at": 7}, {"event": "seen", "at": 3}], "ff")
    index.add(40, 50, [{"event": "seen"}], "ee")

    assert decode_part_index(encode_part_index(index)) == index
    assert [tuple(frame)[2:-1] for frame in index.frames] == [(2, 5, 9, 3, 7), (1, 1 << 64, -1, (1 << 63) - 1, -1)]
    assert (index.lines, index.span, [frame.prev for frame in index.frames]) == (3, (5, 9), [GENESIS, "ff"])


@pytest.mark.parametrize(
    "text",
    [
        b"[" * 200_000,
        HEAD + b'"frames": [[]], "before": null}',
        HEAD + b'"frames": [], "before": [1]}',
        HEAD + b'"frames": []}',
        b"[]",
        b"{}",
    ],
    ids=["deep", "an empty frame", "half a span", "no span", "a list", "nothing"],
)
def test_wrong_content_is_damage(text: bytes) -> None:
    footer = _FOOTER.pack(len(text), crc32c(text), _MAGIC)
    with pytest.raises(BadPart, match="not that of a ledger part"):
        decode_part_index(struct.pack("<II", INDEX_FRAME_MAGIC, len(text) + len(footer)) + text + footer)
