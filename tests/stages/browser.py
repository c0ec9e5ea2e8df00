"""A real browser, headless Chromium, which reaches this machine and nothing else."""

import shutil
import time
from collections.abc import Iterator
from typing import Any

import pytest

CHROMIUM = shutil.which("chromium") or shutil.which("google-chrome")
#: A site of somebody else's, whose name was made to point at this machine.
FOREIGN = "foreign.example"
RULES = f"MAP {FOREIGN} 127.0.0.1, MAP * ~NOTFOUND, EXCLUDE 127.0.0.1"


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    if CHROMIUM is None:
        pytest.skip("there is no Chromium here")
    from playwright.sync_api import sync_playwright

    with sync_playwright() as library:
        arguments = ["--no-sandbox", f"--host-resolver-rules={RULES}"]
        started = library.chromium.launch(executable_path=CHROMIUM, args=arguments)
        yield started
        started.close()


def note_errors(page: Any) -> list[str]:
    """Errors of the page's scripts, and what its console has as errors, as they come."""
    errors: list[str] = []
    page.on("pageerror", lambda error: errors.append(str(error)))
    page.on("console", lambda message: errors.append(message.text) if message.type == "error" else None)
    return errors


def until(page: Any, condition: str, seconds: float = 60.0) -> None:
    """Wait for a condition. Playwright's own way evaluates text on the page, which a page's policy may forbid."""
    end = time.monotonic() + seconds
    while not page.evaluate(condition):
        assert time.monotonic() < end, f"not within {seconds:g} s: {condition}"
        time.sleep(0.05)
