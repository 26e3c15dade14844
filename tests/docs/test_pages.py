"""What a reader meets: a first screen that fits, short pages, numbers in tables, ordinary words."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.helpers.pages import ROOT

README = ROOT / "README.md"
PAGES = [README, *sorted((ROOT / "docs").rglob("*.md"))]
PROSE = [page for page in PAGES if page.name not in ("findings.md", "architecture.md", "changelog.md")]
WORDS = 15_000  # of all pages, without generated tables
PRIVATE = (
    "loss a token", "to the letter", "and their kin", "never learned", "an honest verdict", "a fault of ours",
    "to mend", "only shows the form", "not looked at", "run it again to go on", "the honest comparison",
)  # fmt: skip


def written(page: Path) -> str:
    """The text of a page without the tables that benchmarks and tests put there, and without comments."""
    text = page.read_text(encoding="utf-8")
    text = re.sub(r"<!-- ([\w -]+) -->\n.*?<!-- (end|/)[\w -]* ?-->", "", text, flags=re.S)
    return re.sub(r"<!--.*?-->", "", text, flags=re.S)


def paragraphs(page: Path) -> list[str]:
    """The running text: no code, no tables, no headings."""
    text = re.sub(r"^```.*?^```", "", written(page), flags=re.S | re.M)
    found = re.split(r"\n\s*\n|\n(?=[-*] |\d+\. )", text)
    return [part for part in found if part.strip() and not part.lstrip().startswith(("|", "#", "    "))]


def test_the_documentation_is_short() -> None:
    count = sum(len(written(page).split()) for page in PAGES)
    assert count <= WORDS, f"{count} words"


@pytest.mark.parametrize("page", PROSE, ids=lambda page: page.name)
def test_numbers_stand_in_tables(page: Path) -> None:
    """A paragraph has two at most."""
    for text in paragraphs(page):
        plain = re.sub(r"`[^`]*`|\]\([^)]*\)|^\s*\d+\. |\bPython 3\S*( to 3\S*)?|\btorch 2\S*", "", text)
        numbers = re.findall(r"(?<![\w.-])[+−-]?\d+(?:[.,]\d+)*(?![\w-])", plain)
        assert len(numbers) <= 2, f"{numbers} in: {text}"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_no_private_words(page: Path) -> None:
    text = " ".join(page.read_text(encoding="utf-8").split()).lower()
    assert not [words for words in PRIVATE if words in text]


def test_no_private_words_in_messages_and_docstrings() -> None:
    """What the command and the API reference say."""
    files = sorted((ROOT / "src").rglob("*.py"))
    said = {file.name: " ".join(file.read_text(encoding="utf-8").split()).lower() for file in files}
    assert not [(name, words) for name, text in said.items() for words in PRIVATE if words in text]


def test_the_first_screen_of_the_readme() -> None:
    """One command, a table of results, prompts before and after, and when not to use it."""
    first = README.read_text(encoding="utf-8").split("\n## More\n", 1)[0]
    assert len(first.splitlines()) <= 60
    assert first.count("```bash") == 1
    assert first.count("\n|---") == 2
    (table,) = re.findall(r"<!-- language_first -->\n(.*?)<!-- end", first, re.S)
    rows = table.strip().splitlines()
    assert rows[0].count("|") - 1 <= 6
    assert len(rows) - 2 <= 6
    for words in ("**In:**", "**Out:**", "**Good for**", "**Not for you**", "result.model()"):
        assert words in first, words


def test_blocks_that_people_copy_have_no_prompts() -> None:
    for page in [*PAGES, ROOT / "CONTRIBUTING.md"]:
        text = page.read_text(encoding="utf-8")
        assert "```console" not in text, page.name
        assert not re.search(r"^\s*\$ ", text, re.M), page.name
