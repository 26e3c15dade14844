"""Pages of real runs, opened in Chromium: their numbers, their widths, what they load, what hostile names can do."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from taskferry.errors import TaskferryError
from taskferry.report.command import write_report
from taskferry.report.parts import Table, Text, fenced
from tests.helpers import folders
from tests.helpers.browser import Browser, chromium
from tests.helpers.command import taskferry

pytest.importorskip("matplotlib", reason="figures are drawn by matplotlib")
pytest.importorskip("transformers")
pytest.importorskip("datasets")

HOSTILE = (
    '<script>window.hacked = 1</script>"><img src="http://127.0.0.1:9/x" onerror="window.hacked = 1">'
    "</style></title></svg>'--><svg onload=alert(1)>&amp;$x^{2}$ \x1b[31mred\x07 \u202egnp.exe | `cell`"
)


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with chromium() as found:
        yield found


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A transfer with its page."""
    root = tmp_path_factory.mktemp("report")
    folders.encoder(root / "base-a", 16, 2, 1)
    folders.encoder(root / "base-b", 24, 3, 2)
    folders.shifted(root / "base-a", root / "tuned-a", size=0.02)
    folders.shifted(root / "base-b", root / "tuned-b", size=0.02)
    folders.texts(root / "texts.jsonl")
    models = ["--source-base", "base-a", "--target-base", "base-b", "--calibration", "texts.jsonl", "--samples", 12]
    taskferry("transfer", *models, "--source-tuned", "tuned-a", "--scale", "1", "--out", "moved", cwd=root)
    taskferry("report", "moved", cwd=root)
    return root


PAGES = {"transfer": "moved/report.html"}


def grid(page: Any, caption: str) -> dict[tuple[str, str], float]:
    """The numbers of a table by row and column, exactly as the page keeps them."""
    found = page.evaluate(
        """caption => {
            const table = [...document.querySelectorAll('table')].find(t => t.caption?.textContent === caption);
            const columns = [...table.tHead.rows[0].cells].map(c => c.textContent);
            return [...table.tBodies[0].rows].flatMap(row => [...row.cells].map((cell, i) =>
                [row.cells[0].textContent, columns[i], cell.querySelector('data')?.value ?? null]));
        }""",
        caption,
    )
    return {(row, column): float(value) for row, column, value in found if value is not None}


def test_the_page_of_a_transfer_has_the_numbers_of_its_record(world: Path, browser: Browser) -> None:
    record = json.loads((world / "moved" / "taskferry.json").read_text())
    with browser.open(world / PAGES["transfer"]) as opened:
        page = opened.page
        assert record["verdict"]["sentence"] in page.inner_text(".verdict")
        assert record["command"] in page.inner_text("pre")
        assert page.evaluate("() => document.querySelectorAll('svg').length") == 1  # similarity
        labels = page.evaluate("() => [...document.querySelectorAll('svg text')].map(t => t.textContent)")
        assert "similarity after alignment" in labels
        assert not [label for label in labels if re.search(r"[$\\\\{]", label)]  # no formula that nobody has read
        for side, word in (("in", "reads"), ("out", "writes")):
            for what in ("residual", "rank"):
                shown = grid(page, f"{what.capitalize()}: what it {word}")
                expected = {}
                for site in record["sites"]:
                    found = re.fullmatch(r"encoder\.layer\.(\d+)\.(.+)", site["target"])
                    if found:
                        expected[found[2], found[1]] = site[f"{what}_{side}"]
                assert shown == expected
        marks = page.evaluate("() => [...document.querySelectorAll('table.status td i')].map(i => i.textContent)")
        blocks = [row["status"] for row in record["coverage"]["rows"] if ".layer." in row["parameter"]]
        assert sorted(marks) == sorted(blocks)
        tiles = page.evaluate(
            "() => [...document.querySelectorAll('.tiles div')].map(d => [d.querySelector('dt').textContent, "
            "Number(d.querySelector('data').value)])"
        )
        numbers = {row["parameter"]: math.prod(row["shape"]) for row in record["coverage"]["rows"]}
        moved = sum(numbers[row["parameter"]] for row in record["coverage"]["rows"] if row["status"] != "kept")
        verdict = record["verdict"]
        assert dict(tiles) == {
            f"Calibration loss {verdict['loss_unit']}": verdict["loss_after"],
            "Scale": verdict["scale"],
            "Weight tensors moved": verdict["moved"],
            "Weights moved": moved / sum(numbers.values()),
            "Change moved": sum(verdict["change"]["moved"].values()),
            "Samples": 12,
        }


@pytest.mark.parametrize("kind", PAGES)
@pytest.mark.parametrize("width", [360, 800, 1440])
def test_nothing_overflows_and_nothing_is_loaded(kind: str, width: int, world: Path, browser: Browser) -> None:
    for dark in (False, True):
        with browser.open(world / PAGES[kind], width, dark) as opened:
            sizes = opened.page.evaluate(
                "() => [document.documentElement.scrollWidth, document.documentElement.clientWidth]"
            )
            assert sizes[0] <= sizes[1] == width
            # Nothing but boxes that scroll by themselves may be wider than what it stands in.
            wide = opened.page.evaluate(
                "() => [...document.querySelectorAll('body *:not(.scroll *)')].filter(e => !e.closest('svg') && "
                "e.getBoundingClientRect().right > innerWidth + 1).map(e => e.outerHTML.slice(0, 80))"
            )
            assert wide == []
            assert opened.requests == [(world / PAGES[kind]).as_uri()]
            assert opened.messages == []
            ground = opened.page.evaluate("() => getComputedStyle(document.body).backgroundColor")
            assert (ground == "rgb(18, 22, 28)") == dark


@pytest.mark.parametrize("dark", [False, True])
@pytest.mark.parametrize("kind", PAGES)
def test_text_can_be_read(kind: str, dark: bool, world: Path, browser: Browser) -> None:
    """Every text has a contrast of 4.5 to what lies under it (WCAG AA), also in heat maps and figures."""
    with browser.open(world / PAGES[kind], dark=dark) as opened:
        faint = opened.page.evaluate(CONTRAST)
    assert faint == []


CONTRAST = """() => {
    const canvas = new OffscreenCanvas(1, 1).getContext('2d', {willReadFrequently: true});
    const over = colours => { canvas.fillStyle = 'white'; canvas.fillRect(0, 0, 1, 1);
        for (const c of colours) { canvas.fillStyle = c; canvas.fillRect(0, 0, 1, 1) }
        return [...canvas.getImageData(0, 0, 1, 1).data].slice(0, 3) };
    const linear = v => v <= 0.04045 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4;
    const light = rgb => { const [r, g, b] = rgb.map(v => linear(v / 255));
        return 0.2126 * r + 0.7152 * g + 0.0722 * b };
    const found = [];
    for (const element of document.querySelectorAll('body *')) {
        const own = [...element.childNodes].some(n => n.nodeType === 3 && n.textContent.trim());
        if (!own || element.closest('i') || (element.closest('details') && !element.closest('summary'))) continue;
        const grounds = [];
        for (let e = element; e; e = e.parentElement) grounds.unshift(getComputedStyle(e).backgroundColor);
        const style = getComputedStyle(element);
        const front = over([...grounds, element.closest('svg') ? style.fill : style.color]), back = over(grounds);
        const [a, b] = [light(front), light(back)].sort((x, y) => y - x);
        const contrast = (a + 0.05) / (b + 0.05);
        if (contrast < 4.5) found.push([element.textContent.slice(0, 30), contrast.toFixed(2)]);
    }
    return found;
}"""


FIXED = ("status", "kind", "side")  # words that taskferry itself writes, and reads again
NAMES = ("inputs", "unused", "versions", "refused")  # whose keys come from files


def poisoned(value: Any, key: str = "") -> Any:
    """Every text of a file made hostile, and every name that comes from a model or its data."""
    if isinstance(value, dict):
        return {(f"{k}{HOSTILE}" if key in NAMES else k): poisoned(v, k) for k, v in value.items()}
    if isinstance(value, list):
        return [poisoned(v, key) for v in value]
    return f"{value}{HOSTILE}" if isinstance(value, str) and key not in FIXED else value


@pytest.mark.parametrize("kind", PAGES)
def test_a_hostile_name_does_not_run(kind: str, world: Path, browser: Browser, tmp_path: Path) -> None:
    data = {"transfer": "moved/taskferry.json"}[kind]
    evil = poisoned(json.loads((world / data).read_text()))
    if kind == "transfer":
        evil["coverage"]["unused"] = {HOSTILE: HOSTILE}
    (tmp_path / Path(data).name).write_text(json.dumps(evil))
    path, _ = write_report(tmp_path / Path(data).name)
    for width in (360, 1440):
        with browser.open(path, width) as opened:
            page = opened.page
            page.wait_for_timeout(100)
            assert page.evaluate("() => window.hacked") is None
            assert opened.dialogs == []
            assert opened.requests == [path.resolve().as_uri()]
            assert opened.messages == []
            assert page.evaluate("() => document.querySelectorAll('script, img, iframe, object, link, a').length") == 0
            names = page.evaluate("() => [...document.querySelectorAll('*')].flatMap(e => e.getAttributeNames())")
            assert not [name for name in names if name.startswith("on")]
            assert page.evaluate("() => document.documentElement.scrollWidth <= innerWidth")
            text = page.inner_text("body")
            assert "<script>window.hacked" in text
            assert "\x1b" not in text
            assert "\u202e" not in text
    markdown, _ = write_report(tmp_path / Path(data).name, form="md")
    text = markdown.read_text()
    assert "\x1b" not in text
    outside = re.sub(r"^(`{3,})\n.*?^\1$", "", text, flags=re.S | re.M)
    assert not re.search(r"(?<!\\)<(script|img|svg)", outside)


def test_the_policy_stops_what_would_run(world: Path, browser: Browser, tmp_path: Path) -> None:
    """Were something to slip through, the page itself forbids it."""
    page = (world / PAGES["transfer"]).read_text()
    evil = '<script>window.hacked = 1</script><img src="http://127.0.0.1:9/x" onerror="window.hacked = 1">'
    (tmp_path / "slipped.html").write_text(page.replace("<main>", f"<main>{evil}"))
    with browser.open(tmp_path / "slipped.html") as opened:
        opened.page.wait_for_timeout(100)
        assert opened.page.evaluate("() => window.hacked") is None
        assert any("Content Security Policy" in message for message in opened.messages)
        assert [url for url in opened.requests if url.startswith("http")] == opened.blocked


def test_a_page_prints(world: Path, browser: Browser) -> None:
    with browser.open(world / PAGES["transfer"], dark=True) as opened:
        opened.page.emulate_media(media="print", color_scheme="dark")
        assert opened.page.evaluate("() => getComputedStyle(document.body).backgroundColor") == "rgb(255, 255, 255)"
        assert opened.page.pdf(format="A4").startswith(b"%PDF")


def test_a_report_is_written_again_but_over_nothing_else(world: Path, tmp_path: Path) -> None:
    (tmp_path / "taskferry.json").write_bytes((world / "moved" / "taskferry.json").read_bytes())
    first, _ = write_report(tmp_path)
    before = first.read_text()
    write_report(tmp_path)
    assert re.sub(r"f\d+-", "", first.read_text()) == re.sub(r"f\d+-", "", before)
    first.write_text("notes of my own")
    with pytest.raises(TaskferryError, match="is no report"):
        write_report(tmp_path)
    assert first.read_text() == "notes of my own"
    assert {p.name for p in tmp_path.iterdir()} == {"taskferry.json", "report.html"}


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"verdict": 1}', '{"a": {"groups": 3}}', '{"kind": "analysis"}'])
def test_a_file_that_is_no_record_says_so(text: str, tmp_path: Path) -> None:
    (tmp_path / "x.json").write_text(text)
    with pytest.raises(TaskferryError, match=r"x\.json"):
        write_report(tmp_path / "x.json")
    with pytest.raises(TaskferryError, match="holds no taskferry"):
        write_report(tmp_path)


def test_a_record_without_extras_is_shown_without_them(world: Path, tmp_path: Path) -> None:
    """Outputs of `apply` and of older versions have no scale curve."""
    record = json.loads((world / "moved" / "taskferry.json").read_text())
    slim = {k: v for k, v in record.items() if k not in ("scale_curve", "calibration")}
    slim["verdict"] = {"sentence": "It moved.", "scale": 1.0}
    slim["sites"] = []
    (tmp_path / "taskferry.json").write_text(json.dumps(slim))
    path, _ = write_report(tmp_path, form="md")
    assert "It moved" in path.read_text()


def test_markdown_is_no_markup() -> None:
    assert Text("a *b* <i>").markdown() == r"a \*b\* \<i\>"
    assert Table("t", ["a|b"], [["x\ny"]]).markdown().splitlines()[-1] == "| x y |"
    assert fenced("a ``` b").startswith("````\n")
