"""The verbs that ask about the gate itself: healthz, readyz, metrics."""

from __future__ import annotations

import prometheus_client
from starlette.responses import Response

from wald.exposition import TEXT_FORMAT, Metric, render
from wald_gate.call import Call
from wald_gate.monitoring.exported import of_gate
from wald_gate.monitoring.readiness import Word
from wald_gate.problems import RETRY_SECONDS, HttpError
from wald_gate.shapes import Health, encoded

JSON = "application/json"
_process = prometheus_client.CollectorRegistry(auto_describe=False)
prometheus_client.ProcessCollector(registry=_process)


async def healthz(_: Call) -> Response:
    """That the loop of the gate turns; a gate that does not answer is to be restarted."""
    return Response(encoded(Health("ok")), media_type=JSON)


async def readyz(call: Call) -> Response:
    """Whether the log can be read and its daemon answers; a gate that is not ready is to get no requests.

    A full disk is no reason to send requests elsewhere: readers make the room.
    """
    found = await call.state.readiness.now()
    if found.word is Word.NOT_READY:
        headers = {"Retry-After": str(RETRY_SECONDS)}
        raise HttpError(503, "not-ready", found.why, hint="stderr of the gate has more", headers=headers)
    return Response(encoded(Health(found.word.value, found.why)), media_type=JSON)


async def metrics(call: Call) -> Response:
    """What the gate counts, and its process."""
    state = call.state
    word = (await state.readiness.now()).word
    log_id = state.log.identity.log_id.hex()
    groups, leases = state.groups.count, state.groups.waiting.count
    counted = list(
        of_gate(state.counts, state.bounds, state.daemon.published, word, log_id, groups=groups, leases=leases)
    )
    return Response(await state.in_thread(_text, counted), media_type=TEXT_FORMAT)


def _text(counted: list[Metric]) -> bytes:
    return render(counted) + prometheus_client.generate_latest(_process)
