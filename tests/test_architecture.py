"""The plan of docs/architecture.md holds: imports point down."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
SOURCE = ROOT / "src" / "taskferry"
PLAN = ROOT / "docs" / "architecture.md"
MODULES = sorted(SOURCE.rglob("*.py"))


@cache
def tree(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"))


def name_of(path: Path) -> str:
    return path.relative_to(SOURCE).as_posix()


def place_of(name: str) -> str:
    """The room of a module, `fitting/`, or the module itself where it stands beside the rooms: `errors`."""
    first, *rest = name.split("/")
    return f"{first}/" if rest else first.removesuffix(".py")


@cache
def rooms() -> dict[str, int]:
    """Room or root module -> its row in the table of rooms, from top to bottom."""
    section = PLAN.read_text(encoding="utf-8").split("\n## The rooms\n", 1)[1].split("\n## ", 1)[0]
    cells = [line.split("|")[1] for line in section.splitlines() if line.startswith("|")][2:]  # below the header
    named = [(name, row) for row, cell in enumerate(cells) for name in re.findall(r"`([^`]+)`", cell)]
    twice = {name for name, _ in named if [other for other, _ in named].count(name) > 1}
    assert not twice, f"in two rows: {sorted(twice)}"
    return dict(named)


def at_runtime(node: ast.AST) -> Iterator[ast.AST]:
    """All nodes below, also inside functions, but not what a type checker alone reads."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.If) and "TYPE_CHECKING" in ast.unparse(child.test):
            for other in child.orelse:
                yield other
                yield from at_runtime(other)
            continue
        yield child
        yield from at_runtime(child)


def imported(path: Path) -> Iterator[tuple[int, str]]:
    """(line, room or root module) of everything of this package that a module imports."""
    inside = ["taskferry", *path.relative_to(SOURCE).parent.parts]
    for node in at_runtime(tree(path)):
        if isinstance(node, ast.Import):
            found = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            base = inside[: len(inside) - node.level + 1] if node.level else []
            start = ".".join([*base, *([node.module] if node.module else [])])
            found = [f"{start}.{alias.name}" for alias in node.names] if start == "taskferry" else [start]
        else:
            continue
        for name in found:
            package, _, rest = name.partition(".")
            if package == "taskferry":
                first = rest.split(".")[0]
                room, module = (SOURCE / first).is_dir() and first != "", (SOURCE / f"{first}.py").is_file()
                yield node.lineno, f"{first}/" if room else first if module else "__init__"


def test_every_module_has_its_room() -> None:
    places = {place_of(name_of(path)) for path in MODULES}
    assert not sorted(places - rooms().keys()), "named in no row"
    assert not sorted(rooms().keys() - places), "a row of the table names what is not there"


def test_imports_point_downwards() -> None:
    upwards = []
    for path in MODULES:
        name = name_of(path)
        here = rooms().get(place_of(name), 0)
        upwards += [
            f"{name}:{line} imports {place}" for line, place in imported(path) if rooms().get(place, here) < here
        ]
    assert not upwards, "\n".join(["", *upwards])


@pytest.mark.parametrize(
    ("source", "places"),
    [
        ("import taskferry.cli.app", ["cli/"]),
        ("from taskferry.cli import app", ["cli/"]),
        ("from taskferry import cli, errors, Batch", ["cli/", "errors", "__init__"]),
        ("def f():\n    from taskferry.errors import TaskferryError", ["errors"]),
        ("if TYPE_CHECKING:\n    import taskferry.cli\nelse:\n    import taskferry.disk", ["disk/"]),
        ("from .. import errors\nfrom ..cli import app\nfrom .files import x", ["errors", "cli/", "disk/"]),
        ("import torch\nfrom taskferryman import cli", []),
    ],
)
def test_every_kind_of_import_is_seen(source: str, places: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tests.test_architecture.tree", lambda path: ast.parse(source))
    assert [place for _, place in imported(SOURCE / "disk" / "new.py")] == places
