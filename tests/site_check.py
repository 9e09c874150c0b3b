"""The site check: every page, as a browser shows it.

    python tests/site_check.py SITE SHOTS

Headless Chromium opens each page under SITE at the widths of a desk and of a telephone, in light and in dark. Errors on
the console, requests to other hosts, and text that makes the page scroll sideways are printed, one line each (page,
what), and the exit code is 1 if there are any. Screenshots lie in SHOTS, as PAGE-WIDTH-SCHEME.jpg. Where there is no
browser, one line says so. Nothing but Python's own library is needed: the browser is spoken to through two pipes.
"""

import base64
import fcntl
import itertools
import json
import os
import shutil
import subprocess
import sys
import tempfile
import threading
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

NAMES = ["chromium", "chromium-browser", "google-chrome", "google-chrome-stable", "chrome"]
FLAGS = "--headless --remote-debugging-pipe --no-first-run --disable-gpu --disable-dev-shm-usage --hide-scrollbars"
SIZES = {1280: 900, 390: 844}  # widths in CSS pixels, with the height of what is seen at once
SCHEMES = ["light", "dark"]
TALLEST = 16_000  # pixels of a screenshot; a page may be longer
WIDE = """(() => {
  const width = document.documentElement.clientWidth;
  if (document.documentElement.scrollWidth <= width) return "";
  const shut = e => e && e !== document.body && (getComputedStyle(e).overflowX !== "visible" || shut(e.parentElement));
  const out = [...document.querySelectorAll("main *")].find(
    e => e.getBoundingClientRect().right > width + 1 && !shut(e.parentElement));
  return `${document.documentElement.scrollWidth} px wide` +
    (out ? `: <${out.tagName.toLowerCase()}> ${out.textContent.trim().slice(0, 40)}` : "");
})()"""


class Browser:
    """A headless Chromium with one tab; `events` are what it has told since they were last emptied."""

    def __init__(self, program: str, profile: str):
        (read, to_it), (from_it, write) = os.pipe(), os.pipe()
        theirs = [fcntl.fcntl(end, fcntl.F_DUPFD, 10) for end in (read, write)]
        flags = [*FLAGS.split(), f"--user-data-dir={profile}", *["--no-sandbox"] * (os.geteuid() == 0)]
        self.process = subprocess.Popen(
            [program, *flags, "about:blank"],
            preexec_fn=lambda: [os.dup2(end, at) for end, at in zip(theirs, (3, 4), strict=True)],
            close_fds=False,
            stderr=subprocess.DEVNULL,
        )
        for end in (read, write, *theirs):
            os.close(end)
        self.to_it, self.from_it, self.heard = os.fdopen(to_it, "wb", buffering=0), from_it, b""
        self.number, self.session, self.events = itertools.count(1), {}, []
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        self.session = {"sessionId": self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]}
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.call(f"{domain}.enable")

    def hear(self) -> dict:
        """The next message."""
        while b"\0" not in self.heard:
            if not (more := os.read(self.from_it, 1 << 16)):
                raise SystemExit("the browser has gone")
            self.heard += more
        message, _, self.heard = self.heard.partition(b"\0")
        return json.loads(message)

    def call(self, method: str, **params) -> dict:
        """Ask for something, and wait for the answer."""
        number = next(self.number)
        request = {"id": number, "method": method, "params": params, **self.session}
        self.to_it.write(json.dumps(request).encode() + b"\0")
        while (message := self.hear()).get("id") != number:
            self.events.append(message)
        if "error" in message:
            raise SystemExit(f"{method}: {message['error']['message']}")
        return message["result"]

    def open(self, url: str, width: int, scheme: str):
        """Show a page, and wait until it is loaded."""
        size = {"width": width, "height": SIZES[width], "deviceScaleFactor": 1, "mobile": width < 500}
        self.call("Emulation.setDeviceMetricsOverride", **size)
        self.call("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": scheme}])
        self.events.clear()
        self.call("Page.navigate", url=url)
        while not any(event.get("method") == "Page.loadEventFired" for event in self.events):
            self.events.append(self.hear())

    def evaluate(self, expression: str):
        """The value of an expression on the page."""
        return self.call("Runtime.evaluate", expression=expression, returnByValue=True)["result"].get("value")

    def picture(self) -> bytes:
        """The whole page as a JPEG, cut where it is too tall."""
        size = self.call("Page.getLayoutMetrics")["cssContentSize"]
        clip = {"x": 0, "y": 0, "width": size["width"], "height": min(size["height"], TALLEST), "scale": 1}
        shot = self.call("Page.captureScreenshot", format="jpeg", quality=75, clip=clip, captureBeyondViewport=True)
        return base64.b64decode(shot["data"])

    def close(self):
        """End the browser."""
        self.to_it.close()
        self.process.wait(30)


def complaint(event: dict, home: str) -> str:
    """What is wrong in one event of the browser, or nothing."""
    method, given = event.get("method"), event.get("params", {})
    if method == "Runtime.exceptionThrown":
        details = given["exceptionDetails"]
        return f"a script failed: {details.get('exception', {}).get('description', details['text']).splitlines()[0]}"
    if method == "Runtime.consoleAPICalled" and given["type"] in ("error", "assert"):
        return f"on the console: {' '.join(str(a.get('value', a.get('description'))) for a in given['args'])}"
    if method == "Log.entryAdded" and given["entry"]["level"] == "error":
        return f"on the console: {given['entry']['text']} {given['entry'].get('url', '').removeprefix(home)}".strip()
    if method == "Network.requestWillBeSent":
        url = given["request"]["url"]
        return "" if url.startswith((home, "data:", "blob:", "about:")) else f"asks another host: {url}"
    return ""


def look(tab: Browser, home: str, page: str, shots: Path) -> list[str]:
    """Open a page in each width and scheme; the findings."""
    findings = {}
    for width, scheme in itertools.product(SIZES, SCHEMES):
        tab.open(home + page, width, scheme)
        wide = tab.evaluate(WIDE)
        said = [*filter(None, (complaint(event, home) for event in tab.events))]
        findings |= dict.fromkeys(said + [f"scrolls sideways at {width} px, {wide}"] * bool(wide))
        name = page.removesuffix(".html").replace("/", "-")
        (shots / f"{name}-{width}-{scheme}.jpg").write_bytes(tab.picture())
    return [f"{page}: {what}" for what in findings]


class Quiet(SimpleHTTPRequestHandler):
    """Serves files and says nothing."""

    def log_message(self, *_):
        pass


def check(site: Path, shots: Path, program: str) -> list[str]:
    """Look at every page of a site; the findings."""
    shutil.rmtree(shots, ignore_errors=True)
    shots.mkdir(parents=True)
    pages = sorted(str(p.relative_to(site)) for p in site.rglob("*.html") if "site_libs" not in p.parts)
    findings = [] if pages else [f"{site.name}: there are no pages"]
    with (
        ThreadingHTTPServer(("127.0.0.1", 0), partial(Quiet, directory=site)) as server,
        tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as profile,
    ):
        threading.Thread(target=server.serve_forever, daemon=True).start()
        tab = Browser(program, profile)
        try:
            for page in pages:
                findings += look(tab, f"http://127.0.0.1:{server.server_port}/", page, shots)
        finally:
            tab.close()
            server.shutdown()
    print(f"{len(pages)} pages seen, {len(pages) * len(SIZES) * len(SCHEMES)} screenshots")
    return findings


def browser() -> str | None:
    """The Chromium of this machine."""
    return next(filter(None, map(shutil.which, NAMES)), None)


def main():
    if not (program := browser()):
        return print(f"the site is not looked at: there is no browser ({', '.join(NAMES)})")
    findings = check(Path(sys.argv[1]).resolve(), Path(sys.argv[2]), program)
    print(*findings, f"{len(findings)} findings; the screenshots are in {os.path.relpath(sys.argv[2])}", sep="\n")
    sys.exit(bool(findings))


if __name__ == "__main__":
    main()
