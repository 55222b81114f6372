"""A headless Chromium, spoken to in the DevTools protocol over a pair of pipes."""

import fcntl
import itertools
import json
import os
import select
import shutil
import subprocess
import time
from pathlib import Path
from types import TracebackType
from typing import Any, Self

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
PATIENCE = 60.0


class Browser:
    """One browser with one page. Commands wait for their answer; events are kept."""

    def __init__(self, profile: Path) -> None:
        assert CHROMIUM is not None
        commands, self._commands = os.pipe()
        self._answers, answers = os.pipe()
        # Chromium reads from 3 and writes to 4; numbers from 10 on cannot be in bash's way when it moves them there
        inherited = [fcntl.fcntl(end, fcntl.F_DUPFD, 10) for end in (commands, answers)]
        options = (
            "--headless", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--remote-debugging-pipe",
            "--disable-background-networking", "--no-first-run", "--hide-scrollbars", f"--user-data-dir={profile}",
        )  # fmt: skip
        script = f'exec "$@" 3<&{inherited[0]} 4>&{inherited[1]}'
        self._process = subprocess.Popen(
            ["bash", "-c", script, "bash", CHROMIUM, *options, "about:blank"],
            pass_fds=inherited, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
        )  # fmt: skip
        for end in (commands, answers, *inherited):
            os.close(end)
        self._numbers, self._unread, self._session = itertools.count(1), b"", ""
        self.events: list[dict[str, Any]] = []
        targets = self.call("Target.getTargets")["targetInfos"]
        page = next(target["targetId"] for target in targets if target["type"] == "page")
        self._session = self.call("Target.attachToTarget", targetId=page, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.call(f"{domain}.enable")

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._process.terminate()
        self._process.wait(PATIENCE)
        os.close(self._commands)
        os.close(self._answers)

    def call(self, method: str, **parameters: Any) -> dict[str, Any]:
        """A command and its result."""
        number = next(self._numbers)
        message = {"id": number, "method": method, "params": parameters}
        if self._session:
            message["sessionId"] = self._session
        os.write(self._commands, json.dumps(message).encode() + b"\0")
        while (answer := self._read()).get("id") != number:
            self.events.append(answer)
        if "error" in answer:
            raise RuntimeError(f"{method}: {answer['error']}")
        return answer["result"]

    def open(self, file: Path) -> None:
        """A file, until it was loaded."""
        self.events.clear()
        self.call("Page.navigate", url=file.resolve().as_uri())
        while not any(event.get("method") == "Page.loadEventFired" for event in self.events):
            self.events.append(self._read())

    def evaluate(self, expression: str) -> Any:
        """The value of an expression in the page."""
        found = self.call("Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True)
        if "exceptionDetails" in found:
            raise RuntimeError(f"{expression}: {found['exceptionDetails']}")
        return found["result"].get("value")

    def press(self, key: str) -> None:
        """A key, down and up."""
        code = {"ArrowLeft": 37, "ArrowRight": 39, "Enter": 13}[key]
        text = {"text": "\r"} if key == "Enter" else {}
        for kind in ("keyDown", "keyUp"):
            self.call("Input.dispatchKeyEvent", type=kind, key=key, code=key, windowsVirtualKeyCode=code, **text)

    def click(self, selector: str) -> None:
        """The middle of an element, with the mouse."""
        middle = f"""(() => {{ const e = document.querySelector({json.dumps(selector)});
            e.scrollIntoView({{block: "center", behavior: "instant"}}); const r = e.getBoundingClientRect();
            return [r.x + r.width / 2, r.y + r.height / 2]; }})()"""
        x, y = self.evaluate(middle)
        for kind in ("mousePressed", "mouseReleased"):
            self.call("Input.dispatchMouseEvent", type=kind, x=x, y=y, button="left", clickCount=1)

    def window(self, width: int, height: int, *, dark: bool = False) -> None:
        """The size of the page and its colour scheme."""
        phone = width < 600
        self.call(
            "Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=phone
        )  # fmt: skip
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.call("Emulation.setEmulatedMedia", features=[scheme])

    def complaints(self) -> list[dict[str, Any]]:
        """Exceptions, errors on the console, and anything that was fetched but the file itself."""
        self.evaluate("new Promise(resolve => setTimeout(resolve, 50))")
        bad = ("Runtime.exceptionThrown", "Log.entryAdded", "Network.loadingFailed")
        found = [e for e in self.events if e.get("method") in bad]
        found += [e for e in self.events if e.get("method") == "Runtime.consoleAPICalled"]
        requests = [e for e in self.events if e.get("method") == "Network.requestWillBeSent"]
        return found + requests[1:]

    def _read(self) -> dict[str, Any]:
        deadline = time.monotonic() + PATIENCE
        while b"\0" not in self._unread:
            ready, _, _ = select.select([self._answers], [], [], max(0.0, deadline - time.monotonic()))
            chunk = os.read(self._answers, 1 << 20) if ready else b""
            if not chunk:
                raise RuntimeError("Chromium does not answer" if not ready else "Chromium has gone")
            self._unread += chunk
        message, self._unread = self._unread.split(b"\0", 1)
        found: dict[str, Any] = json.loads(message)
        return found
