"""The release: what the wheel and the source archive hold, and what the package index will show of them."""

from __future__ import annotations

import datetime
import email.message
import os
import re
import subprocess
import sys
import tarfile
import zipfile
from email.parser import Parser
from pathlib import Path

import pytest
import yaml

from taskferry import __version__
from tests.helpers.pages import ROOT

SOURCE = ROOT / "src" / "taskferry"
NOT_SHIPPED = {"example/files/losses.json"}  # notes of the script that made the example
DATA = re.compile(r"py\.typed|example/files/.+\.(json|jsonl|safetensors)")


def run(*words: str | Path, **environment: str) -> str:
    clean = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"}
    done = subprocess.run(
        [sys.executable, *map(str, words)], capture_output=True, text=True, env={**clean, **environment}, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def dist(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """`python -m build`: the source archive, and the wheel made from it."""
    for package in ("build", "hatchling"):
        pytest.importorskip(package, reason=f"{package} is not installed: pip install 'taskferry[dev]'")
    out = tmp_path_factory.mktemp("dist")
    run("-m", "build", "--no-isolation", "--outdir", out, ROOT)
    return out


@pytest.fixture(scope="module")
def wheel(dist: Path) -> Path:
    (found,) = dist.glob("*.whl")
    return found


@pytest.fixture(scope="module")
def metadata(wheel: Path) -> email.message.Message:
    with zipfile.ZipFile(wheel) as archive:
        return Parser().parsestr(archive.read(f"taskferry-{__version__}.dist-info/METADATA").decode())


def test_the_wheel_holds_the_package_and_nothing_else(wheel: Path) -> None:
    assert wheel.name == f"taskferry-{__version__}-py3-none-any.whl"
    assert wheel.stat().st_size < 6e6
    with zipfile.ZipFile(wheel) as archive:
        names = {name for name in archive.namelist() if not name.endswith("/")}
    about = {name.split("/", 1)[1] for name in names if name.startswith(f"taskferry-{__version__}.dist-info/")}
    assert about == {"METADATA", "WHEEL", "RECORD", "entry_points.txt", "licenses/LICENSE"}
    package = {name.removeprefix("taskferry/") for name in names if name.startswith("taskferry/")}
    assert len(package) + len(about) == len(names), "something lies beside the package"
    files = {p.relative_to(SOURCE).as_posix() for p in SOURCE.rglob("*") if p.is_file() and p.suffix != ".pyc"}
    assert package == files - NOT_SHIPPED
    strange = sorted(name for name in package if not name.endswith(".py") and not DATA.fullmatch(name))
    assert not strange, strange
    assert not any({"tests", "benchmarks", "docs"} & set(name.split("/")) for name in names)


def test_the_source_archive_holds_what_it_names(dist: Path) -> None:
    """The wheel was built from it; tests and pages are in it, benchmarks and their models are not."""
    (found,) = dist.glob("*.tar.gz")
    assert found.stat().st_size < 6e6
    with tarfile.open(found) as archive:
        tops = {name.split("/")[1] for name in archive.getnames()}
    assert tops == {
        "src", "tests", "docs", "examples", "mkdocs.yml", "pyproject.toml", "PKG-INFO", ".gitignore",
        "README.md", "CHANGELOG.md", "CITATION.cff", "LICENSE", "SECURITY.md", "THREATS.md",
        "CONTRIBUTING.md", "CODE_OF_CONDUCT.md",
    }  # fmt: skip


def test_twine_finds_nothing(dist: Path) -> None:
    pytest.importorskip("twine", reason="twine is not installed: pip install 'taskferry[dev]'")
    run("-m", "twine", "check", "--strict", *dist.iterdir())


def test_the_index_is_told_what_it_is(metadata: email.message.Message) -> None:
    assert metadata["License-Expression"] == "Apache-2.0"
    assert metadata.get_all("License-File") == ["LICENSE"]
    assert metadata["Requires-Python"] == ">=3.10"
    assert not metadata.get_all("Project-URL"), "there is no address yet that somebody owns"


def test_the_plain_install_has_what_the_shown_commands_need(metadata: email.message.Message) -> None:
    """Models and the PEFT that a LoRA is written with, without an extra."""
    needed = [line for line in metadata.get_all("Requires-Dist", []) if "extra ==" not in line]
    assert {"transformers", "peft"} <= {re.split(r"[^\w-]", line)[0] for line in needed}


def test_the_wheel_works_where_the_checkout_is_not(wheel: Path, tmp_path: Path) -> None:
    """Unpacked beside the packages that it needs: its version, and the example from its own files."""
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(tmp_path / "installed")
    path = str(tmp_path / "installed")
    started = "import sys, taskferry; from taskferry.cli import main; print(taskferry.__file__); main()"
    shown = run("-c", started, "example", tmp_path / "demo", PYTHONPATH=path)
    assert shown.startswith(path)
    parts = {"base-a", "base-b", "my-lora", "tuned-a", "adapters", "data.jsonl", "test.jsonl"}
    assert {p.name for p in (tmp_path / "demo").iterdir()} == parts


def test_the_changelog_has_the_release_and_room_for_the_next() -> None:
    text = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
    headings = re.findall(r"^## (.+)$", text, re.M)
    assert headings[0] == "Unreleased"
    version, date = headings[1].split(" - ")
    assert version == __version__
    datetime.date.fromisoformat(date)
    cited = yaml.safe_load((ROOT / "CITATION.cff").read_text(encoding="utf-8"))
    assert (cited["version"], str(cited["date-released"])) == (version, date)
    assert "repository-code" not in cited
