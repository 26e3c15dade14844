"""What a reader meets on every page: contents where it is long, ordinary words, and a glossary that has them all."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.helpers.pages import ROOT

PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
LONG = 900  # words: about three screens
PRIVATE = (
    "loss a token", "to the letter", "and their kin", "never learned", "an honest verdict", "a fault of ours",
    "to mend", "all the same", "only shows the form", "not looked at", "run it again to go on", "the honest comparison",
)  # fmt: skip


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_a_long_page_has_contents(page: Path) -> None:
    """The site shows the headings of a page as its table of contents, unless it is told not to."""
    text = page.read_text(encoding="utf-8")
    front = text.split("---")[1] if text.startswith("---") else ""
    assert "toc" not in front
    if len(text.split()) > LONG:
        assert len(re.findall(r"^##+ ", text, re.M)) >= 3


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_no_private_words(page: Path) -> None:
    text = " ".join(page.read_text(encoding="utf-8").split()).lower()
    assert not [words for words in PRIVATE if words in text]


def test_no_private_words_in_messages_and_docstrings() -> None:
    """What the command and the API reference say."""
    files = sorted((ROOT / "src").rglob("*.py"))
    said = {file.name: " ".join(file.read_text(encoding="utf-8").split()).lower() for file in files}
    assert not [(name, words) for name, text in said.items() for words in PRIVATE if words in text]


def test_links_into_the_glossary_lead_somewhere() -> None:
    glossary = (ROOT / "docs" / "glossary.md").read_text(encoding="utf-8")
    words = re.findall(r"^### (.+)$", glossary, re.M)
    assert words == sorted(words, key=str.lower)
    anchors = {re.sub(r"[^\w\s-]", "", word).strip().lower().replace(" ", "-") for word in words}
    linked = [
        (page.name, found) for page in PAGES for found in re.findall(r"glossary\.md#([\w-]+)", page.read_text("utf-8"))
    ]
    linked += [("glossary.md", found) for found in re.findall(r"\]\(#([\w-]+)\)", glossary)]
    assert len({name for name, _ in linked}) >= 8
    assert not [each for each in linked if each[1] not in anchors]


def test_the_first_screen_of_the_readme() -> None:
    """One command, one table, what it needs, what it does not do, when not to use it; every link absolute."""
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    first = text.split("\n## ", 1)[0]
    assert first.count("```console") == 1
    assert first.count("\n|---") == 1
    for words in ("**It needs**", "**It does not**", "**Do not use it**", "**Try it**", "| unchanged target |"):
        assert words in first, words
    links = re.findall(r"\]\(([^)]+)\)", text)
    assert not [link for link in links if not link.startswith("https://")]


def test_the_copy_button_leaves_the_prompt_out() -> None:
    style = (ROOT / "docs" / "theme" / "extra.css").read_text(encoding="utf-8")
    assert re.search(r"\[data-md-copying\] \.gp[^{]*\{ display: none", style)
