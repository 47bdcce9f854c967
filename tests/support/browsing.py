"""Debian's Chromium, and visits to a page with it that fail on any fault.

A visit records forbidden events: an error in the console (such as a breach of the Content-Security-Policy), an
exception, a dialog, another window, or a request to another server. The browser ends with the process that started it.
"""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Self

from running import TIMEOUT_SECONDS

if TYPE_CHECKING:
    from playwright.sync_api import (
        Browser,
        BrowserContext,
        ConsoleMessage,
        Dialog,
        Page,
        Request,
        ViewportSize,
    )

DESK: ViewportSize = {"width": 1440, "height": 900}
PHONE: ViewportSize = {"width": 390, "height": 844}
_FLAGS = (
    "--no-sandbox",  # the tests may run as root
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
)
_OWN_SCHEMES = ("data:", "blob:", "about:")


def lack() -> str:
    """Return the reason why no browser is available; "" if one is, or if one is required."""
    if shutil.which("chromium") or os.environ.get("CHROMIUM_REQUIRED"):
        return ""
    return "needs apt-get install chromium"


class Visit:
    """A separate tab without state from earlier visits."""

    def __init__(self, context: BrowserContext, origin: str) -> None:
        self.faults: list[str] = []
        self._origin = origin
        self._context = context
        context.set_default_timeout(TIMEOUT_SECONDS * 1000)
        context.on("request", self._on_request)
        context.on("dialog", self._on_dialog)
        context.on("console", self._on_console)
        context.on("weberror", lambda error: self.faults.append(f"thrown: {error.error}"))
        self.page: Page = context.new_page()
        context.on("page", lambda page: self.faults.append(f"another window: {page.url}"))

    def require_no_faults(self, allowed: str | None) -> None:
        """Fail if anything happened that must not, and does not match ``allowed``."""
        faults = [each for each in self.faults if not (allowed and re.search(allowed, each))]
        assert not faults, "\n".join(faults)

    def _on_request(self, request: Request) -> None:
        if not request.url.startswith((self._origin, *_OWN_SCHEMES)):
            self.faults.append(f"asked elsewhere: {request.url[:200]}")

    def _on_dialog(self, dialog: Dialog) -> None:
        self.faults.append(f"a dialog: {dialog.message}")
        dialog.dismiss()

    def _on_console(self, message: ConsoleMessage) -> None:
        if message.type in ("error", "warning"):
            self.faults.append(f"{message.type} in the console: {message.text} ({message.location['url']})")


class Chromium:
    """The headless browser with an empty profile; leaving a ``with`` block closes it."""

    def __enter__(self) -> Self:
        from playwright.sync_api import sync_playwright  # slow to import, and most workers start no browser

        self._manager = sync_playwright()
        driver = self._manager.start()
        try:
            path = shutil.which("chromium") or "/usr/bin/chromium"
            self.browser: Browser = driver.chromium.launch(executable_path=path, args=list(_FLAGS))
        except BaseException:
            driver.stop()
            raise
        self._driver = driver
        return self

    def __exit__(self, *_: object) -> None:
        self.browser.close()
        self._driver.stop()

    @contextmanager
    def visit(
        self,
        origin: str,
        *,
        size: ViewportSize = DESK,
        dark: bool = False,
        javascript: bool = True,
        allowed: str | None = None,
        cookies: Sequence[Any] = (),
    ) -> Iterator[Visit]:
        """Visit a server; fail at the end if a forbidden event happened."""
        context = self.browser.new_context(
            base_url=origin,
            viewport=size,
            color_scheme="dark" if dark else "light",
            java_script_enabled=javascript,
            reduced_motion="reduce",
        )
        try:
            context.add_cookies(cookies)
            visit = Visit(context, origin)
            yield visit
            visit.require_no_faults(allowed)
        finally:
            context.close()
