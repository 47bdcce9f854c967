"""Batches: encoding is reversible, other bytes are rejected, and fast iteration equals slow parsing."""

import subprocess
import sys
from pathlib import Path

import crc32c
from damage import every_flip, every_truncation, flipped, peak_bytes
from hypothesis import given, settings
from hypothesis import strategies as st
from sample_segments import BATCHES, SALT, batch, control_batch, crafted, joined, moved

from wald.format import checksum
from wald.format.batch import (
    HEADER,
    PAYLOAD_MAX_BYTES,
    TRAILER,
    Batches,
    BatchHeader,
    Flag,
    ParseOutcome,
    ParseResult,
    StoredBatch,
    batch_start,
    checksum_body,
    decode_header,
    encode_batch,
    parse_batch,
    route_prefix,
    seed,
)
from wald.format.log_state import LogState

U32, U64 = st.integers(0, (1 << 32) - 1), st.integers(0, (1 << 64) - 1)


SMALL = batch(b"one\ntwo\n", base=7)
SEED = seed(SALT, 0)


@settings(max_examples=100, deadline=None)
@given(
    parts=st.lists(st.binary(max_size=50), max_size=4),
    route=st.from_regex(rb"[A-Za-z0-9][A-Za-z0-9._-]{0,126}", fullmatch=True),
    base=U64,
    producer=st.tuples(U64, U64),
    time_ns=st.integers(-(1 << 63), (1 << 63) - 1),
    before=st.binary(max_size=20),
)
def test_a_batch_comes_back(
    parts: list[bytes], route: bytes, base: int, producer: tuple[int, int], time_ns: int, before: bytes
) -> None:
    payload = b"".join(parts)
    count = payload.count(b"\n")
    prefix = route_prefix(route)
    checksum = checksum_body(prefix, parts, len(payload))
    given = BatchHeader(checksum, len(payload), base, time_ns, *producer, count, 5, 1, 0, len(route))
    buffers = encode_batch(given, prefix, parts, SEED)
    data = before + b"".join(buffers) + b"what follows"

    found = parse_batch(data, len(before), SEED)

    assert found.outcome is ParseOutcome.WHOLE
    header = found.header
    assert header is not None
    assert header == given
    assert header.total_bytes == sum(map(len, buffers))
    assert header.total_bytes % 8 == 0
    begin = len(before) + header.payload_offset
    assert data[len(before) + 64 :].startswith(route)
    assert data[begin : begin + header.payload_bytes] == payload


def test_every_flipped_bit_is_damage() -> None:
    for data in every_flip(SMALL):
        assert parse_batch(data, 0, SEED).outcome is ParseOutcome.DAMAGED


def test_every_truncation_is_torn() -> None:
    """Cut at nothing there is nothing; cut anywhere else, a batch has begun and is not there."""
    assert parse_batch(b"", 0, SEED).outcome is ParseOutcome.END
    for data in list(every_truncation(SMALL))[1:]:
        assert parse_batch(data, 0, SEED).outcome is ParseOutcome.TORN


@settings(max_examples=100, deadline=None)
@given(data=BATCHES, position=st.integers(0, 300), garbage=st.binary(min_size=1, max_size=80))
def test_overwritten_bytes_never_make_another_batch(data: bytes, position: int, garbage: bytes) -> None:
    position = min(position, len(data) - 1)
    changed = (data[:position] + garbage + data[position + len(garbage) :])[: len(data)]

    assert (parse_batch(changed, 0, SEED).outcome is ParseOutcome.WHOLE) == (changed == data)


@settings(max_examples=100, deadline=None)
@given(data=st.binary(max_size=200), offset=st.integers(0, 250))
def test_any_bytes_have_an_outcome(data: bytes, offset: int) -> None:
    rest = data[offset:]
    found = parse_batch(data, offset, SEED)

    assert found.outcome is not ParseOutcome.WHOLE
    assert (found.outcome is ParseOutcome.END) == (not any(rest[: HEADER.size]))
    assert found.header is None


def test_a_header_that_lies_is_no_header() -> None:
    """Its checksum holds, so only a hostile or a broken writer can have made it."""
    for changes, why in [
        ({"payload_bytes": PAYLOAD_MAX_BYTES + 1, "count": 0}, "longer than anything ever written"),
        ({"payload_bytes": 0xFFFFFFFF}, "the largest length there is"),
        ({"count": 1}, "a record without a byte"),
        ({"count": 0xFFFFFFFF, "payload_bytes": 8}, "four billion records in 8 bytes"),
        ({"encoding": 3}, "an encoding that does not exist"),
        ({"encoding": 0}, "control without its flag"),
        ({"flags": 8}, "records under the flag of control"),
        ({"route_bytes": 128}, "a route longer than a name may be"),
    ]:
        assert parse_batch(crafted(bytes(8)) + bytes(64), 0, SEED).header is not None
        data = crafted(bytes(8), **changes) + bytes(64)

        assert decode_header(data, 0, SEED) is None, why
        assert parse_batch(data, 0, SEED).outcome is ParseOutcome.DAMAGED, why
        assert iterated(data, 0, 0)[:2] == ([], 0), why


def test_a_length_beyond_the_input_and_a_large_batch_take_no_memory() -> None:
    for data, outcome in [
        (crafted(payload_bytes=PAYLOAD_MAX_BYTES) + b"x" * 1000, ParseOutcome.TORN),
        (batch(b"x" * (4 << 20) + b"\n"), ParseOutcome.WHOLE),
    ]:
        assert parse_batch(data, 0, SEED).outcome is outcome
        assert peak_bytes(lambda data=data: parse_batch(data, 0, SEED)) < 10_000  # type: ignore[misc]


def test_a_batch_tells_which_sequences_it_holds() -> None:
    for count, flags, number, continues, last, goes_on in [
        (3, Flag.NONE, 0, 0, 12, 0),
        (0, Flag.CONTINUES | Flag.CONTINUED, 9, 9, 9, 9),
        (0, Flag.CONTINUES | Flag.UNTERMINATED, 4, 4, 4, 0),
        (2, Flag.CONTINUES, 9, 9, 11, 0),
        (2, Flag.CONTINUES | Flag.CONTINUED, 9, 9, 11, 11),
        (1, Flag.CONTINUED, 0, 0, 10, 10),
        (2, Flag.NONE, 77, 0, 11, 0),
        (0, Flag.NONE, 0, 0, 9, 0),
    ]:
        header = decode_header(
            batch(b"a\nb\nc\n", base=10, count=count, flags=flags, producer_sequence=number), 0, SEED
        )

        assert header is not None
        assert (header.continues_sequence, header.last_sequence, header.end_sequence) == (continues, last, 10 + count)
        assert header.open_sequence == goes_on


@settings(max_examples=100, deadline=None)
@given(salt=U32, at=st.integers(0, 1 << 35).map(lambda at: at & ~7))
def test_a_batch_is_valid_at_its_position_only_and_its_trailer_gives_its_begin(salt: int, at: int) -> None:
    data = moved(SMALL, at, salt=salt)

    assert parse_batch(data, 0, seed(salt, at)).outcome is ParseOutcome.WHOLE
    assert batch_start(data[-TRAILER.size :], at + len(data), salt) == at
    assert batch_start(data[-TRAILER.size :], at + len(data), salt ^ 1) is None
    assert batch_start(data[-TRAILER.size :], at + len(data) + 8, salt) is None
    assert parse_batch(data, 0, seed(salt, at + 8)).outcome is ParseOutcome.DAMAGED


SOME = [control_batch(LogState(3, 5, {"web": 2})), batch(b"a\nb\n", base=3), batch(b"", base=5), batch(b"c\n", base=5)]


def one_by_one(data: bytes, at: int, position: int) -> tuple[list[StoredBatch], int, ParseResult]:
    """Return the batches, their end and the reason there, by :func:`parse_batch` alone."""
    found: list[StoredBatch] = []
    while True:
        parsed = parse_batch(data, at, seed(SALT, position + at))
        if parsed.outcome is not ParseOutcome.WHOLE or parsed.header is None:
            return found, at, parsed
        route = data[at + 64 : at + 64 + parsed.header.route_bytes].decode("ascii", "replace")
        found.append(StoredBatch(data, at, position + at, parsed.header, route))
        at += parsed.header.total_bytes


def iterated(data: bytes, at: int, position: int) -> tuple[list[StoredBatch], int, ParseResult]:
    batches = Batches(data, at, position=position, salt=SALT)
    return list(batches), batches.end, batches.rest


@settings(max_examples=100, deadline=None)
@given(
    batches=st.lists(BATCHES, max_size=4),
    before=st.binary(max_size=20),
    position=st.integers(0, 1 << 36).map(lambda number: number & ~7),
    damage=st.tuples(st.integers(0, 2000), st.binary(max_size=30)),
    behind=st.binary(max_size=100),
)
def test_the_fast_way_finds_what_the_plain_way_does(
    batches: list[bytes], before: bytes, position: int, damage: tuple[int, bytes], behind: bytes
) -> None:
    before += bytes(-len(before) % 8)
    data = before + joined(batches, start=position + len(before)) + behind
    at, garbage = damage
    data = (data[:at] + garbage + data[at + len(garbage) :])[: len(data)]

    assert iterated(data, len(before), position) == one_by_one(data, len(before), position)


def test_every_flipped_bit_and_every_truncation_end_the_iteration_alike() -> None:
    data = joined(SOME)
    for bit in range(8 * len(data)):
        assert iterated(flipped(data, bit), 0, 64) == one_by_one(flipped(data, bit), 0, 64)
    for cut in every_truncation(data):
        assert iterated(cut, 0, 64) == one_by_one(cut, 0, 64)


def output_of(script: str) -> str:
    return subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True).stdout


def test_checksums_are_those_of_the_standard_and_of_the_package() -> None:
    """The check value of CRC-32C, and any bytes from any seed."""
    assert checksum.crc32c(b"123456789") == 0xE3069283
    for length, start in ((0, 0), (1, 7), (64, 0xFFFFFFFF), (100_000, 0x12345678)):
        data = bytes(number * 31 % 256 for number in range(length))

        assert checksum.crc32c(data, start) == crc32c.crc32c(data, start)


def test_the_package_is_imported_if_it_has_another_layout() -> None:
    """A release without the extension of that name."""
    script = """if True:
        import sys
        sys.modules["crc32c"] = package = type(sys)("crc32c")
        package.crc32c = lambda data, seed=0: 7
        sys.path[:] = [each for each in sys.path if "site-packages" not in each]
        from wald.format.checksum import crc32c
        print(crc32c(b"any"))
    """
    assert output_of(script) == "7\n"


def test_the_package_is_imported_if_its_extension_is_absent_or_is_python(tmp_path: Path) -> None:
    (tmp_path / "crc32c").mkdir()
    (tmp_path / "crc32c/__init__.py").write_text("def crc32c(data, seed=0):\n    return 7\n")
    script = f"import sys; sys.path.insert(0, {str(tmp_path)!r}); from wald.format.checksum import crc32c"
    for _ in range(2):
        assert output_of(f"{script}; print(crc32c(b'any'))") == "7\n"
        (tmp_path / "crc32c/_crc32c.py").touch()
