"""`taskferry.transfer` in one call: from objects in memory to the settings of the command, and a result."""

from __future__ import annotations

import contextlib
import tempfile
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from taskferry.cli.screen import Screen
from taskferry.config import TransferSettings, load_settings
from taskferry.errors import TaskferryError
from taskferry.jobs import transfer as run
from taskferry.output.record import Result


def transfer(
    source_tuned: Any,
    target_base: str | Path,
    data: Any,
    source_base: str | Path | None,
    out: str | Path | None,
    progress: bool,
    settings: Mapping[str, Any],
) -> Result:
    """Run the command's job; without `out` the output lies in a temporary folder that goes with the result."""
    temporary = tempfile.TemporaryDirectory(prefix="taskferry-")
    named = isinstance(data, str | Path)
    given = {
        **settings,
        "source_tuned": _saved(source_tuned, Path(temporary.name)),
        "target_base": str(target_base),
        "calibration": str(data) if named else "rows in memory",
        "out": Path(temporary.name) / "moved" if out is None else out,
    }
    if source_base is not None:
        given["source_base"] = str(source_base)
    config = load_settings(TransferSettings, None, given)
    screen = Screen(quiet=not progress)
    with screen.bars() if progress else contextlib.nullcontext():
        result = run(config, data=None if named else data, reporter=screen)
    if result is None:
        raise RuntimeError("no dry run was asked for")
    return replace(result, temporary=temporary)


def _saved(tuned: Any, folder: Path) -> str:
    """A path as it is; a `PeftModel` as the adapter that it holds."""
    if isinstance(tuned, str | Path):
        return str(tuned)
    if not hasattr(tuned, "peft_config"):
        raise TaskferryError(
            f"source_tuned is a {type(tuned).__name__}: give a PeftModel, or the folder or hub id of a fine-tune"
        )
    tuned.save_pretrained(folder / "source")
    return str(folder / "source")
