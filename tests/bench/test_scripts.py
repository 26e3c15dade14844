"""The slow measurements are not run here; that each can still be started is."""

from __future__ import annotations

import importlib
import shutil
import sys
from pathlib import Path

import pytest

from tests.helpers.pages import ROOT

SCRIPTS = sorted(
    str(path.relative_to(ROOT).with_suffix("")).replace("/", ".")
    for path in (ROOT / "benchmarks").glob("*/*.py")
    if "def main()" in path.read_text() and path.parent.name != "shared"
)


@pytest.mark.parametrize("name", SCRIPTS)
def test_a_benchmark_starts_and_explains_itself(
    name: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Its imports are there, and it has a small version."""
    monkeypatch.syspath_prepend(ROOT)
    monkeypatch.setattr(sys, "argv", [name, "--help"])
    if "fuzzing" in name:
        pytest.importorskip("atheris")
    module = importlib.import_module(name)
    with pytest.raises(SystemExit) as ended:
        module.main()
    assert ended.value.code == 0
    if "zoo." not in name and "fuzzing" not in name:
        assert "--quick" in capsys.readouterr().out


@pytest.mark.parametrize("name", ["frontier", "language_models", "forecast"])
def test_the_tables_of_committed_results_are_made_again(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Nothing is run: `--shown` reads what was found, and says what it says in benchmarks/results."""
    results = ROOT / "benchmarks" / "results"
    given = shutil.copy(results / f"{name}.json", tmp_path)
    monkeypatch.syspath_prepend(ROOT)
    monkeypatch.setattr(sys, "argv", [name, "--shown", "--json", str(given)])
    with pytest.raises(SystemExit) as ended:
        importlib.import_module(f"benchmarks.quality.{name}").main()
    assert ended.value.code in (0, 1)  # 1: a bound is missed
    assert (tmp_path / f"{name}.md").read_text() == (results / f"{name}.md").read_text()
    assert capsys.readouterr().out
