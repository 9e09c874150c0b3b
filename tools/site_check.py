"""The site check: every page, as a browser shows it.

    python tools/site_check.py SITE SHOTS

Playwright drives the Chromium of this machine. Each page under SITE is opened at the width of a desk and of a
telephone, in light and in dark. These are findings, one line each (page, what), and with any the exit code is 1:

- errors on the console and requests to other hosts;
- text that makes the page scroll sideways (which no library looks for: WIDE below);
- what axe-core calls serious or critical for readers with a disability, contrast among it;
- links and anchors that lead nowhere on the site.

Screenshots lie in SHOTS, as PAGE-WIDTH-SCHEME.jpg. Where there is no Chromium, one line says so and nothing is looked
at; in CI (the variable CI is set) that is an error.
"""

import itertools
import os
import shutil
import sys
import threading
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import unquote, urlsplit

import book
import lxml.html
from axe_playwright_python.sync_playwright import Axe
from playwright.sync_api import Browser, Page, sync_playwright

NAMES = ["chromium", "chromium-browser", "google-chrome", "google-chrome-stable", "chrome"]
SIZES = {1280: 900, 390: 844}  # widths in CSS pixels, with the height of what is seen at once
SCHEMES = ["light", "dark"]
JUDGED = [(1280, "light"), (390, "dark")]  # what axe sees: each width and each scheme once, since it takes seconds
GRAVE = ("serious", "critical")  # in axe's words; what it calls minor or moderate is not a finding
TALLEST = 16_000  # pixels of a screenshot; a page may be longer
PATIENCE = 120_000  # milliseconds for a page to load
WIDE = """() => {
  const width = document.documentElement.clientWidth;
  if (document.documentElement.scrollWidth <= width) return "";
  const shut = e => e && e !== document.body && (getComputedStyle(e).overflowX !== "visible" || shut(e.parentElement));
  const out = [...document.querySelectorAll("main *")].find(
    e => e.getBoundingClientRect().right > width + 1 && !shut(e.parentElement));
  return `${document.documentElement.scrollWidth} px wide` +
    (out ? `: <${out.tagName.toLowerCase()}> ${out.textContent.trim().slice(0, 40)}` : "");
}"""


def listen(tab: Page, home: str, say):
    """Call `say` with a line for each error on the console, each failed script and each request to another host."""

    def console(message):
        if message.type in ("error", "assert"):
            where = message.location.get("url", "").removeprefix(home)
            say(f"on the console: {message.text} {where}".strip())

    def request(request):
        if not request.url.startswith((home, "data:", "blob:", "about:")):
            say(f"asks another host: {request.url}")

    tab.on("console", console)
    tab.on("pageerror", lambda error: say(f"a script failed: {error.message}"))
    tab.on("request", request)


def barriers(tab: Page) -> list[str]:
    """What axe-core finds serious or critical on the page, a line for each rule with its first element."""
    lines = []
    for rule in Axe().run(tab, options={"resultTypes": ["violations"]}).response["violations"]:
        if rule["impact"] in GRAVE:
            places = rule["nodes"]
            first = " ".join(places[0]["html"].split())[:90]
            lines.append(f"{rule['id']} ({rule['impact']}): {rule['help']}; {len(places)} times, as in {first}")
    return lines


def look(browser: Browser, home: str, page: str, shots: Path) -> list[str]:
    """Open a page in each width and scheme; the findings."""
    findings = {}

    def say(what: str):
        findings[what] = None

    for width, scheme in itertools.product(SIZES, SCHEMES):
        size = {"width": width, "height": SIZES[width]}
        with browser.new_context(viewport=size, is_mobile=width < 500, color_scheme=scheme) as context:
            tab = context.new_page()
            tab.set_default_timeout(PATIENCE)
            listen(tab, home, say)
            tab.goto(home + page, wait_until="load")
            if wide := tab.evaluate(WIDE):
                say(f"scrolls sideways at {width} px, {wide}")
            height = tab.evaluate("document.documentElement.scrollHeight")
            clip = {"x": 0, "y": 0, "width": width, "height": min(height, TALLEST)}
            name = page.removesuffix(".html").replace("/", "-")
            file = shots / f"{name}-{width}-{scheme}.jpg"
            tab.screenshot(path=file, type="jpeg", quality=75, clip=clip, full_page=True)
            if (width, scheme) in JUDGED:
                for what in barriers(tab):
                    say(f"{scheme}, {what}")
    return [f"{page}: {what}" for what in findings]


def dead_links(site: Path, pages: list[str]) -> list[str]:
    """Links and anchors of the built pages that lead nowhere on the site: a line for each page and link.

    LinkChecker, a library for this, fetches and parses a page again for each anchor that is asked of it. The site has
    thousands of links from names to their definitions, so here each page is parsed once, by lxml. Quarto's 404.html,
    which a host shows at any address, has links that begin with the site's base.
    """
    base = book.settings()["doc_baseurl"] + "/"
    trees = {page: lxml.html.parse(site / page).getroot() for page in pages}
    anchors = {page: {*tree.xpath("//@id"), *tree.xpath("//a/@name")} for page, tree in trees.items()}
    found = {}
    for page, tree in trees.items():
        for element, _, url, _ in tree.iterlinks():
            address = urlsplit(url)
            if element.tag not in ("a", "img") or address.scheme or address.netloc:
                continue
            path = unquote(address.path)
            if path.startswith(base):
                target = os.path.normpath(path.removeprefix(base))
            else:
                target = os.path.normpath(Path(page).parent / path) if path else page
            if (site / target).is_dir():
                target = os.path.normpath(Path(target) / "index.html")
            there = (site / target).is_file()
            anchor = unquote(address.fragment)
            if not there or anchor and target in anchors and anchor not in anchors[target]:
                found[f"{page}: a dead link: {url}"] = None
    return [*found]


def raw_markdown(site: Path, pages: list[str]) -> list[str]:
    """Links of Markdown that the built pages show as text: a line for each."""
    found = []
    for page in pages:
        tree = lxml.html.parse(site / page).getroot()
        for text in tree.xpath("//main//text()[not(ancestor::pre or ancestor::code or ancestor::script)]"):
            if "](" in text:
                found.append(f"{page}: Markdown is shown as text: {' '.join(text.split())[:100]}")
    return found


class Quiet(SimpleHTTPRequestHandler):
    """Serves files and says nothing.

    Quarto's 404.html names its files by where they lie on the host of the site, so they are served from there, too.
    """

    def translate_path(self, path):
        base = book.settings()["doc_baseurl"]
        return super().translate_path(path.removeprefix(base) if path.startswith(base + "/") else path)

    def log_message(self, *_):
        pass


def check(site: Path, shots: Path, program: str) -> list[str]:
    """Look at every page of a site; the findings."""
    shutil.rmtree(shots, ignore_errors=True)
    shots.mkdir(parents=True)
    pages = sorted(str(p.relative_to(site)) for p in site.rglob("*.html") if "site_libs" not in p.parts)
    if not pages:
        return [f"{site.name}: there are no pages"]
    findings = []
    with ThreadingHTTPServer(("127.0.0.1", 0), partial(Quiet, directory=site)) as server, sync_playwright() as driver:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        home = f"http://127.0.0.1:{server.server_port}/"
        browser = driver.chromium.launch(executable_path=program, chromium_sandbox=os.geteuid() != 0)
        try:
            for page in pages:
                findings += look(browser, home, page, shots)
            findings += dead_links(site, pages) + raw_markdown(site, pages)
        finally:
            browser.close()
            server.shutdown()
    print(f"{len(pages)} pages seen, {len(pages) * len(SIZES) * len(SCHEMES)} screenshots")
    return findings


def browser() -> str | None:
    """The Chromium of this machine."""
    return next(filter(None, map(shutil.which, NAMES)), None)


def main():
    if not (program := browser()):
        print(f"the site is not looked at: there is no browser ({', '.join(NAMES)})")
        sys.exit(bool(os.environ.get("CI")))
    findings = check(Path(sys.argv[1]).resolve(), Path(sys.argv[2]), program)
    print(*findings, f"{len(findings)} findings; the screenshots are in {os.path.relpath(sys.argv[2])}", sep="\n")
    sys.exit(bool(findings))


if __name__ == "__main__":
    main()
