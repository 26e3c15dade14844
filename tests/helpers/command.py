"""Driving the installed command as a user does: a process of its own, its output and its exit code."""

from __future__ import annotations

import atexit
import json
import os
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class Ran:
    code: int
    out: str
    err: str

    @property
    def json(self) -> Any:
        return json.loads(self.out)


MAPS = ("--method", "bico", "--scale", 1)  # a move without held-out samples and training: quick, and exact


def taskferry(*arguments: object, code: int | None = 0, cwd: Path | None = None, **environment: str) -> Ran:
    """Run `taskferry …` and expect an exit code, or any (None): in a fork of a warm process, or in a new one.

    A new one for a fleet: Ray does not start its workers from a fork.
    Other variables of the hub make a warm process of their own: its library reads them when it is imported.
    """
    words = [str(word) for word in arguments]
    variables = {**_variables(), **environment}
    ran = _new(words, cwd, variables) if words[:1] == ["fleet"] else _warm(words, cwd, [variables])
    assert code in (None, ran.code), f"taskferry {' '.join(words)}\n{ran.out}\n{ran.err}"
    return ran


def _variables() -> dict[str, str]:
    return {**os.environ, "HF_HUB_OFFLINE": "1", "COLUMNS": "120", "TERM": "dumb"}


def _new(words: list[str], cwd: Path | None, variables: dict[str, str]) -> Ran:
    command = [str(Path(sys.executable).with_name("taskferry")), *words]
    done = subprocess.run(command, capture_output=True, text=True, cwd=cwd, env=variables, timeout=1800, check=False)
    return Ran(done.returncode, done.stdout, done.stderr)


def _warm(words: list[str], cwd: Path | None, processes: list[dict[str, str]], before: str = "") -> Ran:
    hub = tuple(sorted((name, value) for name, value in processes[0].items() if name.startswith("HF_")))
    server = _server(os.getpid(), hub)
    assert server.stdin is not None
    assert server.stdout is not None
    with tempfile.TemporaryDirectory() as folder:
        out, err = Path(folder, "out"), Path(folder, "err")
        request = {"arguments": words, "folder": str(cwd or Path.cwd()), "processes": processes, "before": before}
        server.stdin.write(json.dumps({**request, "out": str(out), "err": str(err)}) + "\n")
        server.stdin.flush()
        code = int(server.stdout.readline())
        return Ran(code, out.read_text(encoding="utf-8"), err.read_text(encoding="utf-8"))


@cache
def _server(process: int, hub: tuple[tuple[str, str], ...]) -> subprocess.Popen[str]:
    server = subprocess.Popen([sys.executable, "-m", "tests.helpers.warm"], cwd=Path(__file__).parents[2], text=True,
                              stdin=subprocess.PIPE, stdout=subprocess.PIPE,
                              env={**_variables(), **dict(hub)})  # fmt: skip
    atexit.register(server.kill)
    return server
