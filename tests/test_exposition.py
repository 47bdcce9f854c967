"""Prometheus's own parser reads the text of the metrics."""

import socket
from collections.abc import Iterator

from endpoint import free_address
from prometheus_client.parser import text_string_to_metric_families

from wald.exposition import Endpoint, Histogram, Metric, Response, Samples, counter, gauge, histogram, render


def samples(text: bytes) -> dict[tuple[str, tuple[tuple[str, str], ...]], float]:
    """Return the value of each sample by its name and its labels."""
    families = text_string_to_metric_families(text.decode())
    return {(each.name, tuple(each.labels.items())): each.value for family in families for each in family.samples}


def test_a_histogram_is_cumulative_and_ends_with_all() -> None:
    """A value equal to a bound counts in that bucket."""
    taken = Histogram(1, 2.5)
    for value in (0.5, 1, 2, 100):
        taken.observe(value)

    assert samples(render([histogram("h_seconds", "Time", taken)])) == {
        ("h_seconds_bucket", (("le", "1"),)): 2,
        ("h_seconds_bucket", (("le", "2.5"),)): 3,
        ("h_seconds_bucket", (("le", "+Inf"),)): 4,
        ("h_seconds_sum", ()): 103.5,
        ("h_seconds_count", ()): 4,
    }


def test_a_histogram_that_grows_meanwhile_agrees_with_itself() -> None:
    """One thread renders the histogram while another counts."""

    class Growing(list[int]):
        def __iter__(self) -> Iterator[int]:
            yield from tuple(super().__iter__())
            self[0] += 1

    taken = Histogram(1)
    taken.counts = Growing(taken.counts)
    taken.observe(0.5)
    found = samples(render([histogram("h_seconds", "Time", taken)]))

    assert found["h_seconds_count", ()] == found["h_seconds_bucket", (("le", "+Inf"),)] == 1


def test_label_values_come_back_as_they_were() -> None:
    """A cursor file may have a name that is not a valid group name."""
    names = ('quo"te', "back\\slash", "new\nline", "\\n", "ü", "")
    taken: Samples = {(name,): number for number, name in enumerate(names)}

    found = samples(render([Metric("g", "gauge", "Groups", ("group",), taken)]))

    assert found == {("g", (("group", name),)): number for number, name in enumerate(names)}


def test_a_name_that_is_not_utf_8_does_not_end_the_text() -> None:
    text = render([Metric("g", "gauge", "Groups", ("group",), {("\udcff",): 1}), gauge("after", "Next", 2)])

    assert samples(text)["after", ()] == 2


def test_numbers_keep_every_digit() -> None:
    """Numbers are exact up to 2**53, because Prometheus uses doubles."""
    taken = [counter("a_total", "Large", 2**53 - 1), gauge("b", "Never", float("inf")), gauge("c", "Part", 0.1)]

    assert samples(render(taken)) == {("a_total", ()): 2**53 - 1, ("b", ()): float("inf"), ("c", ()): 0.1}


def test_a_metric_without_samples_is_left_out() -> None:
    assert render([Metric("g", "gauge", "Groups", ("group",))]) == b""


ANSWERS = [
    (b"GET /page HTTP/1.1\r\nHost: a\r\n\r\n", b"200 OK", b"text"),
    (b"GET /page?x=1 HTTP/1.0\n\n", b"200 OK", b"text"),
    (b"HEAD /page HTTP/1.1\r\n\r\n", b"200 OK", b""),
    (b"GET /other HTTP/1.1\r\n\r\n", b"404 Not Found", b"/page\n"),
    (b"POST /page HTTP/1.1\r\n\r\n", b"501 Not Implemented", b"only GET and HEAD are supported\n"),
    (b"GET /page\r\n\r\n", b"400 Bad Request", b"bad request\n"),
    (b"\xff\x00\r\n\r\n", b"400 Bad Request", b"bad request\n"),
]


def test_the_endpoint_answers_one_request_on_a_connection() -> None:
    address = free_address()
    endpoint = Endpoint(address, {"/page": lambda: Response(b"text")}, setting="--metrics")
    endpoint.start()
    host, _, port = address.partition(":")
    try:
        for request, status, body in ANSWERS:
            with socket.create_connection((host, int(port)), timeout=60) as client, client.makefile("rb") as reader:
                client.sendall(request)
                head, _, received = reader.read().partition(b"\r\n\r\n")
            assert (head.split(b"\r\n")[0], received) == (b"HTTP/1.0 " + status, body), request
    finally:
        endpoint.close()
