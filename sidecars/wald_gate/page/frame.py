"""Pages as HTML: escaping of untrusted text, templates, headers, live parts, and error pages."""

from __future__ import annotations

import hashlib
import logging
import re
from collections.abc import AsyncGenerator, Callable, Mapping
from dataclasses import dataclass
from importlib.resources import files
from itertools import groupby
from typing import Any

import msgspec
from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup, escape
from starlette.requests import Request
from starlette.responses import RedirectResponse, Response

from wald.errors import WaldError
from wald.format.times import utc
from wald.hints import command_line
from wald.setting_types import format_bytes, format_seconds
from wald_gate.auth.tokens import Right
from wald_gate.call import Call
from wald_gate.page.snapshot import PageSnapshot
from wald_gate.problems import HttpError, problem
from wald_gate.responses import Stream
from wald_gate.shapes import Problem

# Printable by category but invisible (Unicode: Default_Ignorable_Code_Point, and two more).
_BLANKS = ("\u034f", "\u115f", "\u1160", "\u17b4", "\u17b5", "\u2800", "\u3164", "\uffa0")
_BLANK_SPANS = (("\u180b", "\u180f"), ("\ufe00", "\ufe0f"), ("\U000e0100", "\U000e01ef"))


def visible(text: str) -> str:
    r"""Return text with an escape in place of each character that does not print.

    Control characters could move the cursor of a terminal; marks of direction and joiners of no width make a text look
    like another one. A byte that is not UTF-8 is a lone surrogate (PEP 383).

    >>> visible("a\x1b[1m\u202eb")
    'a\\x1b[1m\\u202eb'
    """
    return "".join(run if prints else _escapes(run) for prints, run in _runs(text, ""))


def marked(text: str, *, keep: str = "") -> Markup:
    """Return the same as HTML, in which an escape looks different from the same characters typed; print ``keep``."""
    return Markup().join(
        escape(run) if prints else Markup('<span class="escape">{}</span>').format(_escapes(run))
        for prints, run in _runs(text, keep)
    )


def _runs(text: str, keep: str) -> list[tuple[bool, str]]:
    if text.isascii() and text.isprintable():
        return [(True, text)]
    return [(prints, "".join(run)) for prints, run in groupby(text, lambda each: each in keep or _prints(each))]


def _prints(character: str) -> bool:
    if character < "\u034f":
        return character.isprintable()
    is_blank = character in _BLANKS or any(first <= character <= last for first, last in _BLANK_SPANS)
    return character.isprintable() and not is_blank


def _escapes(run: str) -> str:
    return "".join(
        f"\\x{ord(each) - 0xDC00:02x}" if "\udc80" <= each <= "\udcff" else ascii(each).strip("'") for each in run
    )


_ROW = re.compile(r'<(?P<tag>tr|g) id="(?P<id>[^"]+)".*?</(?P=tag)>', re.DOTALL)
Sent = dict[str, tuple[int, dict[str, int]]]
"""Hash of each sent part without its rows, and of each row."""


def changes(name: str, html: str, sent: Sent) -> list[tuple[str, str]]:
    """Return a part's changed rows, the whole part, or nothing.

    A row is a ``tr``, or a ``g`` of a drawing, with an id. If rows were added or removed, the whole part is sent.
    """
    rows = {found["id"]: found[0] for found in _ROW.finditer(html)}
    around = hash(_ROW.sub(lambda found: f"\0{found['id']}", html))
    before, rows_before = sent.get(name, (None, {}))
    changed = [(row, outer) for row, outer in rows.items() if rows_before.get(row) != hash(outer)]
    sent[name] = around, {row: hash(outer) for row, outer in rows.items()}
    return changed if before == around else [(name, html)]


_TYPES = {"wald.css": "text/css", "wald.js": "text/javascript", "wald.svg": "image/svg+xml"}
_CONTENT = {name: files(__package__).joinpath("assets", name).read_bytes() for name in _TYPES}
BUILD = hashlib.sha256(b"".join(_CONTENT.values())).hexdigest()[:16]
"""Changes with the assets: pages of an older gate are reloaded, and browsers may cache the assets forever."""


async def asset(call: Call) -> Response:
    name = call.request.path_params["name"]
    if name not in _CONTENT:
        raise HttpError(404, "no-such-path", f"there is no {call.request.url.path}")
    headers = {"Cache-Control": "public, max-age=31536000, immutable"}
    return Response(_CONTENT[name], 200, headers, _TYPES[name])


@dataclass(frozen=True)
class Place:
    """A view in the navigation; its link is shown to clients with the right."""

    title: str
    path: str
    right: Right = Right.KNOWN


PLACES = (
    Place("Overview", "/"),
    Place("Routes", "/routes"),
    Place("Records", "/records"),
    Place("History", "/history", Right.ADMIN),
)
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
_PICTURES_PASSED_MAX = 5  # after failures, so that the browser still gets events
_log = logging.getLogger("wald_gate")
Facts = dict[str, Any]
"""Values of a template."""


async def page(call: Call, template: str, facts: Facts, *, status: int = 200) -> Response:
    """Render a page once; only the frame is live."""
    picture = await call.state.watching.picture()
    return _html(template, _of_frame(call, picture, live=f"{base_of(call.request)}live") | facts, status)


async def live_page(call: Call, template: str, facts: Callable[[PageSnapshot], Facts]) -> Response:
    """Render a page of the newest snapshot, or stream its changes if the client accepts events."""
    picture = await call.state.watching.picture()
    if EVENTS in call.request.headers.get("accept", ""):
        return Stream(_changes(call, template, facts), EVENTS, {**HEADERS, "X-Accel-Buffering": "no"})
    frame = _of_frame(call, picture, live=f"?{call.request.url.query}")  # the page itself
    return await call.read(lambda: _html(template, frame | facts(picture)))


async def only_frame(call: Call) -> Response:
    """Stream the changes of the frame for pages that are not live."""
    return await live_page(call, "frame.html", lambda _: {})


def failed(request: Request, error: Exception) -> Response:
    """Return an error as a page; an unknown client is redirected to the login form."""
    answer = problem(error)
    if answer.status_code == 401 and request.method in ("GET", "HEAD"):
        return redirect(request, "login")
    facts = {"problem": msgspec.json.decode(answer.body, type=Problem), "base": base_of(request)}
    response = _html("problem.html", facts, answer.status_code)
    response.headers.update({name: value for name, value in answer.headers.items() if name in _OF_PROBLEMS})
    return response


def bare(call: Call, template: str, facts: Facts, *, status: int = 200) -> Response:
    """Render a page without the frame, so it reveals nothing about the log."""
    return _html(template, {"base": base_of(call.request), **facts}, status)


def redirect(request: Request, path: str) -> Response:
    return RedirectResponse(base_of(request) + path, 303, HEADERS)


def base_of(request: Request) -> str:
    """Return the relative address of the overview, the prefix of all links.

    A proxy may have removed a prefix from the path, so the gate does not know any absolute address.
    """
    return "../" * (request.scope["path"].count("/") - 1) or "./"


async def _changes(call: Call, template: str, facts: Callable[[PageSnapshot], Facts]) -> AsyncGenerator[bytes]:
    """Yield the changed parts of each new snapshot, at the pace of the browser."""
    sent: Sent = {}
    number = due = failures = 0
    event: tuple[str, object]
    yield f"retry: 1000\nevent: hello\ndata: {BUILD}\n\n".encode()
    with call.state.watching.looked_at():
        while (picture := await call.state.watching.newer(number)) is not None:
            if call.state.rights.edition != call.edition:  # the browser reconnects and is checked against the new file
                break
            number = picture.number
            if number < due:
                continue
            try:
                event = "parts", await call.read(_changed, call, template, facts, picture, sent)
                failures = 0
            except (WaldError, OSError) as error:  # the next snapshot may work
                event = "problem", str(call.shown(error))
                failures = 0
            except Exception as error:  # noqa: BLE001 - a bug; the page then shows its age
                if not failures:
                    _log.exception("no page: %s", call.request.url.path)
                failures += 1
                due = number + min(2**failures, _PICTURES_PASSED_MAX)
                event = "failed", type(error).__name__
            yield b"event: %b\ndata: %b\n\n" % (event[0].encode(), msgspec.json.encode(event[1]))


def _changed(
    call: Call, name: str, facts: Callable[[PageSnapshot], Facts], picture: PageSnapshot, sent: Sent
) -> list[tuple[str, str]]:
    """Render the live blocks of a template and of the frame; ``sent`` has the parts of the browser."""
    template, frame = _ENVIRONMENT.get_template(name), _ENVIRONMENT.get_template("frame.html")
    context = template.new_context(_of_frame(call, picture, live="") | facts(picture))
    blocks = [each for each in (frame.blocks | template.blocks).items() if each[0].startswith(LIVE)]
    parts = [(block, "".join(render(context)).strip()) for block, render in blocks]
    return [change for part, html in parts for change in changes(part, html, sent)]


def _of_frame(call: Call, picture: PageSnapshot, *, live: str) -> Facts:
    return {
        "base": base_of(call.request),
        "client": call.client,
        "has_session": call.has_session,
        "here": call.request.url.path,
        "live": live,
        "picture": picture,
        "places": [place for place in PLACES if call.client.may(place.right, None)],
        "root": call.root,
    }


def _html(template: str, facts: Facts, status: int = 200) -> Response:
    return Response(_ENVIRONMENT.get_template(template).render(facts), status, HEADERS, HTML)


def _shown(value: object) -> object:
    """Return the value of a template expression; all text passes through :func:`visible`."""
    if value is None:
        return "–"
    return visible(value) if isinstance(value, str) and not isinstance(value, Markup) else value


def _about(seconds: float) -> str:
    """Format a duration in a single unit if possible, so that it does not change every second."""
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
_ENVIRONMENT.globals |= {"build": BUILD, "command_line": command_line}
_ENVIRONMENT.globals |= {  # not imported by templates: parts are made without the text outside of their blocks
    name: macro for name, macro in vars(_ENVIRONMENT.get_template("parts.html").module).items() if name[0] != "_"
}
