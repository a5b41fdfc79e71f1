"""Pages in a real browser, on a phone and on a screen, in light and dark."""

import html
import re
import shutil
import subprocess
from pathlib import Path

import pytest

BROWSER = shutil.which("chromium") or shutil.which("chromium-browser")
DEMO = Path(__file__).parents[2] / "docs" / "demo.html"
# A frame has the width of a phone, which a headless window does not; scripts are not in our pages,
# whose policy forbids them, so that the one that looks at the page is added without the policy.
POLICY = r'<meta http-equiv="Content-Security-Policy"[^>]*>'
LOOK = """<script>
addEventListener("load", () => {
  const page = document.querySelector("iframe").contentDocument, root = page.documentElement;
  const seen = document.documentElement.dataset, frame = page.defaultView;
  seen.width = frame.innerWidth;
  seen.overflow = root.scrollWidth - root.clientWidth;
  seen.requests = frame.performance.getEntriesByType("resource").length;
  seen.pictures = page.images.length;
  seen.broken = [...page.images].filter(each => !each.naturalWidth).length;
  seen.background = frame.getComputedStyle(page.body).backgroundColor;
});
</script>"""


def looked_at(page: str, width: int, dark: bool, folder: Path) -> dict[str, str]:
    """What a browser makes of a page in a frame of so many pixels."""
    assert BROWSER is not None
    free = re.sub(POLICY, "", page)
    assert free != page
    frame = (
        f'<iframe srcdoc="{html.escape(free)}" style="width: {width}px; height: 900px"></iframe>'
    )
    (folder / "frame.html").write_text(f"<!DOCTYPE html>{LOOK}<style>*{{border: 0}}</style>{frame}")
    words = [BROWSER, "--headless", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage"]
    words += [
        "--hide-scrollbars",
        f"--user-data-dir={folder / 'profile'}",
        "--enable-logging=stderr",
    ]
    words += ["--window-size=1400,1000", f"--blink-settings=preferredColorScheme={int(not dark)}"]
    words += ["--virtual-time-budget=4000", "--dump-dom", (folder / "frame.html").as_uri()]
    result = subprocess.run(words, capture_output=True, text=True, timeout=120)
    assert "CONSOLE" not in result.stderr
    root = re.search(r"<html[^>]*>", result.stdout)
    assert root is not None
    return dict(re.findall(r'data-(\w+)="([^"]*)"', root[0]))


@pytest.mark.slow
@pytest.mark.skipif(BROWSER is None, reason="needs chromium, see .ci/run")
@pytest.mark.parametrize(("width", "dark"), [(390, False), (390, True), (1280, False)])
def test_a_page_fits_a_phone_and_a_screen_and_asks_for_nothing(width, dark, tmp_path):
    seen = looked_at(DEMO.read_text(), width, dark, tmp_path)
    assert seen["width"] == str(width)
    assert (seen["overflow"], seen["requests"], seen["broken"]) == ("0", "0", "0")
    assert int(seen["pictures"]) > 0
    levels = [int(level) for level in re.findall(r"\d+", seen["background"])]
    assert (max(levels) < 100) is dark


@pytest.mark.slow
@pytest.mark.skipif(BROWSER is None, reason="needs chromium, see .ci/run")
def test_what_runs_out_of_a_page_is_seen_here(tmp_path):
    """The test above can fail: a line that does not wrap is wider than a phone."""
    wide = '<p style="white-space: nowrap">' + "much too long " * 40 + "</p></body>"
    page = DEMO.read_text().replace("</body>", wide)
    assert int(looked_at(page, 390, False, tmp_path)["overflow"]) > 0
