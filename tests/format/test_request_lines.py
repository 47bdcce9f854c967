"""The socket's text protocol: each line is a request or a ProtocolError that says whether the connection lives on."""

from contextlib import suppress

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from wald.format.protocol import (
    REQUEST_MAX_BYTES,
    Code,
    Command,
    ProtocolError,
    Publish,
    encode_err,
    encode_ok,
    encode_publish,
    parse_reply,
    parse_request,
)

U64_MAX = (1 << 64) - 1
NO_REPLIES = ("", "ERR", "ERR nonsense words", "OKAY", "ok 1 2")
UNKNOWN = (b"", b" \r", b"pub web 5", b"GET / HTTP/1.1", b"\xff\xfe", b"\0", b"x" * 1024)
NO_LENGTHS = (b"five", b"-5", b"+5", b"5.0", b"0x5", b"\xd9\xa1", b"1234567890123", b"9" * 1000)
BAD_OPTIONS = (
    *(b"enc=json", b"enc", b"what=ever", b"6", b"enc=lines enc=columns", b"pid=1", b"pseq=1", b"pid= pseq="),
    *(b"pid=%b pseq=1" % number for number in (b"0", b"-1", b"0x1", b"1_0", b"10000000000000000", b"\xff")),
    *(b"pid=1 pseq=%b" % number for number in (b"-1", b"1_0", b"18446744073709551616")),
    *(b"seen=1", b"pid=1 seen=1"),
    *(b"pid=1 pseq=1 seen=%b" % number for number in (b"", b"-1", b"18446744073709551616")),
)


def test_a_request_is_what_its_line_says() -> None:
    for line, request_ in [
        (b"PUB web 5", Publish(b"web", 5)),
        (b"PUB web 5\r", Publish(b"web", 5)),
        (b"  PUB   web\t5  ", Publish(b"web", 5)),
        (b"PUB web 0", Publish(b"web", 0)),
        (b"PUB web 005", Publish(b"web", 5)),
        (b"PUB ../x 5", Publish(b"../x", 5)),
        (b"PUB web %d" % REQUEST_MAX_BYTES, Publish(b"web", REQUEST_MAX_BYTES)),
        (b"PUB web 5 enc=columns", Publish(b"web", 5, columns=True)),
        (b"PUB web 5 enc=lines", Publish(b"web", 5)),
        (b"PUB web 5 pid=ff pseq=0", Publish(b"web", 5, False, 255, 0)),
        (b"PUB web 5 pseq=7 enc=columns pid=FFFFFFFFFFFFFFFF", Publish(b"web", 5, True, U64_MAX, 7)),
        (b"PUB web 5 pid=1 pseq=18446744073709551615", Publish(b"web", 5, False, 1, U64_MAX)),
        (b"PUB web 5 pid=1 pseq=2 seen=0", Publish(b"web", 5, False, 1, 2, seen=0)),
        (b"PUB web 5 seen=%d pid=1 pseq=2" % U64_MAX, Publish(b"web", 5, False, 1, 2, U64_MAX)),
        (b"HEAD", Command("HEAD")),
        (b"HEAD\r", Command("HEAD")),
        (b"STAT", Command("STAT")),
        (b"CUT", Command("CUT")),
        (b"PING", Command("PING")),
        (b"ROUTE ADD web fifo mode=0620", Command("ROUTE", ("ADD", "web", "fifo", "mode=0620"))),
        (b"ROUTE RETIRE \xff", Command("ROUTE", ("RETIRE", "\ufffd"))),
    ]:
        assert parse_request(line) == request_


def test_a_bad_request_says_how_to_go_on() -> None:
    """``payload_bytes`` is the length to skip; with None, the connection ends."""
    for line, code, payload_bytes in [
        *((line, Code.UNKNOWN_VERB, 0) for line in UNKNOWN),
        (b"PUB", Code.BAD_LENGTH, None),
        (b"PUB web", Code.BAD_LENGTH, None),
        *((b"PUB web " + length, Code.BAD_LENGTH, None) for length in NO_LENGTHS),
        (b"PUB web %d" % (REQUEST_MAX_BYTES + 1), Code.TOO_LARGE, REQUEST_MAX_BYTES + 1),
        (b"PUB web 999999999999", Code.TOO_LARGE, 999999999999),
        *((b"PUB web 5 " + options, Code.BAD_REQUEST, 5) for options in BAD_OPTIONS),
    ]:
        with pytest.raises(ProtocolError) as caught:
            parse_request(line)
        assert (caught.value.code, caught.value.payload_bytes) == (code, payload_bytes)
        assert parse_error(encode_err(caught.value.code, caught.value.message)).code == code


def parse_error(line: bytes) -> ProtocolError:
    assert line.count(b"\n") == 1
    with pytest.raises(ProtocolError) as caught:
        parse_reply(line)
    return caught.value


def test_a_limit_of_the_daemon_is_reported_with_its_number() -> None:
    with pytest.raises(ProtocolError, match="the limit is 4") as caught:
        parse_request(b"PUB web 5", request_max_bytes=4)
    assert caught.value.payload_bytes == 5


@settings(max_examples=100, deadline=None)
@given(
    publish=st.tuples(
        st.from_regex(rb"[A-Za-z0-9][A-Za-z0-9._-]{0,126}", fullmatch=True),
        st.integers(0, REQUEST_MAX_BYTES),
        st.booleans(),
    ).map(lambda fields: Publish(*fields))
    | st.builds(
        Publish,
        st.just(b"web"),
        st.integers(0, 9),
        st.booleans(),
        st.integers(1, U64_MAX),
        st.integers(0, U64_MAX),
        st.none() | st.integers(0, U64_MAX),
    )
)
def test_a_publish_comes_back(publish: Publish) -> None:
    line = encode_publish(publish)
    assert line.endswith(b"\n")
    assert parse_request(line[:-1]) == publish


@settings(max_examples=100, deadline=None)
@given(
    line=st.binary(max_size=60)
    | st.lists(
        st.sampled_from(
            [b"PUB", b"web", b"5", b"enc=columns", b"pid=", b"pid=1", b"pseq=1", b"seen=1", b"=", b"ROUTE", b"ADD"]
        )
        | st.binary(max_size=8),
        max_size=7,
    ).map(b" ".join)
)
def test_any_line_is_a_request_or_a_protocol_error(line: bytes) -> None:
    """Whatever the words of the error are made of, they fit into one line of reply."""
    answer = b""
    try:
        request = parse_request(line)
    except ProtocolError as error:
        answer = encode_err(error.code, error.message)
    else:
        assert isinstance(request, Command) or 0 <= request.payload_bytes <= REQUEST_MAX_BYTES
    assert answer == b"" or parse_error(answer).message


def test_a_good_reply_is_its_words() -> None:
    for line, words in [
        (b"OK 1 2\n", "1 2"),
        (b"OK 1 2", "1 2"),
        (b"OK\n", ""),
        (b"OK \n", ""),
        (b'OK {"a": 1}\n', '{"a": 1}'),
        (encode_ok("pong"), "pong"),
    ]:
        assert parse_reply(line) == words


def test_any_other_reply_is_an_error() -> None:
    for line, code, words in [
        (b"ERR full the disk is nearly full\n", Code.FULL, "the disk is nearly full"),
        (b"ERR full\n", Code.FULL, ""),
        *(
            (f"{text}\n".encode(errors="surrogateescape"), Code.BAD_REQUEST, f"{shown!r} is not a reply")
            for text, shown in (*((each, each) for each in NO_REPLIES), ("\udcff", "\ufffd"))
        ),
    ]:
        error = parse_error(line)
        assert (error.code, error.message) == (code, words)


def test_every_code_comes_back() -> None:
    for code in Code:
        error = parse_error(encode_err(code, "some\nwords \r\n here"))
        assert (error.code, error.message) == (code, "some words here")


@settings(max_examples=100, deadline=None)
@given(line=st.binary(max_size=60) | st.binary(max_size=60).map(lambda rest: b"ERR " + rest))
def test_any_reply_is_words_or_a_protocol_error(line: bytes) -> None:
    with suppress(ProtocolError):
        parse_reply(line)
        assert line.startswith(b"OK")
