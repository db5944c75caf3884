"""A headless Chromium for tests of pages.

Where there is none they are skipped, and say so; with EQUIPOISE_NEEDS_CHROMIUM set, as in .ci/run, they fail instead.
"""

import os
import shutil
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from playwright.sync_api import Browser, Page, sync_playwright

from tests.support.waiting import LIMIT

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
# It must not look for updates or anything else: the tests count requests.
QUIET = ("--disable-gpu", "--disable-background-networking", "--disable-component-update", "--disable-sync")


@pytest.fixture(scope="session")
def chromium() -> Iterator[Browser]:
    path = next((found for name in NAMES if (found := shutil.which(name))), None)
    if path is None:
        if os.environ.get("EQUIPOISE_NEEDS_CHROMIUM"):
            pytest.fail(f"none of {', '.join(NAMES)} is installed")
        pytest.skip("needs Chromium, and none is installed")
    sandbox = ["--no-sandbox"] if os.geteuid() == 0 else []
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(
            executable_path=path, args=[*QUIET, "--no-first-run", *sandbox], timeout=1000 * LIMIT
        )
        yield browser
        browser.close()


@dataclass
class Opened:
    """A page, and what happened to it."""

    page: Page
    errors: list[str] = field(default_factory=list)
    requests: list[str] = field(default_factory=list)


def open_page(browser: Browser, path: Path, width: int = 1200, height: int = 900, scheme: str = "light") -> Opened:
    context = browser.new_context(viewport={"width": width, "height": height}, color_scheme=scheme)  # type: ignore[arg-type]
    context.set_default_timeout(1000 * LIMIT)
    opened = Opened(context.new_page())
    page = opened.page
    page.on("console", lambda said: opened.errors.append(said.text) if said.type in ("error", "warning") else None)
    page.on("pageerror", lambda error: opened.errors.append(str(error)))
    page.on("dialog", lambda dialog: (opened.errors.append(f"dialog: {dialog.message}"), dialog.dismiss()))
    page.on("request", lambda request: opened.requests.append(request.url))
    page.goto(path.as_uri())
    page.wait_for_selector("html[data-ready]", state="attached")
    return opened
