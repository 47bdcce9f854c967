"""Events as sentences: exact numbers for the terminal and its pipes, readable ones for the page."""

from typing import Any

from wald.checking.audit_report import Event
from wald.status.history import EXACT, LIVES, READABLE, deed

SEGMENT: dict[str, Any] = {"base": 1_000_001, "last": 1_234_567, "routes": [["web", 234_567, 1_000_001, 1_234_567, 9]]}


def event(ledger: str = "segments.jsonl", **entry: Any) -> Event:
    return Event(1, ledger, 1, entry)


def test_numbers_are_exact_or_readable() -> None:
    for told, exact, readable in [
        (
            event(event="sealed", raw_bytes=153_912, bytes=15_586, **SEGMENT),
            "segment 1000001: records 1000001 to 1234567 (web 234567); 153912 bytes became 15586",
            "segment 1000001: records 1,000,001 to 1,234,567 (web 234,567); 150.3 KiB became 15.2 KiB",
        ),
        (
            event(event="shrunk", was_bytes=153_912, bytes=15_586, dropped=SEGMENT["routes"], **SEGMENT),
            "segment 1000001: records 1000001 to 1234567, without (web 234567): 153912 bytes became 15586",
            "segment 1000001: records 1,000,001 to 1,234,567, without (web 234,567): 150.3 KiB became 15.2 KiB",
        ),
        (
            event(event="cut", base=1, next=1_000_001, bytes=64 << 20),
            "segment 1: records 1 to 1000000, 67108864 bytes",
            "segment 1: records 1 to 1,000,000, 64.0 MiB",
        ),
        (
            event(event="cut", base=1, next=2, bytes=None),
            "segment 1: records 1 to 1, None bytes",
            "segment 1: records 1 to 1, None bytes",
        ),
        (
            event(event="archived", count=1000, route="web", first=1, last=1999, dest="/a", path="b.tar"),
            "1000 records of web, 1 to 1999: /a/b.tar",
            "1,000 records of web, 1 to 1,999: /a/b.tar",
        ),
        (
            event(LIVES, event="started", epoch=1000, trimmed_bytes=2048),
            "epoch 1000: wald started; 2048 bytes of an unfinished write were cut off",
            "epoch 1000: wald started; 2.0 KiB of an unfinished write were cut off",
        ),
        (
            event(event="skipped-record", route="web", group="g", first=1000, sequence=2000, by="ann", records=1001),
            "web/g skipped 1000 to 2000 by ann, past 1001 records",
            "web/g skipped 1,000 to 2,000 by ann, past 1,001 records",
        ),
        (
            event(
                event="skip-failed", route="web", group="g", first=1000, sequence=2000, by="ann", records=1, why="no"
            ),
            "web/g failed to skip 1000 to 2000 by ann, past 1 record; no",
            "web/g failed to skip 1,000 to 2,000 by ann, past 1 record; no",
        ),
        (
            event(event="lost", base=1000, last=2000, why="gone"),
            "records 1000 to 2000; gone",
            "records 1,000 to 2,000; gone",
        ),
    ]:
        assert deed(told) == deed(told, EXACT) == exact
        assert deed(told, READABLE) == readable
