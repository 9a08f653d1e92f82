"""The report's pages in a browser: quiet, offline, as wide as the screen, and all within reach of the keyboard."""

from __future__ import annotations

import importlib.util
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from chromium import find_chromium, launch_chromium
from sagegen.report.contents import make_page
from sagegen.report.page import render_page
from sagegen.report.sources import read_inputs

pytestmark = pytest.mark.skipif(
    find_chromium() is None or importlib.util.find_spec("playwright") is None,
    reason="needs Chromium (apt-get install chromium) and Playwright (pip install -e '.[browser]')",
)

ROOT = Path(__file__).parents[2]
COMMITTED = ROOT / "docs" / "report" / "h200.html"
HOSTILE = "</code></desc></svg><script>alert(1)</script><img src=http://127.0.0.1:9/x onerror=alert(2)>\"'"


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with launch_chromium() as launched:
        yield launched


@pytest.fixture(scope="module")
def predicted(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The page of a registry of an absent GPU."""
    path = tmp_path_factory.mktemp("page") / "l20.html"
    path.write_text(render_page(make_page(read_inputs([ROOT / "tuned" / "l20.yaml"]), None, "")), encoding="utf-8")
    return path


class Visit:
    """A page that was opened, with all that it said and asked for."""

    def __init__(self, browser: Any, path: Path, width: int = 1440, scheme: str = "light") -> None:
        self.page = browser.new_page(viewport={"width": width, "height": 900}, color_scheme=scheme)
        self.page.set_default_timeout(20000)
        self.said: list[str] = []
        self.asked: list[str] = []
        self.page.on("console", lambda message: self.said.append(message.text))
        self.page.on("pageerror", lambda error: self.said.append(str(error)))
        self.page.on("dialog", lambda dialog: (self.said.append(dialog.message), dialog.dismiss()))
        self.page.on("request", lambda request: self.asked.append(request.url))
        self.page.goto(path.as_uri())
        self.uri = path.as_uri()

    def open_all(self) -> None:
        self.page.evaluate("document.querySelectorAll('details').forEach(each => { each.open = true })")

    def is_quiet(self) -> bool:
        """It loaded itself and said nothing; what asks for too much may take a moment to say so."""
        self.page.wait_for_timeout(50)
        return self.said == [] and [url for url in self.asked if url != "data:,"] == [self.uri]


@pytest.fixture
def visit(browser: Any) -> Iterator[Any]:
    opened: list[Visit] = []

    def open_page(*arguments: Any, **options: Any) -> Visit:
        opened.append(Visit(browser, *arguments, **options))
        return opened[-1]

    yield open_page
    for each in opened:
        each.page.close()


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [320, 768, 1440])
def test_the_committed_page_is_quiet_and_fits(visit: Any, width: int, scheme: str) -> None:
    seen = visit(COMMITTED, width, scheme)
    for _ in range(2):  # as it opens, and with everything open
        assert seen.page.evaluate("document.documentElement.scrollWidth") <= width
        wide = "[...document.querySelectorAll('main *')].filter(e => !e.closest('.scroll, .for-ears')"
        assert seen.page.evaluate(f"{wide} && e.getBoundingClientRect().right > innerWidth + 1).length") == 0
        seen.open_all()
    ground = seen.page.evaluate("getComputedStyle(document.body).backgroundColor")
    assert ground == {"light": "rgb(246, 247, 249)", "dark": "rgb(16, 19, 23)"}[scheme]
    assert seen.is_quiet()


def test_text_of_charts_can_be_read_on_a_phone(visit: Any) -> None:
    seen = visit(COMMITTED, 320)
    sizes = seen.page.evaluate(
        "[...document.querySelectorAll('details.case[open] svg.chart text')]"
        ".map(e => parseFloat(getComputedStyle(e).fontSize) * e.ownerSVGElement.getBoundingClientRect().width / 340)"
    )
    assert len(sizes) > 50
    assert min(sizes) >= 9


FOCUSABLE = "a[href], summary, [tabindex='0']"
#: What has the focus, by its place among all that could have it; -1 is something else.
FOCUSED = f'[...document.querySelectorAll("{FOCUSABLE}")].indexOf(document.activeElement)'


@pytest.mark.parametrize("opened", [False, True], ids=["as it opens", "with everything open"])
def test_the_tab_key_reaches_everything_in_order(visit: Any, predicted: Path, opened: bool) -> None:
    """On the smaller page when all is open: each stop takes a while there."""
    seen = visit(predicted if opened else COMMITTED)
    if opened:
        seen.open_all()
    shown = seen.page.evaluate(
        f'[...document.querySelectorAll("{FOCUSABLE}")].map((e, i) => e.checkVisibility() ? i : -1).filter(i => i >= 0)'
    )
    reached = []
    for _ in shown:
        seen.page.keyboard.press("Tab")
        reached.append(seen.page.evaluate(FOCUSED))
    assert len(shown) > 30
    assert reached == shown
    outline = seen.page.evaluate("getComputedStyle(document.activeElement).outlineStyle")
    assert outline == "solid"


def test_the_skip_link_shows_itself_and_leads_to_the_results(visit: Any) -> None:
    seen = visit(COMMITTED)
    seen.page.keyboard.press("Tab")
    assert seen.page.evaluate("document.activeElement.getBoundingClientRect().top") >= 0
    seen.page.keyboard.press("Enter")
    assert seen.page.evaluate("document.activeElement.id") == "main"


def test_a_link_of_the_overview_opens_its_length(visit: Any) -> None:
    seen = visit(COMMITTED)
    link = seen.page.locator(".glance a").first
    part = seen.page.locator(f"[id='{link.get_attribute('href')[1:]}']")
    assert not part.is_visible()
    link.press("Enter")
    assert part.is_visible()
    assert seen.page.evaluate("scrollY") > 0


def test_it_prints_with_every_length_open(visit: Any) -> None:
    seen = visit(COMMITTED)
    seen.page.emulate_media(media="print")
    charts = seen.page.evaluate(
        "[...document.querySelectorAll('details.case')].map(e => [...e.querySelectorAll('svg.chart')])"
        ".map(all => all.length && all.every(c => c.getBoundingClientRect().height > 50 && c.checkVisibility()))"
    )
    assert len(charts) == 20
    assert all(charts)


def test_a_page_of_predictions_is_quiet_too(visit: Any, predicted: Path) -> None:
    seen = visit(predicted, 320, "dark")
    assert seen.page.locator(".banner").is_visible()
    assert seen.page.evaluate("document.documentElement.scrollWidth") <= 320
    assert seen.is_quiet()


def test_scripts_in_a_journal_do_not_run(visit: Any, tmp_path: Path) -> None:
    import gzip

    journal = ROOT / "docs" / "gpu-runs" / "2026-11-30-h200-bf16-journal.jsonl.gz"
    records = [json.loads(line) for line in gzip.decompress(journal.read_bytes()).splitlines()[:30]]
    for place, record in enumerate(records):
        record.update(product=HOSTILE, reason=HOSTILE, outcome="crash" if place % 4 == 1 else record["outcome"])
        record["config"] = HOSTILE if place % 9 == 5 else record["config"]
    path = tmp_path / "<script>alert(3)</script>.jsonl".replace("/", "")
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    page = tmp_path / "page.html"
    page.write_text(render_page(make_page(read_inputs([path]), None, HOSTILE)), encoding="utf-8")
    seen = visit(page)
    seen.open_all()
    assert seen.page.locator("script, img").count() == 0
    assert seen.page.get_by_text("<script>alert(1)</script>").count() > 3
    assert seen.is_quiet()
