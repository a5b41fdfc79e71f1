"""Pages in headless Chromium: what runs out of them, what they ask for, and what is broken."""

import json
import re
import shutil
import subprocess
from collections.abc import Sequence
from html import unescape
from pathlib import Path

import pytest

BROWSER = shutil.which("chromium") or shutil.which("chromium-browser")
needs_browser = pytest.mark.skipif(BROWSER is None, reason="needs chromium, see .ci/run")
# A phone and a screen, in light and dark.
SIZES = pytest.mark.parametrize(("width", "dark"), [(w, d) for w in (390, 1280) for d in (0, 1)])


def opened(page: Path, profile: Path, ms: int, *flags: str) -> tuple[dict[str, str], list[str]]:
    """What the scripts of a page wrote beside its root, and the lines of the browser's console.

    The browser's clock runs for `ms`, and stands while files are read or the machine is busy.
    """
    assert BROWSER is not None
    words = [BROWSER, "--headless", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage"]
    words += ["--enable-logging=stderr", f"--user-data-dir={profile}", *flags]
    words += ["--window-size=1400,1000", f"--virtual-time-budget={ms}", "--dump-dom", page.as_uri()]
    result = subprocess.run(words, capture_output=True, text=True, timeout=300)
    root = re.search(r"<html[^>]*>", result.stdout)
    assert root is not None
    seen = {key: unescape(text) for key, text in re.findall(r'data-(\w+)="([^"]*)"', root[0])}
    return seen, [line for line in result.stderr.splitlines() if "CONSOLE" in line]


# Each page in turn in a frame, which may be as narrow as a phone, while a window may not.
LOOK = """<!DOCTYPE html><iframe style="border: 0; height: 900px; width: WIDTHpx"></iframe><script>
const pages = PAGES, seen = {}, frame = document.querySelector("iframe");
frame.onload = () => setTimeout(() => {
  const page = frame.contentDocument, root = page.documentElement, view = page.defaultView;
  const names = view.performance.getEntriesByType("resource").map((each) => each.name);
  const pictures = [...page.images], tables = [...root.querySelectorAll(".wide")];
  const shade = view.getComputedStyle(page.body).backgroundColor.match(/\\d+/g).slice(0, 3);
  seen[pages.shift()] = {
    overflow: Math.max(0, page.scrollingElement.scrollWidth - view.innerWidth),
    asked: names.filter((each) => !/^(file|data|blob):/.test(each)).length,
    pictures: pictures.length + root.querySelectorAll("svg").length,
    cut: Math.max(0, ...tables.map((each) => each.scrollWidth - each.clientWidth)),
    broken: pictures.filter((each) => !each.naturalWidth).length,
    dark: Number(Math.max(...shade.map(Number)) < 100),
  };
  if (pages.length) frame.src = pages[0];
  else document.documentElement.dataset.seen = JSON.stringify(seen);
}, 100);
frame.src = pages[0];
</script>"""


def looked_at(
    pages: Sequence[Path], width: int, dark: int, folder: Path
) -> tuple[dict[Path, dict[str, int]], list[str]]:
    """What one browser makes of each page in a frame of so many pixels, and its console.

    `overflow` is in pixels, and so is `cut`, how much of a table is beyond its frame. `asked`
    counts requests beyond the disk, `broken` pictures that did not load, `pictures` all of them.
    """
    script = json.dumps([page.as_uri() for page in pages])
    frame = folder / "frame.html"
    frame.write_text(LOOK.replace("WIDTH", str(width)).replace("PAGES", script))
    colours = f"--blink-settings=preferredColorScheme={1 - dark}"
    flags = ("--hide-scrollbars", "--allow-file-access-from-files", colours)
    seen, console = opened(frame, folder / "profile", 2000 + 300 * len(pages), *flags)
    looks = json.loads(seen["seen"])
    return {page: looks[page.as_uri()] for page in pages}, console
