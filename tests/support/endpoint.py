"""HTTP requests to a daemon."""

import socket
import urllib.error
import urllib.request

from prometheus_client.parser import text_string_to_metric_families
from running import TIMEOUT_SECONDS


def free_address() -> str:
    with socket.create_server(("127.0.0.1", 0)) as free:
        return f"127.0.0.1:{free.getsockname()[1]}"


def get(address: str, path: str) -> tuple[int, str]:
    """Return status and body."""
    try:
        with urllib.request.urlopen(f"http://{address}{path}", timeout=TIMEOUT_SECONDS) as answer:
            return answer.status, answer.read().decode()
    except urllib.error.HTTPError as refusal:
        with refusal:
            return refusal.code, refusal.read().decode()


def metrics(address: str) -> dict[str, float]:
    """Return every sample by name; the parser is from Prometheus."""
    status, body = get(address, "/metrics")
    assert status == 200
    return {sample.name: sample.value for family in text_string_to_metric_families(body) for sample in family.samples}


def samples_of(text: str) -> dict[tuple[str, ...], float]:
    """Return the value of each sample by its name and label values, with the route first."""
    return {
        (
            each.name,
            *(each.labels[label] for label in sorted(each.labels, key=lambda name: (name != "route", name))),
        ): each.value
        for family in text_string_to_metric_families(text)
        for each in family.samples
    }
