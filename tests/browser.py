"""A page in headless Chromium: drawn at a width, light or dark, and operated by keys.

    with Browser(folder) as browser:
        page = browser.open(path, width=400, dark=True)
        page.press("ArrowDown")
        assert page.ask("document.activeElement.id") == "tree"

It communicates with the browser by a pipe, so only the browser must be installed: Debian's package `chromium`.
"""

from __future__ import annotations

import base64
import json
import os
import select
import shutil
import subprocess
import time
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import pytest

__all__ = ["PATH", "Browser", "Page", "needs_browser"]

PATH = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
needs_browser = pytest.mark.skipif(PATH is None, reason="no Chromium is installed (Debian: apt-get install chromium)")

_DEADLINE_S = 60.0


class Browser:
    """Headless Chromium, as a context manager."""

    def __init__(self, folder: Path) -> None:
        """`folder` is for the browser's profile."""
        assert PATH is not None
        reads, self._writes = os.pipe()
        self._reads, writes = os.pipe()
        flags = ("--headless=new", "--no-sandbox", "--disable-gpu", "--no-first-run", "--hide-scrollbars")
        command = [PATH, *flags, f"--user-data-dir={folder}", "--remote-debugging-pipe", "about:blank"]
        self._process = subprocess.Popen(
            ["bash", "-c", f'exec "$@" 3<&{reads} 4>&{writes}', "bash", *command],  # where it expects its pipe
            pass_fds=(reads, writes),
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        os.close(reads)
        os.close(writes)
        self._rest, self._number = b"", 0
        self.events: list[dict[str, Any]] = []
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        self._session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Network"):
            self.call(f"{domain}.enable")

    def call(self, method: str, **params: Any) -> dict[str, Any]:
        """Return the browser's response to a method."""
        self._number += 1
        session = {"sessionId": self._session} if hasattr(self, "_session") else {}
        message = {"id": self._number, "method": method, "params": params, **session}
        os.write(self._writes, json.dumps(message).encode() + b"\0")
        while (answer := self._next()).get("id") != self._number:
            self.events.append(answer)
        assert "error" not in answer, (method, answer["error"])
        result: dict[str, Any] = answer["result"]
        return result

    def wait(self, event: str) -> None:
        """Wait until an event has occurred since the page was requested."""
        while all(one.get("method") != event for one in self.events):
            self.events.append(self._next())

    def _next(self) -> dict[str, Any]:
        end = time.monotonic() + _DEADLINE_S
        while b"\0" not in self._rest:
            if not select.select([self._reads], [], [], max(0.0, end - time.monotonic()))[0]:
                raise TimeoutError(f"Chromium said nothing for {_DEADLINE_S} s")
            data = os.read(self._reads, 1 << 20)
            if not data:
                raise RuntimeError(f"Chromium ended with code {self._process.wait()}")
            self._rest += data
        line, _, self._rest = self._rest.partition(b"\0")
        message: dict[str, Any] = json.loads(line)
        return message

    def open(self, path: Path, *, width: int = 1400, height: int = 900, dark: bool = False) -> Page:
        """Open a page from a file, and wait until all of its scripts have run."""
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.call("Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=False)
        self.call(
            "Emulation.setEmulatedMedia", features=[scheme, {"name": "prefers-reduced-motion", "value": "reduce"}]
        )
        self.events.clear()
        self.call("Page.navigate", url=path.absolute().as_uri())
        self.wait("Page.loadEventFired")
        return Page(self)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._process.kill()
        self._process.wait()
        os.close(self._reads)
        os.close(self._writes)


class Page:
    """An open page."""

    def __init__(self, browser: Browser) -> None:
        self._browser = browser

    def ask(self, expression: str) -> Any:
        """Return the value of a JavaScript expression."""
        answer = self._browser.call("Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in answer, answer["exceptionDetails"]
        return answer["result"].get("value")

    def press(self, *keys: str) -> None:
        """Press keys by name, one after another."""
        for key in keys:
            codes = {
                "windowsVirtualKeyCode": {"Tab": 9, "Enter": 13}.get(key, 0),
                "text": "\r" if key == "Enter" else "",
            }
            self._browser.call("Input.dispatchKeyEvent", type="keyDown", key=key, code=key, **codes)
            self._browser.call("Input.dispatchKeyEvent", type="keyUp", key=key, code=key)

    @property
    def errors(self) -> list[Any]:
        """Return the errors of scripts."""
        self.ask("1")
        return [e["params"] for e in self._browser.events if e.get("method") == "Runtime.exceptionThrown"]

    @property
    def fetched(self) -> list[str]:
        """Return the addresses of all requests."""
        seen = [e["params"] for e in self._browser.events if e.get("method") == "Network.requestWillBeSent"]
        return [one["request"]["url"] for one in seen]

    def picture(self, path: Path, *, whole: bool = False) -> None:
        """Save a picture of the visible part, or of the full page, in the format of the file's name."""
        options: dict[str, Any] = {"captureBeyondViewport": whole}
        if whole:
            size = self._browser.call("Page.getLayoutMetrics")["cssContentSize"]
            options["clip"] = {"x": 0, "y": 0, "width": size["width"], "height": size["height"], "scale": 1}
        options["format"] = path.suffix[1:]
        path.write_bytes(base64.b64decode(self._browser.call("Page.captureScreenshot", **options)["data"]))
