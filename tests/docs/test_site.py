"""The documentation site: builds strictly, asks no other host for anything, and fits a phone."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("mkdocs", reason="the site needs mkdocs: pip install 'taskferry[docs]'")
pytest.importorskip("mkdocstrings")

ROOT = Path(__file__).parents[2]
CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("docs") / "site"
    build = [sys.executable, "-m", "mkdocs", "build", "--strict", "-q", "-f", str(ROOT / "mkdocs.yml"), "-d", str(out)]
    environment = {**os.environ, "NO_MKDOCS_2_WARNING": "1", "DISABLE_MKDOCS_2_WARNING": "true"}
    done = subprocess.run(build, capture_output=True, text=True, env=environment, timeout=900, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return out


def test_nothing_comes_from_another_host(site: Path) -> None:
    """Links may lead away; scripts, styles, fonts and pictures may not be fetched from there."""
    fetched = re.compile(
        r"""<(?:script|img|iframe|source)[^>]+src=["']?(https?:)?//"""
        r"""|<link(?![^>]+canonical)[^>]+href=["']?(https?:)?//"""
        r"""|@import|url\(['"]?(?:https?:)?//"""
    )
    pages = [f for f in site.rglob("*") if f.suffix in (".html", ".css")]
    assert len([p for p in pages if p.suffix == ".html"]) >= 15
    for page in pages:
        found = fetched.search(page.read_text(encoding="utf-8"))
        assert found is None, f"{page.relative_to(site)}: {found and found[0]}"


def test_pages_search_from_disk(site: Path) -> None:
    assert (site / "search" / "search_index.js").is_file()


def test_the_api_has_every_public_name(site: Path) -> None:
    import taskferry

    page = (site / "api.html").read_text(encoding="utf-8")
    for name in set(taskferry.__all__) - {"__version__"}:
        assert f'id="taskferry.{name}"' in page, name


@pytest.mark.skipif(CHROMIUM is None, reason="no Chromium: apt-get install chromium")
@pytest.mark.parametrize("width", [360, 1440])
def test_no_page_is_wider_than_the_screen(site: Path, width: int, tmp_path: Path) -> None:
    """Each page is loaded in a frame of that width, and asked how wide it is."""
    names = ["index", "start", "idea", "tutorial", "results", "api", "how-to/did-it-work"]
    measure = (
        "<script>addEventListener('load',()=>setTimeout(()=>"
        "parent.postMessage([NAME,document.documentElement.scrollWidth],'*'),300))</script>"
    )
    frames = []
    for name in names:
        page = site / f"{name}.html"
        copy = page.with_name(f"measured-{page.name}")
        copy.write_text(page.read_text(encoding="utf-8") + measure.replace("NAME", f"'{name}'"), encoding="utf-8")
        frames.append(f"<iframe src='{copy.as_uri()}' width='{width}' height='800'></iframe>")
    heard = (
        "<script>addEventListener('message',e=>document.body.dataset[e.data[0].replace(/\\W/g,'')]=e.data[1])</script>"
    )
    start = tmp_path / "start.html"
    start.write_text(f"<!doctype html><body>{heard}{''.join(frames)}</body>", encoding="utf-8")
    command = [CHROMIUM, "--headless", "--no-sandbox", "--disable-gpu", "--allow-file-access-from-files",
               f"--user-data-dir={tmp_path / 'profile'}", "--window-size=1600,900", "--virtual-time-budget=8000",
               "--dump-dom", start.as_uri()]  # fmt: skip
    shown = subprocess.run(command, capture_output=True, text=True, timeout=600, check=True).stdout
    widths = {name: re.search(rf'data-{re.sub(r"[^a-z]", "", name)}="(\d+)"', shown) for name in names}
    for name, found in widths.items():
        assert found is not None, f"{name} was not measured"
        assert int(found[1]) <= width, f"{name} is {found[1]} pixels wide on a screen of {width}"
