"""Every command and every Python block of README and docs runs once, on the models of the package."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest

from taskferry.config import DEFAULT_METHOD
from taskferry.example import write_example
from tests.helpers.command import taskferry
from tests.helpers.pages import ROOT, blocks

pytest.importorskip("transformers")
pytest.importorskip("peft")
pytest.importorskip("datasets")

FIRST = ["README.md", "docs/start.md"]  # what they make is named by the other pages
PAGES = [ROOT / name for name in FIRST]
PAGES += [page for page in sorted((ROOT / "docs").rglob("*.md")) if page not in PAGES]
SHELL = ("cd", "pip", "python3", ".", "source")  # .ci/five_minutes.py runs those of docs/start.md


def commands(page: Path) -> list[list[str]]:
    """The lines of the shell blocks, as words; one that ends in a backslash goes on below."""
    lines = "\n".join(blocks(page, "bash")).replace("\\\n", " ").splitlines()
    return [words for line in lines if (words := shlex.split(line, comments=True))]


@pytest.fixture
def desk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of `taskferry example`, with a few of its samples."""
    write_example(tmp_path / "demo")
    for name, count in (("data.jsonl", 24), ("test.jsonl", 12)):
        file = tmp_path / "demo" / name
        file.write_text("".join(file.read_text(encoding="utf-8").splitlines(keepends=True)[:count]))
    monkeypatch.chdir(tmp_path / "demo")
    return tmp_path / "demo"


def test_the_pages_run(desk: Path) -> None:
    pytest.importorskip("ray")
    ran: set[tuple[str, ...]] = set()
    for page in PAGES:
        run = commands(page)
        files = [word for words in run for word in words if word.endswith(".yaml")]
        for name, text in zip(files, blocks(page, "yaml"), strict=True):
            (desk / name).write_text(text)
        for words in run:
            if words[0] in SHELL or tuple(words) in ran:
                continue
            ran.add(tuple(words))
            assert words[0] == "taskferry", f"{page.name}: {words}"
            done = taskferry(*words[1:], *shorter(words), cwd=desk, code=None)
            busy = words[1] == "fleet" and "Ray does not start here" in done.err
            assert done.code == 0 or busy, f"{page.name}: {' '.join(words)}\n{done.out}\n{done.err}"
        if page.name != "methods.md":  # tests/docs/test_methods_page.py
            scope: dict[str, object] = {}
            for example in blocks(page, "python"):
                exec(compile(example, page.name, "exec"), scope)


def shorter(words: list[str]) -> list[str]:
    """What spares time and changes no more than the numbers."""
    if words[1] != "transfer":
        return []
    learns = DEFAULT_METHOD == "distil" and not {"--method", "--paper", "--engine", "--config"} & set(words)
    return ["--force", *(["--set", "steps=4"] if learns else [])]


def test_pages_name_only_files_that_exist() -> None:
    for page in [*PAGES, ROOT / "CONTRIBUTING.md", ROOT / "SECURITY.md"]:
        for link in re.findall(r"\]\(([^)#:]+)(?:#[^)]*)?\)", page.read_text(encoding="utf-8")):
            assert (page.parent / link).exists() or link == "tutorial.md", f"{page.name}: {link}"


def test_no_address_that_nobody_owns() -> None:
    """The repository has none yet; a reader would get a dead link, or somebody else's package."""
    names = ("pyproject.toml", "CITATION.cff", "mkdocs.yml", "CONTRIBUTING.md", "SECURITY.md")
    for page in [*PAGES, *(ROOT / name for name in names)]:
        assert "github.com/taskferry" not in page.read_text(encoding="utf-8"), page.name
        assert not re.search(r"pip install '?taskferry", page.read_text(encoding="utf-8")), page.name


def test_every_public_name_stands_in_the_page() -> None:
    import taskferry

    page = (ROOT / "docs" / "api.md").read_text(encoding="utf-8")
    missing = [name for name in taskferry.__all__ if name != "__version__" and f"::: taskferry.{name}\n" not in page]
    assert not missing, f"docs/api.md lacks {missing}"
