"""The page in a real browser: it opens from disk, asks the network for nothing, sorts, and fits a phone.

Needs Chromium and the package playwright (`pip install "sparsesel[browser]"`), which drives the Chromium that is
there: `CHROMIUM` names it, or it is found on the path. Where there is none, `make test-extras` fails.
"""

import json
import os
import shutil

import pytest

from sparsesel.eval.figures import Bars, Curves, HeatMap, Marks, Series
from sparsesel.eval.render.content import Content, Part, Shown, gather
from sparsesel.eval.render.write import write
from sparsesel.eval.tables import Column, Section, Table

CHROMIUM = os.environ.get("CHROMIUM") or shutil.which("chromium") or shutil.which("google-chrome") or ""
REQUIRED = os.environ.get("SPARSESEL_BROWSER") == "required"
ARGUMENTS = ["--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run"]
ARGUMENTS += ["--disable-background-networking", "--disable-component-update", "--disable-sync"]
HOSTILE = "<script>document.title='taken'</script><img src=x onerror=\"document.title='taken'\">"

pytestmark = pytest.mark.browser


@pytest.fixture(scope="module")
def browser():
    try:
        from playwright.sync_api import sync_playwright
    except ImportError:
        sync_playwright = None
    if sync_playwright is None or not CHROMIUM:
        missing = "Chromium" if not CHROMIUM else "the package playwright"
        reason = f"no {missing} is here: install it, for example by `apt-get install chromium`, or set CHROMIUM"
        if REQUIRED:
            pytest.fail(reason)
        pytest.skip(reason)
    with sync_playwright() as playwright:
        launched = playwright.chromium.launch(executable_path=CHROMIUM, args=ARGUMENTS)
        yield launched
        launched.close()


def all_figures():
    return [
        Curves("Curves", "position", "PPL", [Series(f"selector {i}", [1, 2, 4], [i, i + 1, None]) for i in range(9)]),
        Bars("Bars", "ms", ["full", HOSTILE], [("QK", [1, 2]), ("select", [1, 0.5])], caption=HOSTILE),
        HeatMap("Few cells", "head", "layer", ["0", "1"], ["0", "1"], [[0.1, None], [0.5, 0.9]]),
        HeatMap("Many cells", "head", "layer", [*map(str, range(40))], [*map(str, range(40))], [[0.5] * 40] * 40),
        Marks("Frontier", "MB", "PPL", [("full", [(9, 1)]), (HOSTILE, [(1, 2)])], connect=True),
        Marks("Support", "step", "position", [("attended", [(i, i % 97) for i in range(3000)])], dots=True),
    ]


@pytest.fixture(scope="module")
def address(tmp_path_factory, lines):
    """A page of results, with every kind of figure and hostile names."""
    folder = tmp_path_factory.mktemp("browser") / "results"
    folder.mkdir()
    made = [*lines, {**lines[-1], "selector": HOSTILE}, {**lines[0], "task": "gone"}]
    (folder / "results.jsonl").write_text("".join(json.dumps(line) + "\n" for line in made), encoding="utf-8")
    read = gather([folder])
    table = Table("Order", ["reference", "a", "b", "c"], [Column("x", [5, 10.04, None, 9.0], 1, better="more")], 1)
    figures = [(f"figure-{number}", figure) for number, figure in enumerate(all_figures())]
    section = Section("All figures", [table], figures=[figure for _, figure in figures])
    parts = [*read.parts, Part("", [Shown(section, figures)], (), ())]
    content = Content(read.folders, read.problems, read.differences, parts, read.selectors)
    return write(content, folder / "report").page.as_uri()


@pytest.fixture
def open_page(browser, address):
    """Opens the page in a browser context of its own; what it complains of or asks for beyond itself is collected."""
    complaints = []
    contexts = []

    def open_it(**options):
        context = browser.new_context(**options)
        contexts.append(context)
        page = context.new_page()
        page.on("console", lambda message: complaints.append(message.text))
        page.on("pageerror", lambda error: complaints.append(str(error)))
        page.on("request", lambda request: None if request.url in (address, "data:,") else asked(request.url))
        page.goto(address)
        return page

    def asked(url):
        if not url.startswith("data:"):
            complaints.append(f"asked for {url}")

    yield open_it
    for context in contexts:
        context.close()
    assert complaints == []


def test_it_opens_from_disk_and_nothing_in_it_runs_but_its_own(open_page):
    page = open_page()
    assert page.title().startswith("Selectors compared on tiny")
    assert page.locator("svg[role=img]").count() == page.locator("figure").count() >= len(all_figures()) + 4
    assert page.locator("img").count() == 0
    assert page.locator(".warning").count() == 1
    assert page.locator("nav a").count() >= 4


def order(table):
    return table.locator("tbody th").all_inner_texts()


def test_a_heading_sorts_by_number_and_says_so(open_page):
    page = open_page()
    table = page.get_by_role("table", name="Order")
    heading = table.locator("thead th").nth(1)
    button = heading.locator("button")
    assert heading.get_attribute("aria-sort") == "none"
    button.click()  # more is better: the best first, references where they are, what has no value last
    assert heading.get_attribute("aria-sort") == "descending"
    assert order(table) == ["reference", "a", "c", "b"]
    button.focus()
    page.keyboard.press("Enter")
    assert heading.get_attribute("aria-sort") == "ascending"
    assert order(table) == ["reference", "c", "a", "b"]
    page.keyboard.press("Space")
    assert heading.get_attribute("aria-sort") == "none"
    assert order(table) == ["reference", "a", "b", "c"]


def test_every_result_is_there(open_page, lines):
    page = open_page()
    details = page.locator("#lines details")
    assert details.count() == 3
    assert not page.get_by_role("table", name="Lines of niah").is_visible()
    details.nth(1).locator("summary").click()
    table = page.get_by_role("table", name="Lines of niah")
    assert table.is_visible()
    assert table.locator("tbody tr").count() == 1 + sum(line["task"] == "niah" for line in lines)


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_text_and_figures_can_be_read_in_light_and_dark(open_page, scheme):
    page = open_page(color_scheme=scheme)
    paper = page.evaluate("getComputedStyle(document.body).backgroundColor")
    ink = page.evaluate("getComputedStyle(document.querySelector('.plot text')).fill")
    body = page.evaluate("getComputedStyle(document.body).color")

    def luminance(colour):
        parts = [int(part) / 255 for part in colour[4:-1].split(",")]
        linear = [part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts]
        return sum(weight * part for weight, part in zip((0.2126, 0.7152, 0.0722), linear, strict=True))

    for colour in (ink, body):
        low, high = sorted((luminance(colour), luminance(paper)))
        assert (high + 0.05) / (low + 0.05) > 7
    assert (luminance(paper) > 0.5) == (scheme == "light")


@pytest.mark.parametrize("width", [320, 390, 1280])
def test_it_is_no_wider_than_its_window(open_page, width):
    page = open_page(viewport={"width": width, "height": 844})
    page.evaluate("document.querySelectorAll('details').forEach((one) => { one.open = true; })")
    assert page.evaluate("document.documentElement.scrollWidth") <= width


def test_it_needs_no_script_to_be_read(open_page):
    page = open_page(java_script_enabled=False)
    assert page.get_by_role("table", name="Quality and speed").is_visible()
