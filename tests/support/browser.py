"""A headless Chromium, driven by its DevTools protocol: what a page shows, and whether it fits on a screen."""

import base64
import itertools
import json
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.request import urlopen

import pytest
from websockets.sync.client import ClientConnection, connect

from tests.support.progress import Deadlock, wait_until

DESKTOP, PHONE = 1280, 375  # widths of a window in pixels
NAMES = ("chromium", "chromium-browser", "google-chrome", "chrome")


def find_chromium() -> str:
    """Return the browser's path; skip the test if there is none."""
    found = next((path for name in NAMES if (path := shutil.which(name))), None)
    if found is None:
        pytest.skip("no Chromium is installed")
    return found


@contextmanager
def open_browser(folder: Path) -> Iterator["Page"]:
    """Start a browser with an empty profile in `folder`, and yield its page."""
    options = ["--headless", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--remote-debugging-port=0"]
    command = [find_chromium(), *options, f"--user-data-dir={folder / 'profile'}", "about:blank"]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        urls: list[str] = []
        wait_until(lambda: process.poll() is not None or urls.extend(_page_urls(folder / "profile")) or urls)
        assert urls, f"the browser ended with exit code {process.returncode}"
        with connect(urls[0], max_size=None, open_timeout=None, ping_interval=None) as connection:
            yield Page(connection)
    finally:
        process.terminate()
        process.wait()


class CommandError(AssertionError):
    """The browser can't carry out a command, e.g. as the page is between two documents."""


class Page:
    """One page of the browser."""

    def __init__(self, connection: ClientConnection) -> None:
        self._connection, self._numbers = connection, itertools.count(1)
        self.requests: list[str] = []  # the URLs that it has asked for
        self.errors: list[str] = []  # uncaught exceptions and messages of the console's level error
        for domain in ("Page", "Runtime", "Network", "Log"):
            self.command(f"{domain}.enable")

    def open(self, url: str, width: int = DESKTOP, height: int = 900) -> None:
        """Load a page in a window of this size."""
        self.resize(width, height)
        self.evaluate("window.isLeft = true")  # of the document before, which may still be there for a moment
        self.command("Page.navigate", url=url)
        self.wait_for("!window.isLeft && document.readyState === 'complete'")

    def resize(self, width: int, height: int = 900) -> None:
        """Change the window's size; a narrow one is a phone's."""
        self._width = width
        size = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": width < 500}
        self.command("Emulation.setDeviceMetricsOverride", **size)

    def evaluate(self, expression: str) -> Any:
        """Return the value of a JavaScript expression."""
        answer = self.command("Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in answer, answer
        return answer["result"].get("value")

    def wait_for(self, expression: str) -> None:
        """Wait until a JavaScript expression is true."""
        try:
            wait_until(lambda: self._is_true(expression))
        except Deadlock as deadlock:
            deadlock.add_note(f"{expression} stayed false; the page says: {self.text()[:500]}")
            raise

    def _is_true(self, expression: str) -> bool:
        try:
            return bool(self.evaluate(expression))
        except CommandError:  # the next document is about to be there
            return False

    def text(self) -> str:
        """Return the text that the page shows."""
        return str(self.evaluate("document.body.innerText"))

    def overflow(self) -> int:
        """Return how many pixels the page is wider than the window."""
        return int(self.evaluate("document.documentElement.scrollWidth")) - self._width

    def screenshot(self, path: Path) -> None:
        """Write a picture of the whole page, as PNG."""
        size = self.command("Page.getLayoutMetrics")["cssContentSize"]
        clip = {"x": 0, "y": 0, "width": size["width"], "height": size["height"], "scale": 1}
        answer = self.command("Page.captureScreenshot", captureBeyondViewport=True, clip=clip)
        path.write_bytes(base64.b64decode(answer["data"]))

    def command(self, method: str, **parameters: Any) -> dict[str, Any]:
        """Send a command, and return its result; events that arrive meanwhile are recorded."""
        number = next(self._numbers)
        self._connection.send(json.dumps({"id": number, "method": method, "params": parameters}))
        while True:
            message = json.loads(self._connection.recv())
            if message.get("id") == number:
                if "error" in message:
                    raise CommandError(f"{method}: {message['error']}")
                return dict(message["result"])
            self._record(message.get("method"), message.get("params", {}))

    def _record(self, event: str | None, parameters: dict[str, Any]) -> None:
        if event == "Network.requestWillBeSent":
            self.requests.append(parameters["request"]["url"])
        elif event == "Runtime.exceptionThrown":
            self.errors.append(str(parameters["exceptionDetails"]))
        elif event == "Log.entryAdded" and parameters["entry"]["level"] == "error":
            self.errors.append(parameters["entry"]["text"])


def _page_urls(profile: Path) -> list[str]:
    """Return the addresses of the browser's pages; it has none while it starts."""
    try:
        port, _, _ = (profile / "DevToolsActivePort").read_text().partition("\n")
        with urlopen(f"http://127.0.0.1:{port}/json/list") as answer:
            return [target["webSocketDebuggerUrl"] for target in json.load(answer) if target["type"] == "page"]
    except OSError:
        return []
