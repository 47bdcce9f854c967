"""What of a live page has changed since it was sent: parts, or rows of them."""

from __future__ import annotations

import re

_ROW = re.compile(r'<(?P<tag>tr|g) id="(?P<id>[^"]+)".*?</(?P=tag)>', re.DOTALL)
Sent = dict[str, tuple[int, dict[str, int]]]
"""What was sent of each part: a hash of what stands around its rows, and one of each row."""


def changes(name: str, html: str, sent: Sent) -> list[tuple[str, str]]:
    """What has to be sent of a part: nothing, those of its rows that have changed, or all of it.

    A row is a ``tr``, or a ``g`` of a picture, with an id. If others have come or gone, the whole part is sent.

    Args:
        sent: what was sent before; changed to what is sent now.
    """
    rows = {found["id"]: found[0] for found in _ROW.finditer(html)}
    around = hash(_ROW.sub(lambda found: f"\0{found['id']}", html))
    before, rows_before = sent.get(name, (None, {}))
    changed = [(row, outer) for row, outer in rows.items() if rows_before.get(row) != hash(outer)]
    sent[name] = around, {row: hash(outer) for row, outer in rows.items()}
    return changed if before == around else [(name, html)]
