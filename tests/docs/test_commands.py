"""Every command in README and docs is run, on small models under the names the pages use."""

from __future__ import annotations

import re
import shlex
import shutil
from pathlib import Path

import pytest

from tests.helpers import folders
from tests.helpers.command import taskferry
from tests.helpers.often import often
from tests.helpers.pages import ROOT, blocks

pytest.importorskip("transformers")
pytest.importorskip("peft")
pytest.importorskip("datasets")

PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
HERE = r"https://github\.com/taskferry/taskferry/(?:blob|raw)/main/"  # files in the README
NIGHTLY = {"two-thousand-adapters.md"}  # half a minute each, of what other pages have too
FROM_NOTHING = ROOT / "docs" / "start.md"  # .ci/five_minutes.py runs it in a clean environment, against the clock
EACH = [page for page in PAGES if page != FROM_NOTHING]


def commands(page: Path) -> list[list[str]]:
    whole = [block.replace("\\\n", " ") for block in blocks(page, "console")]  # a command may go on below
    lines = [line for block in whole for line in block.splitlines() if line.startswith("$ ")]
    return [shlex.split(line[2:]) for line in lines]


@pytest.fixture(scope="module")
def things(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What the pages name."""
    root = tmp_path_factory.mktemp("things")
    folders.causal(root / "base-a", "LlamaForCausalLM", 16, 2, 1)
    folders.causal(root / "base-b", "Qwen3ForCausalLM", 24, 3, 2)
    folders.shifted(root / "base-a", root / "tuned-a", size=0.02)
    # By chance one whose move lowers the loss: along others `fit` saves no maps.
    folders.lora(root / "base-a", root / "my-lora", ["q_proj", "v_proj"], seed=4, task_type="CAUSAL_LM")
    shutil.copytree(root / "my-lora", root / "adapters" / "one")
    for name in ("data.jsonl", "test.jsonl"):
        folders.prompts(root / name)
    return root


@pytest.fixture
def desk(things: Path, tmp_path: Path) -> Path:
    """A working folder of one's own with all of that, under the names that its adapters know."""
    desk = Path(shutil.copytree(things, tmp_path / "desk"))
    for config in desk.rglob("adapter_config.json"):
        config.write_text(config.read_text().replace(str(things), str(desk)))
    return desk


@pytest.mark.parametrize("page", often(EACH, {page.name for page in EACH} - NIGHTLY))
def test_the_commands_run(page: Path, desk: Path) -> None:
    for settings in blocks(page, "yaml"):
        for name in ("move.yaml", "plan.yaml"):
            (desk / name).write_text(settings)
    for command in commands(page):
        if command[0] == "pip":
            continue  # the gate has installed the package
        # Random small models gain nothing, which `--scale auto` would rightly refuse; a start of training has no scale.
        moves = "transfer" in command
        free = moves and not {"--scale", "--paper", "cold"} & set(command)
        options = [*["--force"] * moves, *["--scale", "1"] * free]
        if command[1] == "fleet":
            pytest.importorskip("ray")
        assert command[0] == "taskferry", command
        taskferry(*command[1:], *options, cwd=desk)


def test_pages_name_only_files_that_exist() -> None:
    for page in PAGES:
        for link in re.findall(r"\]\(([^)#:]+)\)", page.read_text(encoding="utf-8")):
            assert (page.parent / link).exists(), f"{page.name}: {link}"
        for link in re.findall(rf"\]\({HERE}([^)#]+)", page.read_text(encoding="utf-8")):
            assert (ROOT / link).exists(), f"{page.name}: {link}"


@pytest.mark.parametrize(
    ("page", "made"),
    [("README.md", "moved"), ("docs/api.md", "moved")],
    ids=["readme", "api"],
)
def test_the_python_of_the_pages_runs(page: str, made: str, desk: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The library examples of a page, one after the other, on the folders above."""
    monkeypatch.chdir(desk)
    scope: dict[str, object] = {}
    for example in blocks(ROOT / page, "python"):
        exec(compile(example, page, "exec"), scope)
    assert made in scope
    if page == "README.md":  # the loss is that of the completions, not of the prompts before them
        assert scope["prepared"].calibration.answers  # type: ignore[attr-defined]


def test_every_public_name_has_an_example() -> None:
    import taskferry

    code = "\n".join(blocks(ROOT / "docs" / "api.md", "python"))
    missing = [name for name in taskferry.__all__ if name != "__version__" and not re.search(rf"\b{name}\b", code)]
    assert not missing, f"docs/api.md has no example of {missing}"
