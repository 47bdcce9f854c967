"""The text of metrics, read by Prometheus's own parser."""

from __future__ import annotations

from collections.abc import Iterator

from prometheus_client.parser import text_string_to_metric_families

from wald.exposition import Histogram, Metric, Samples, counter, gauge, histogram, render


def samples(text: bytes) -> dict[tuple[str, tuple[tuple[str, str], ...]], float]:
    """The value of each sample by its name and its labels."""
    families = text_string_to_metric_families(text.decode())
    return {(each.name, tuple(each.labels.items())): each.value for family in families for each in family.samples}


def test_a_histogram_is_cumulative_and_ends_with_all() -> None:
    """A value that is a bound counts under it."""
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
    """Another thread reads it than the one that counts."""

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
    """A file may be named like the cursor of a group that no group can have."""
    names = ('quo"te', "back\\slash", "new\nline", "\\n", "ü", "")
    taken: Samples = {(name,): number for number, name in enumerate(names)}

    found = samples(render([Metric("g", "gauge", "Groups", ("group",), taken)]))

    assert found == {("g", (("group", name),)): number for number, name in enumerate(names)}


def test_a_name_that_is_not_utf_8_does_not_end_the_text() -> None:
    text = render([Metric("g", "gauge", "Groups", ("group",), {("\udcff",): 1}), gauge("after", "Next", 2)])

    assert samples(text)["after", ()] == 2


def test_numbers_keep_every_digit() -> None:
    """Up to 2**53, as Prometheus counts in doubles."""
    taken = [counter("a_total", "Large", 2**53 - 1), gauge("b", "Never", float("inf")), gauge("c", "Part", 0.1)]

    assert samples(render(taken)) == {("a_total", ()): 2**53 - 1, ("b", ()): float("inf"), ("c", ()): 0.1}


def test_a_metric_without_samples_is_left_out() -> None:
    assert render([Metric("g", "gauge", "Groups", ("group",))]) == b""
