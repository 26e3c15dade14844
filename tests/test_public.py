"""What the public repository runs and shows: workflows, hooks, forms, and the page for contributors."""

from __future__ import annotations

import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.helpers.pages import ROOT, blocks

GITHUB = ROOT / ".github"
WORKFLOWS = sorted((GITHUB / "workflows").glob("*.yml"))
FORMS = [path for path in sorted((GITHUB / "ISSUE_TEMPLATE").glob("*.yml")) if path.name != "config.yml"]
PROJECT = (ROOT / "pyproject.toml").read_text(encoding="utf-8")


def read(path: Path) -> Any:
    return yaml.load(path.read_text(encoding="utf-8"), yaml.BaseLoader)  # all values as text: `on` is no boolean


def steps(path: Path) -> list[dict[str, Any]]:
    return [step for job in read(path)["jobs"].values() for step in [job, *job.get("steps", ())]]


def tool(name: str) -> str:
    found = shutil.which(name, path=str(Path(sys.executable).parent)) or shutil.which(name)
    if found is None:
        pytest.skip(f"{name} is not installed: pip install 'taskferry[dev]'")
    return found


def check(*words: str | Path) -> None:
    done = subprocess.run(list(map(str, words)), cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


def test_the_linter_of_workflows_finds_nothing() -> None:
    check(tool("zizmor"), "--offline", "--no-progress", GITHUB)


@pytest.mark.parametrize(
    ("schema", "files"),
    [
        ("github-workflows", WORKFLOWS),
        ("github-issue-forms", FORMS),
        ("github-issue-config", [GITHUB / "ISSUE_TEMPLATE" / "config.yml"]),
        ("citation-file-format", [ROOT / "CITATION.cff"]),
    ],
    ids=["workflows", "forms", "choice of forms", "citation"],
)
def test_files_have_the_form_that_the_service_reads(schema: str, files: list[Path]) -> None:
    assert files
    check(tool("check-jsonschema"), "--builtin-schema", f"vendor.{schema}", *files)


def test_the_workflows_run_the_gate() -> None:
    runs = {path.stem: [step["run"] for step in steps(path) if "run" in step] for path in WORKFLOWS}
    assert set(runs) == {"docs", "fast", "nightly", "publish"}
    assert runs["fast"] == [".ci/run --fast"]
    assert runs["nightly"] == [".ci/run"]
    assert "mkdocs build --strict" in runs["docs"]
    assert {"python -m build", "twine check --strict dist/*"} <= set(runs["publish"])


def test_actions_are_named_by_their_major_version() -> None:
    for path in WORKFLOWS:
        for used in (step["uses"] for step in steps(path) if "uses" in step):
            assert used.startswith("./") or re.fullmatch(r"[\w.-]+/[\w./-]+@(release/)?v\d+", used), used


def test_nothing_is_published_before_the_tests_pass() -> None:
    jobs = read(GITHUB / "workflows" / "publish.yml")["jobs"]
    assert jobs["fast"]["uses"] == "./.github/workflows/fast.yml"
    assert set(jobs["publish"]["needs"]) == {"fast", "build"}
    assert jobs["publish"]["permissions"] == {"id-token": "write"}  # a trusted publisher, no password
    assert "secrets." not in "".join(path.read_text(encoding="utf-8") for path in WORKFLOWS)


def test_every_python_that_is_named_is_tested() -> None:
    named = re.findall(r'"Programming Language :: Python :: (3\.\d+)"', PROJECT)
    assert read(GITHUB / "workflows" / "fast.yml")["jobs"]["fast"]["strategy"]["matrix"]["python"] == named
    assert f'requires-python = ">={named[0]}"' in PROJECT
    assert f"Python {named[0]} to {named[-1]}" in (ROOT / "docs" / "faq.md").read_text(encoding="utf-8")


def test_hooks_are_the_checks_of_the_gate() -> None:
    (repository,) = read(ROOT / ".pre-commit-config.yaml")["repos"]
    assert repository["repo"] == "local"
    gate = [line.strip() for line in (ROOT / ".ci" / "run").read_text(encoding="utf-8").splitlines()]
    entries = [hook["entry"] for hook in repository["hooks"]]
    assert entries == ["ruff check .", "ruff format --check .", "mypy"]
    assert set(entries) <= set(gate)
    assert all(hook["language"] == "system" for hook in repository["hooks"])


def test_forms_ask_for_the_record() -> None:
    assert {path.stem for path in FORMS} == {"bug", "idea", "transfer"}
    for path in FORMS:
        assert "taskferry.json" in [field["attributes"].get("label") for field in read(path)["body"]], path.name


def test_the_page_for_contributors_names_what_exists() -> None:
    page = ROOT / "CONTRIBUTING.md"
    text = page.read_text(encoding="utf-8")
    setup, *_ = shown = [block.splitlines() for block in blocks(page, "bash")]
    assert len(setup) <= 5
    for line in (line for block in shown for line in block):
        for word in shlex.split(line):
            if word.startswith((".ci/", "tests/")):
                assert (ROOT / word).exists(), word
    for extras in re.findall(r"'\.\[([\w,]+)\]'", text):
        for extra in extras.split(","):
            assert re.search(rf"^{extra} = \[", PROJECT, re.M), extra
    for path in re.findall(r"`((?:src|docs|tests|\.ci)/[\w./-]+)`", text):
        assert (ROOT / path).exists() or "/my_" in path, path
    for name in ("CONTRIBUTING.md", "CODE_OF_CONDUCT.md", "SECURITY.md"):
        for link in re.findall(r"\]\(([^)#:]+)(?:#[^)]*)?\)", (ROOT / name).read_text(encoding="utf-8")):
            assert (ROOT / link).exists(), f"{name}: {link}"
