"""The page of a real run, opened in Chromium where there is one: numbers, widths, what it loads, hostile names."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from taskferry.errors import TaskferryError
from taskferry.output.report import write_report
from tests.helpers import folders
from tests.helpers.browser import Browser, chromium
from tests.helpers.command import taskferry

pytest.importorskip("transformers")
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
    folders.texts(root / "texts.jsonl")
    models = ["--source-base", "base-a", "--target-base", "base-b", "--calibration", "texts.jsonl", "--samples", 12]
    taskferry("transfer", *models, "--source-tuned", "tuned-a", "--method", "bico", "--scale", "1", "--out", "moved",
              cwd=root)  # fmt: skip
    taskferry("report", "moved", cwd=root)
    return root / "moved"


def with_answers(record: dict[str, Any], text: str = "yes") -> dict[str, Any]:
    """A record as one of a language model has it."""
    scores = {"right": 50.0, "exact": 50.0, "stopped": 100.0}
    example = {"prompt": text, "source": text, "before": text, "after": text}
    answers = {**dict.fromkeys(("source", "before", "after"), scores), "samples": 20, "examples": [example] * 5,
               "gain": {"points": 20.0, "low": -5.0, "high": 45.0}}  # fmt: skip
    return {**record, "form": "lora", "rank": 4, "verdict": {**record["verdict"], "answers": answers}}


def test_a_page_has_what_its_record_has(world: Path, tmp_path: Path) -> None:
    record = json.loads((world / "taskferry.json").read_text())
    page = (world / "report.html").read_text()
    assert record["verdict"]["sentence"] in page
    assert page.count("●") >= sum(row["status"] == "moved" and ".layer." in row["parameter"]
                                  for row in record["coverage"]["rows"])  # fmt: skip
    colours = {"helps": "verdict good", "not shown to help": "verdict open", "harms": "verdict bad"}
    for state, colour in colours.items():
        changed = with_answers({**record, "verdict": {**record["verdict"], "state": state}})
        (tmp_path / "taskferry.json").write_text(json.dumps(changed))
        text = write_report(tmp_path)[0].read_text()
        assert colour in text
        assert "95 % interval -5 to +45" in text
        assert "Rank of the LoRA" in text
    largest = next(iter(record["verdict"]["change"]["moved"]))
    assert f"{largest} {record['verdict']['change']['moved'][largest]:.0%}" in page  # the bar of shares


def poisoned(value: Any, key: str = "") -> Any:
    """Every text of a file made hostile, and every name that comes from a model or its data."""
    if isinstance(value, dict):
        names = key in ("inputs", "unused", "versions", "moved", "stayed")
        return {(f"{k}{HOSTILE}" if names else k): poisoned(v, k) for k, v in value.items()}
    if isinstance(value, list):
        return [poisoned(v, key) for v in value]
    return f"{value}{HOSTILE}" if isinstance(value, str) and key not in ("status", "state", "form") else value


@pytest.fixture
def evil(world: Path, tmp_path: Path) -> Path:
    record = poisoned(with_answers(json.loads((world / "taskferry.json").read_text())))
    (tmp_path / "taskferry.json").write_text(json.dumps(record))
    return write_report(tmp_path)[0]


def test_a_hostile_name_is_text(evil: Path) -> None:
    page = evil.read_text()
    assert not re.search(r"<(script|img|iframe|object|link|a)\b", page)
    assert not re.search(r"<[^>]*\son\w+=", page)
    assert "\x1b" not in page
    assert "\u202e" not in page
    assert "&lt;script&gt;window.hacked" in page


@pytest.mark.parametrize("dark", [False, True])
@pytest.mark.parametrize("width", [400, 1280])
def test_a_page_fits_any_screen_and_asks_for_nothing(
    width: int, dark: bool, world: Path, evil: Path, browser: Browser
) -> None:
    for page in (world / "report.html", evil):
        with browser.open(page, width, dark=dark) as opened:
            opened.page.wait_for_timeout(100)
            assert opened.page.evaluate("() => document.documentElement.scrollWidth <= innerWidth")
            assert opened.page.evaluate("() => window.hacked") is None
            assert opened.requests == [page.resolve().as_uri()]
            assert opened.messages == []
            assert opened.page.evaluate(CONTRAST) == []


# Every text has a contrast of 4.5 to what lies under it (WCAG AA), also in heat maps.
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
        const front = over([...grounds, getComputedStyle(element).color]), back = over(grounds);
        const [a, b] = [light(front), light(back)].sort((x, y) => y - x);
        const contrast = (a + 0.05) / (b + 0.05);
        if (contrast < 4.5) found.push([element.textContent.slice(0, 30), contrast.toFixed(2)]);
    }
    return found;
}"""


def test_a_report_is_written_again_but_over_nothing_else(world: Path, tmp_path: Path) -> None:
    (tmp_path / "taskferry.json").write_bytes((world / "taskferry.json").read_bytes())
    first, _ = write_report(tmp_path)
    before = first.read_text()
    write_report(tmp_path)
    assert first.read_text() == before
    first.write_text("notes of my own")
    with pytest.raises(TaskferryError, match="is no report"):
        write_report(tmp_path)
    assert first.read_text() == "notes of my own"
    assert {p.name for p in tmp_path.iterdir()} == {"taskferry.json", "report.html"}


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"verdict": 1}', '{"settings": {}, "verdict": {}}'])
def test_a_file_that_is_no_record_says_so(text: str, tmp_path: Path) -> None:
    (tmp_path / "x.json").write_text(text)
    with pytest.raises(TaskferryError, match=r"x\.json"):
        write_report(tmp_path / "x.json")
    with pytest.raises(TaskferryError, match=r"holds no taskferry\.json"):
        write_report(tmp_path)
