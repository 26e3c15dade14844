"""Driving the installed command as a user does: a new process, its output and its exit code."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import dataclass
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


def taskferry(*arguments: object, code: int = 0, cwd: Path | None = None, **environment: str) -> Ran:
    """Run `taskferry …` and expect an exit code."""
    command = [str(Path(sys.executable).with_name("taskferry")), *map(str, arguments)]
    variables = {**os.environ, "HF_HUB_OFFLINE": "1", "COLUMNS": "120", "TERM": "dumb", **environment}
    done = subprocess.run(command, capture_output=True, text=True, cwd=cwd, env=variables, timeout=600, check=False)
    assert done.returncode == code, f"{' '.join(command)}\n{done.stdout}\n{done.stderr}"
    return Ran(done.returncode, done.stdout, done.stderr)
