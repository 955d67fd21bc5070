"""A real headless Chromium, driven over its debugging pipe with nothing but the standard library."""

import base64
import contextlib
import itertools
import json
import os
import select
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import cv2
import numpy as np
import pytest

NAMES = ("chromium", "chromium-browser", "google-chrome-stable", "google-chrome")
# exec with the two ends of the pipe as file descriptors 3 and 4, where Chromium looks for them
AT_3_AND_4 = """
import os, sys
high = [os.dup(os.dup(os.dup(int(fd)))) for fd in sys.argv[1:3]]
for fd, place in zip(high, (3, 4)):
    os.dup2(fd, place)
os.execv(sys.argv[3], sys.argv[3:])
"""
KEYS = {
    "Tab": (9, ""),
    "Enter": (13, "\r"),
    " ": (32, " "),
    "End": (35, ""),
    "Home": (36, ""),
    "ArrowLeft": (37, ""),
    "ArrowUp": (38, ""),
    "ArrowRight": (39, ""),
    "ArrowDown": (40, ""),
}


def find_chromium():
    given = os.environ.get("PELLUCID_CHROMIUM")
    return given or next((path for path in map(shutil.which, NAMES) if path), None)


def install_chromium():
    """As root on Debian, once for all workers of the run; returns why not, or nothing."""
    if shutil.which("apt-get") is None or os.geteuid() != 0:
        return "no Chromium: install it (apt-get install chromium), or set PELLUCID_CHROMIUM to the program"
    import fcntl

    with open(Path(tempfile.gettempdir(), "pellucid-chromium.lock"), "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if find_chromium():
            return ""
        for command in (["update"], ["install", "-y", "--no-install-recommends", "chromium"]):
            environment = {**os.environ, "DEBIAN_FRONTEND": "noninteractive"}
            try:
                run = {"capture_output": True, "text": True, "timeout": 600, "env": environment}
                done = subprocess.run(["apt-get", *command], stdin=subprocess.DEVNULL, **run)
            except subprocess.TimeoutExpired:
                return f"no Chromium: apt-get {command[0]} did not end within ten minutes"
            if done.returncode:
                words = (done.stderr or done.stdout).strip().splitlines()[-1:]
                return f"no Chromium: apt-get {command[0]} failed: {' '.join(words)}"
    return "" if find_chromium() else "no Chromium: apt-get installed it, but it is not on the PATH"


class Browser:
    """One process of Chromium; speaks the DevTools protocol."""

    def __init__(self, program, home):
        there, self._write = os.pipe()
        self._read, here = os.pipe()
        options = ["--headless", "--no-sandbox", "--disable-gpu", "--remote-debugging-pipe", f"--user-data-dir={home}"]
        # no name is resolved, whatever a page asks for
        options += ["--host-resolver-rules=MAP * ~NOTFOUND", "--force-color-profile=srgb", "--hide-scrollbars"]
        # a container's shared memory is small
        options += ["--disable-dev-shm-usage"]
        self._process = subprocess.Popen(
            [sys.executable, "-S", "-c", AT_3_AND_4, str(there), str(here), program, *options, "about:blank"],
            pass_fds=(there, here),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        os.close(there)
        os.close(here)
        self._rest, self._ids, self.events = b"", itertools.count(1), []

    def call(self, method, session=None, **arguments):
        """Send a command and return its result; events that come in between are kept."""
        number = next(self._ids)
        message = {"id": number, "method": method, "params": arguments, **({"sessionId": session} if session else {})}
        os.write(self._write, json.dumps(message).encode() + b"\0")
        while True:
            answer = self._next()
            if answer.get("id") == number:
                assert "error" not in answer, f"{method}: {answer['error']}"
                return answer["result"]
            self.events.append(answer)

    def _next(self):
        while b"\0" not in self._rest:
            ready, _, _ = select.select([self._read], [], [], 60)
            assert ready, "Chromium does not answer"
            data = os.read(self._read, 1 << 20)
            assert data, "Chromium ended"
            self._rest += data
        message, _, self._rest = self._rest.partition(b"\0")
        return json.loads(message)

    def close(self):
        with contextlib.suppress(AssertionError, OSError):
            self.call("Browser.close")
        try:
            self._process.wait(10)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        os.close(self._write)
        os.close(self._read)


class Tab:
    """One page in a context of its own, offline, with everything it complains of or asks for."""

    def __init__(self, browser, *, width=1280, height=900):
        self._browser = browser
        self._context = browser.call("Target.createBrowserContext")["browserContextId"]
        target = browser.call("Target.createTarget", url="about:blank", browserContextId=self._context)["targetId"]
        self._session = browser.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.call(f"{domain}.enable")
        offline = {"latency": 0, "downloadThroughput": -1, "uploadThroughput": -1}
        self.call("Network.emulateNetworkConditions", offline=True, **offline)
        self.resize(width, height)

    def call(self, method, **arguments):
        return self._browser.call(method, self._session, **arguments)

    def close(self):
        self._browser.call("Target.disposeBrowserContext", browserContextId=self._context)

    def resize(self, width, height):
        self.call("Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=False)

    def media(self, *, kind="", **features):
        """``media(prefers_color_scheme="dark")``, ``media(kind="print")``."""
        chosen = [{"name": name.replace("_", "-"), "value": value} for name, value in features.items()]
        self.call("Emulation.setEmulatedMedia", media=kind, features=chosen)

    def open(self, path):
        answer = self.call("Page.navigate", url=Path(path).resolve().as_uri())
        assert not answer.get("errorText"), answer
        self.wait("document.readyState === 'complete'")
        self.settle()

    def evaluate(self, script):
        answer = self.call("Runtime.evaluate", expression=script, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in answer, answer["exceptionDetails"]
        return answer["result"].get("value")

    def wait(self, condition):
        until = time.monotonic() + 30
        while not self.evaluate(condition):
            assert time.monotonic() < until, f"never true: {condition}"
            time.sleep(0.02)

    def settle(self):
        """Until every picture is decoded and a frame is drawn."""
        decoded = "Promise.all([...document.images].map((image) => image.decode().catch(() => null)))"
        self.evaluate(
            f"{decoded}.then(() => new Promise((go) => requestAnimationFrame(() => requestAnimationFrame(go))))"
        )

    def text(self, selector):
        return self.evaluate(f"document.querySelector({json.dumps(selector)}).innerText")

    def box(self, selector):
        """x, y, width, height in the window, scrolled into sight."""
        element = f"document.querySelector({json.dumps(selector)})"
        found = "const b = e.getBoundingClientRect(); return [b.x, b.y, b.width, b.height]"
        return self.evaluate(f"(() => {{ const e = {element}; e.scrollIntoView({{block: 'nearest'}}); {found} }})()")

    def click(self, selector):
        x, y, width, height = self.box(selector)
        self.drag((x + width / 2, y + height / 2))

    def drag(self, start, *stops):
        """Press at the first place, move over the others, let go at the last."""
        press = {"button": "left", "clickCount": 1}
        mouse = "Input.dispatchMouseEvent"
        for kind, (x, y) in [("mouseMoved", start), ("mousePressed", start), *(("mouseMoved", stop) for stop in stops)]:
            self.call(
                mouse,
                type=kind,
                x=x,
                y=y,
                **({"button": "left", "buttons": 1} if kind == "mouseMoved" and stops else press),
            )
        end = stops[-1] if stops else start
        self.call(mouse, type="mouseReleased", x=end[0], y=end[1], **press)
        self.settle()

    def wheel(self, place, delta):
        x, y = place
        self.call("Input.dispatchMouseEvent", type="mouseWheel", x=x, y=y, deltaX=0, deltaY=delta)
        self.settle()

    def press(self, *keys):
        for key in keys:
            code, typed = KEYS.get(key, (ord(key.upper()[0]), key))
            facts = {"key": key, "windowsVirtualKeyCode": code, **({"text": typed} if typed else {})}
            self.call("Input.dispatchKeyEvent", type="keyDown", **facts)
            self.call("Input.dispatchKeyEvent", type="keyUp", key=key, windowsVirtualKeyCode=code)
        self.settle()

    def choose(self, selector, value):
        """Choose an entry of a list, as a user's choice makes itself known."""
        change = "for (const k of ['input', 'change']) e.dispatchEvent(new Event(k, {bubbles: true}))"
        element = f"document.querySelector({json.dumps(selector)})"
        self.evaluate(f"(() => {{ const e = {element}; e.value = {json.dumps(value)}; {change} }})()")
        assert self.evaluate(f"{element}.value") == value
        self.settle()

    def screenshot(self, selector=None, *, whole=False):
        """(h, w, 3), uint8, RGB: of the window, of an element, or of the whole page."""
        area = {}
        if selector is not None:
            x, y, width, height = self.box(selector)
            scroll_x, scroll_y = self.evaluate("[scrollX, scrollY]")
            area = {"clip": {"x": x + scroll_x, "y": y + scroll_y, "width": width, "height": height, "scale": 1}}
        data = self.call("Page.captureScreenshot", format="png", captureBeyondViewport=whole, **area)["data"]
        return cv2.imdecode(np.frombuffer(base64.b64decode(data), np.uint8), cv2.IMREAD_COLOR)[..., ::-1]

    def complaints(self):
        """Errors and warnings of the console, exceptions, and entries of the browser's own log."""
        found = []
        for event in self._own_events():
            kind, facts = event["method"], event["params"]
            if kind == "Runtime.exceptionThrown":
                found.append(facts["exceptionDetails"]["text"])
            elif kind == "Runtime.consoleAPICalled" and facts["type"] in ("error", "warning", "assert"):
                found.append(str(facts["args"]))
            elif kind == "Log.entryAdded" and facts["entry"]["level"] in ("error", "warning"):
                found.append(facts["entry"]["text"])
        return found

    def requests(self):
        """The addresses that the page asked for, data: ones cut short."""
        sent = [event for event in self._own_events() if event["method"] == "Network.requestWillBeSent"]
        return [event["params"]["request"]["url"][:300] for event in sent]

    def _own_events(self):
        self.evaluate("0")  # what was on its way has come then
        return [event for event in self._browser.events if event.get("sessionId") == self._session]


@pytest.fixture(scope="session")
def browser(tmp_path_factory):
    """Chromium: that of PELLUCID_CHROMIUM or of the PATH, or else installed where that can be done."""
    if os.environ.get("PELLUCID_CHROMIUM") == "":
        pytest.skip("PELLUCID_CHROMIUM is empty, so no browser is looked for")
    why = "" if find_chromium() else install_chromium()
    if why:
        pytest.skip(why)
    opened = Browser(find_chromium(), tmp_path_factory.mktemp("chromium"))
    yield opened
    opened.close()


@pytest.fixture
def tab(browser):
    """A fresh tab without network."""
    opened = Tab(browser)
    yield opened
    opened.close()


@pytest.fixture(scope="session")
def axe():
    """The source of axe-core, the accessibility checker: of PELLUCID_AXE, or of the package of the extra [test]."""
    if os.environ.get("PELLUCID_AXE"):
        return Path(os.environ["PELLUCID_AXE"]).read_text(encoding="utf-8")
    package = pytest.importorskip("axe_core_python", reason="axe-core is not installed (the extra [test] brings it)")
    return Path(package.__path__[0], "axe.min.js").read_text(encoding="utf-8")
