"""The log at a glance: how far it is, what goes in and out, what is left of the disk, and what is wrong."""

from __future__ import annotations

from starlette.responses import Response

from wald_gate.call import Call
from wald_gate.page.frame import Facts, live_page
from wald_gate.page.picture import Picture


async def overview(call: Call) -> Response:
    """The view at ``/``."""
    return await live_page(call, "overview.html", _facts)


def _facts(picture: Picture) -> Facts:
    return {"head": picture.head}
