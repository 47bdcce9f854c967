"""A page as HTML: the templates, the headers that bound what a page may do, live pages, and errors as pages."""

from __future__ import annotations

import logging
from collections.abc import AsyncGenerator, Callable, Iterator, Mapping
from typing import Any

import msgspec
from jinja2 import Environment, PackageLoader, StrictUndefined, Template
from markupsafe import Markup
from starlette.requests import Request
from starlette.responses import RedirectResponse, Response

from wald.errors import WaldError
from wald.format.times import utc
from wald.hints import command_line
from wald.setting_types import format_bytes, format_seconds
from wald_gate.call import Call
from wald_gate.page.assets import BUILD
from wald_gate.page.changes import Sent, changes
from wald_gate.page.picture import Picture
from wald_gate.page.places import places_of
from wald_gate.page.visible import marked, visible
from wald_gate.presence import Stream
from wald_gate.problems import problem
from wald_gate.rights.clients import Client
from wald_gate.shapes import Problem

HTML = "text/html"
EVENTS = "text/event-stream"
LIVE = "live_"
HEADERS: Mapping[str, str] = {
    "Content-Security-Policy": (
        "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; img-src 'self'; "
        "form-action 'self'; frame-ancestors 'none'; base-uri 'none'"
    ),
    "Cache-Control": "no-store",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Permissions-Policy": "camera=(), geolocation=(), microphone=()",
    "Vary": "Accept, Authorization, Cookie",
    "X-Frame-Options": "DENY",
}
_PICTURES_PASSED_MAX = 5  # after failures; so often a browser hears that it goes on
_log = logging.getLogger("wald_gate")
Facts = Mapping[str, Any]
"""What a template shows, by the names that it uses; ``Any``: of any type that it can write."""


async def page(call: Call, template: str, facts: Facts, *, status: int = 200) -> Response:
    """A page that is made once; only what the frame says of the log as a whole is live.

    Args:
        template: its name; it extends ``frame.html``.
    """
    picture = await call.state.watching.picture()
    found = _ENVIRONMENT.get_template(template)
    return _html(found.render(_of_frame(call, picture, live=base_of(call.request) + "live") | dict(facts)), status)


async def live_page(call: Call, template: str, facts: Callable[[Picture], Facts]) -> Response:
    """A page of the newest picture of the log, or, where events are asked for, what changes on it from now on.

    Args:
        facts: is called in a thread, for each picture.

    Raises:
        WaldError: of the first call of ``facts``.
    """
    picture = await call.state.watching.picture()
    found = _ENVIRONMENT.get_template(template)
    if EVENTS in call.request.headers.get("accept", ""):
        headers = {**HEADERS, "X-Accel-Buffering": "no"}
        return Stream(_changes(call, found, facts), EVENTS, headers)

    def render() -> str:
        live = "?" + call.request.url.query  # the page itself
        return found.render(_of_frame(call, picture, live=live) | dict(facts(picture)))

    return _html(await call.read(render))


async def only_frame(call: Call) -> Response:
    """What changes in the frame alone, for pages that are not live themselves."""
    return await live_page(call, "frame.html", lambda _: {})


def failed(request: Request, error: Exception) -> Response:
    """A page that says what went wrong; who is not known is shown where a token can be typed."""
    answer = problem(error)
    if answer.status_code == 401 and request.method in ("GET", "HEAD"):
        return RedirectResponse(base_of(request) + "login", 303, HEADERS)
    found = msgspec.json.decode(answer.body, type=Problem)
    html = _ENVIRONMENT.get_template("problem.html").render(problem=found, build=BUILD, base=base_of(request))
    response = _html(html, answer.status_code)
    response.headers.update({name: value for name, value in answer.headers.items() if name in _OF_PROBLEMS})
    return response


def bare(call: Call, template: str, facts: Facts, *, status: int = 200) -> Response:
    """A page outside of the frame: it says nothing of the log."""
    base = base_of(call.request)
    return _html(_ENVIRONMENT.get_template(template).render(build=BUILD, base=base, **facts), status)


def base_of(request: Request) -> str:
    """Return the relative address of the overview, which all links begin with.

    A proxy may have removed a prefix from the path, so the gate does not know any absolute address.
    """
    return "../" * (request.scope["path"].count("/") - 1) or "./"


async def _changes(call: Call, template: Template, facts: Callable[[Picture], Facts]) -> AsyncGenerator[bytes]:
    """Events: the parts that have changed, each time that there is a new picture; it waits until they are read."""
    sent: Sent = {}
    number = due = failures = 0
    yield f"retry: 1000\nevent: hello\ndata: {BUILD}\n\n".encode()
    with call.state.watching.looked_at():
        while (picture := await call.state.watching.newer(number)) is not None:
            if (
                call.state.rights.edition != call.edition
            ):  # the browser asks again, and is judged by what the file says now
                break
            number = picture.number
            if number < due:
                continue
            try:
                event = await call.read(_event, call, template, facts, picture, sent)
                failures = 0
            except Exception as error:  # noqa: BLE001 - a bug; the page is old then and says so
                if not failures:
                    _log.exception("no page: %s", call.request.url.path)
                failures += 1
                due = number + min(2**failures, _PICTURES_PASSED_MAX)
                event = b"event: failed\ndata: " + msgspec.json.encode(type(error).__name__) + b"\n\n"
            yield event


def _event(call: Call, template: Template, facts: Callable[[Picture], Facts], picture: Picture, sent: Sent) -> bytes:
    """The event for one picture.

    Args:
        sent: what was sent before.
    """
    try:
        context = template.new_context(_of_frame(call, picture, live="") | dict(facts(picture)))
        parts = [change for name, html in _parts(template, context) for change in changes(name, html, sent)]
    except (WaldError, OSError) as error:  # the next picture may do
        return b"event: trouble\ndata: " + msgspec.json.encode(str(call.shown(error))) + b"\n\n"
    return b"event: parts\ndata: " + msgspec.json.encode(parts) + b"\n\n"


def _parts(template: Template, context: Any) -> Iterator[tuple[str, str]]:
    """The live blocks of a template, and of those that it extends; ``Any``: Jinja's context has no better type."""
    blocks = dict(_ENVIRONMENT.get_template("frame.html").blocks) | dict(template.blocks)
    for name, block in blocks.items():
        if name.startswith(LIVE):
            yield name, "".join(block(context)).strip()


def _of_frame(call: Call, picture: Picture | None, *, live: str) -> dict[str, Any]:
    """What the frame shows itself."""
    client: Client = call.client
    return {
        "base": base_of(call.request),
        "build": BUILD,
        "client": client,
        "has_session": call.has_session,
        "here": call.request.url.path,
        "live": live,
        "picture": picture,
        "places": places_of(client),
        "root": call.root,
    }


def _html(text: str, status: int = 200) -> Response:
    return Response(text, status, HEADERS, HTML)


def _shown(value: object) -> object:
    """What an expression in a template writes: text passes through :func:`visible`, wherever it is from."""
    if value is None:
        return "–"
    return visible(value) if isinstance(value, str) and not isinstance(value, Markup) else value


def _about(seconds: float) -> str:
    """About so long, in one unit where that is enough, so that it does not change every second."""
    number, unit, *rest = format_seconds(seconds).split(" ")
    return f"{number} {unit}" if float(number) >= 10 else " ".join((number, unit, *rest))


_OF_PROBLEMS = ("retry-after", "www-authenticate", "connection", "allow")
_ENVIRONMENT = Environment(
    loader=PackageLoader("wald_gate.page"),
    autoescape=True,
    auto_reload=False,
    finalize=_shown,
    trim_blocks=True,
    lstrip_blocks=True,
    undefined=StrictUndefined,
)
_ENVIRONMENT.filters |= {
    "about": _about,
    "bytes": format_bytes,
    "count": "{:,}".format,
    "marked": marked,
    "seconds": format_seconds,
    "utc": utc,
    "visible": visible,
}
_ENVIRONMENT.globals["command_line"] = command_line
_ENVIRONMENT.globals |= {  # not imported by templates, as parts are made without what stands outside of their blocks
    name: macro for name, macro in vars(_ENVIRONMENT.get_template("parts.html").module).items() if name[0] != "_"
}
