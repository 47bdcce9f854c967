"""A daemon that has forgotten its producers."""

from itertools import count, islice

from running import Client, Daemon

from wald.format.log_state import PRODUCERS_MAX

_PRODUCERS = count(1)


def forget(daemon: Daemon) -> None:
    """Let the daemon forget all producers: the maximum number of others each store a record in another route."""
    daemon.ask("ROUTE ADD others")
    with Client(daemon.socket_path) as client:
        for producer in islice(_PRODUCERS, PRODUCERS_MAX):
            client.publish("others", b"x\n", f"pid={producer:x} pseq=1")
        for _ in range(PRODUCERS_MAX):
            assert client.reply().startswith("OK ")
