"""Which code a result rests on: a hash of some modules and of every module of the package that they import.

    >>> code_of("taskferry.methods.naive", "taskferry.evaluation.scoring")

Of what the code does, not of how it is written: comments, docstrings and layout do not count.
"""

from __future__ import annotations

import ast
import hashlib
import importlib.util
from collections.abc import Iterator
from functools import cache
from pathlib import Path

from taskferry.methods import methods

PACKAGE = __name__.partition(".")[0]
UNSEEN = ("display", "errors", "version")  # no result depends on what they do


@cache
def code_of(*modules: str, deep: bool = True) -> str:
    """The hash of these modules with all that they rest on, or of themselves alone."""
    digest = hashlib.sha256()
    for name in sorted(_reached(*modules) if deep else modules):
        if name.split(".")[1] not in UNSEEN:
            digest.update(f"{name} {_parsed(name)[0]}\n".encode())
    return digest.hexdigest()[:12]


def _reached(*modules: str) -> set[str]:
    """These modules, and every module of the package that they import, in functions too, and what those import."""
    found, waiting = set[str](), list(modules)
    while waiting:
        name = waiting.pop()
        if name not in found:
            found.add(name)
            waiting += _parsed(name)[1]
    return found


@cache
def _parsed(module: str) -> tuple[str, tuple[str, ...]]:
    """What the code of a module does, as text, and the modules of the package that it names."""
    spec = importlib.util.find_spec(module)
    if spec is None or spec.origin is None:
        raise ModuleNotFoundError(module)
    tree = ast.parse(Path(spec.origin).read_text(encoding="utf-8"))
    named = dict.fromkeys(_named(tree))
    for node in ast.walk(tree):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef) and ast.get_docstring(node) is not None:
            del node.body[0]
    return ast.dump(tree), tuple(named)


def _named(tree: ast.Module) -> Iterator[str]:
    by_name = {name: known.function.__module__ for name, known in methods().items()}
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.module and node.module.split(".")[0] == PACKAGE:
            yield node.module
            inside = (f"{node.module}.{alias.name}" for alias in node.names)
            yield from (name for name in inside if _is_module(name))
        elif isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names if alias.name.split(".")[0] == PACKAGE)
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and node.value in by_name:
            yield by_name[node.value]  # a method that another one runs is asked for by its name


def _is_module(name: str) -> bool:
    try:
        return importlib.util.find_spec(name) is not None
    except ModuleNotFoundError:  # its parent is a module, not a package
        return False
