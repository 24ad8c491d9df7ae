"""A page in headless Chromium, driven over its DevTools protocol: enough to load a file, ask it questions and watch it."""

import base64
import itertools
import json
import shutil
import subprocess
import tempfile
import time
from pathlib import Path

BROWSER = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome", "chrome"))), None)


class Page:
    """One tab; `messages` and `requests` collect what the page logged and asked the network for."""

    def __init__(self, width=1280, height=900):
        import websocket

        self._profile = tempfile.TemporaryDirectory(ignore_cleanup_errors=True)
        self._log = (Path(self._profile.name) / "stderr").open("wb")
        self._process = subprocess.Popen(
            [
                BROWSER, "--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--no-first-run",
                "--disable-background-networking", "--disable-component-update", "--disable-extensions",
                "--remote-debugging-port=0", "--remote-allow-origins=*", f"--user-data-dir={self._profile.name}/data",
                f"--window-size={width},{height}", "about:blank",
            ],
            stdout=subprocess.DEVNULL,
            stderr=self._log,
        )  # fmt: skip
        self._numbers = itertools.count(1)
        self.messages, self.requests = [], []
        self._socket = websocket.create_connection(self._tab(), timeout=60, max_size=None)
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.call(f"{domain}.enable")
        self.resize(width, height)

    def _tab(self):
        import urllib.request

        port_file = Path(self._profile.name) / "data" / "DevToolsActivePort"
        for _ in range(300):
            if port_file.exists() and port_file.read_text().strip():
                port = port_file.read_text().split()[0]
                with urllib.request.urlopen(f"http://127.0.0.1:{port}/json", timeout=10) as answer:
                    tabs = [tab for tab in json.load(answer) if tab["type"] == "page"]
                if tabs:
                    return tabs[0]["webSocketDebuggerUrl"]
            time.sleep(0.1)
        raise RuntimeError("Chromium did not open its debugging port within 30 seconds")

    def call(self, method, **params):
        """One command of the protocol, and its answer."""
        number = next(self._numbers)
        self._socket.send(json.dumps({"id": number, "method": method, "params": params}))
        while True:
            message = json.loads(self._socket.recv())
            if message.get("id") == number:
                assert "error" not in message, message
                return message["result"]
            self._note(message)

    def _note(self, message):
        params = message.get("params", {})
        if message["method"] == "Network.requestWillBeSent":
            self.requests.append(params["request"]["url"])
        elif message["method"] == "Runtime.exceptionThrown":
            self.messages.append(params["exceptionDetails"].get("exception", {}).get("description", "exception"))
        elif message["method"] == "Runtime.consoleAPICalled" and params["type"] in {"error", "warning"}:
            self.messages.append(str([argument.get("value") for argument in params["args"]]))
        elif message["method"] == "Log.entryAdded" and params["entry"]["level"] in {"error", "warning"}:
            self.messages.append(params["entry"]["text"])

    def open(self, path):
        """Load a file and wait until its plots are drawn."""
        self.call("Page.navigate", url=Path(path).resolve().as_uri())
        self.wait("document.readyState === 'complete' && document.documentElement.hasAttribute('data-drawn')")

    def wait(self, condition, seconds=60):
        """Until a condition holds."""
        end = time.monotonic() + seconds
        while not self.ask(condition):
            assert time.monotonic() < end, f"{condition} did not come true; the page said {self.messages}"
            time.sleep(0.1)

    def ask(self, expression):
        """The value of a JavaScript expression."""
        answer = self.call("Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in answer, answer
        return answer["result"].get("value")

    def resize(self, width, height):
        """The window a person would have."""
        self.call(
            "Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=width < 700
        )

    def prefer(self, scheme):
        """Light or dark, as the system says."""
        self.call("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": scheme}])

    def press(self, key, code, text=""):
        """A key, down and up; `text` is what it types."""
        for kind in ("keyDown", "keyUp"):
            self.call("Input.dispatchKeyEvent", type=kind, key=key, code=key, windowsVirtualKeyCode=code, text=text)

    def screenshot(self, path):
        """The whole page as a picture."""
        size = self.call("Page.getLayoutMetrics")["cssContentSize"]
        clip = {"x": 0, "y": 0, "width": size["width"], "height": size["height"], "scale": 1}
        answer = self.call("Page.captureScreenshot", format="png", captureBeyondViewport=True, clip=clip)
        Path(path).write_bytes(base64.b64decode(answer["data"]))

    def close(self):
        """End the browser."""
        self._socket.close()
        self._process.terminate()
        try:
            self._process.wait(10)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._log.close()
        self._profile.cleanup()
