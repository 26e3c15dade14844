"""Chromium as a reader has it: pages from files, at a width, light or dark, with every request written down."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)


@dataclass
class Opened:
    page: Any
    requests: list[str] = field(default_factory=list)
    blocked: list[str] = field(default_factory=list)  # by the page's own policy, before they left
    messages: list[str] = field(default_factory=list)  # of the console: blocked resources, errors
    dialogs: list[str] = field(default_factory=list)


@dataclass
class Browser:
    chromium: Any

    @contextmanager
    def open(self, path: Path, width: int = 800, dark: bool = False) -> Iterator[Opened]:
        scheme = "dark" if dark else "light"
        context = self.chromium.new_context(viewport={"width": width, "height": 900}, color_scheme=scheme)
        page = context.new_page()
        opened = Opened(page)
        page.on("request", lambda request: opened.requests.append(request.url))
        page.on("requestfailed", lambda r: opened.blocked.append(r.url) if r.failure == "csp" else None)
        page.on("console", lambda message: opened.messages.append(message.text))
        page.on("pageerror", lambda error: opened.messages.append(str(error)))
        page.on("dialog", lambda dialog: (opened.dialogs.append(dialog.message), dialog.dismiss()))
        page.goto(path.resolve().as_uri())
        yield opened
        context.close()


@contextmanager
def chromium() -> Iterator[Browser]:
    """Debian's Chromium, driven by playwright; a reason where one of them is missing."""
    playwright = pytest.importorskip("playwright.sync_api", reason="pages are opened with playwright")
    if CHROMIUM is None:
        pytest.skip("no Chromium here: apt-get install chromium")
    with playwright.sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield Browser(browser)
        browser.close()
