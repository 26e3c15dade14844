"""What people see: what will be done, progress bars, the verdict."""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from taskferry.cli.terminal import plain, print_json, warn
from taskferry.display.bars import Bars
from taskferry.estimate import Estimate
from taskferry.jobs.record import Outcome, Reporter
from taskferry.jobs.settings import TransferSettings
from taskferry.jobs.verdict import HARMS, HELPS, NOT_SHOWN
from taskferry.methods.registry import FEW
from taskferry.settings import ApplySettings

MARKS = {
    HELPS: "[bold green]moved: it helps[/]",
    NOT_SHOWN: "[bold yellow]moved, not shown to help[/]",
    HARMS: "[bold red]moved, but it does harm[/]",
}
SHORT = 80  # characters of a prompt or an answer in the terminal
TOLD = 0.001  # of a norm that a cut to a LoRA loses: less is rounding


class Screen(Reporter):
    """A reporter for a terminal; with `--json` or `--quiet` it stays silent."""

    def __init__(
        self, *, quiet: bool = False, as_json: bool = False, dry_run: bool = False, console: Console | None = None
    ) -> None:
        self.silent = quiet or as_json
        self.dry_run = dry_run  # what will be done is the result, also as JSON
        self.as_json = as_json
        self.lines: dict[str, str] = {}
        self.console = console or Console(highlight=False)
        self._bars: Bars | None = None

    @contextmanager
    def bars(self) -> Iterator[None]:
        """Progress bars while inside."""
        if self.silent:
            yield
            return
        with Bars(console=self.console) as self._bars:
            yield
        self._bars = None

    def plan(self, lines: Mapping[str, str], estimate: Estimate | None = None) -> None:
        """Print what will be done as soon as it is known, and what it takes at the end of a dry run."""
        self.lines.update(lines)
        if self.as_json and self.dry_run and estimate is not None:
            print_json({"plan": {**self.lines, **asdict(estimate)}})
        if self.silent:
            return
        shown = dict(lines)
        if estimate is not None:
            shown["will move"] = f"into {estimate.pairs} of {estimate.layers} linear layers of the target"
            shown["memory"] = f"about {_bytes(estimate.memory_bytes)} for weights and sums, activations on top"
            shown["time"] = f"roughly {_seconds(estimate.seconds)} here"
        table = Table(show_header=False, box=None, pad_edge=False)
        table.add_column(style="cyan", no_wrap=True, min_width=9)
        table.add_column(overflow="fold")
        for name, value in shown.items():
            table.add_row(name, plain(value))
        self.console.print(table)

    def step(self, what: str, done: int, total: int) -> None:
        """Move a bar."""
        if self._bars is not None:
            self._bars(what, done, total)

    def note(self, what: str) -> None:
        """A line that says what takes a while."""
        if self._bars is not None:
            self._bars.note(what)

    def warning(self, what: str) -> None:
        """A line that stays."""
        if not self.silent:
            warn(self.console, [what])

    def verdict(self, outcome: Outcome, next_step: str) -> None:
        """Coverage, loss, scale, next step; or all of it as JSON."""
        if self.as_json:
            print_json({**outcome.record, "written": None if outcome.written is None else str(outcome.written)})
            return
        if self.silent:
            return
        told = outcome.record["verdict"]
        mark = "[bold yellow]refused[/]" if outcome.written is None else MARKS.get(told.get("state"), "[bold]moved[/]")
        self.console.print(f"\n{mark}  {plain(outcome.sentence)}")
        warn(self.console, told.get("warnings", ()))
        for line in str(outcome.record["coverage_summary"]).splitlines()[1:]:
            self.console.print(f"[dim]{plain(line)}[/]")
        for name, error in _worst(outcome.record.get("truncation", {})):
            self.console.print(f"[dim]  cut to a LoRA: {plain(name)} loses {100 * error:.1f} % of its norm[/]")
        self._examples((told.get("answers") or {}).get("examples", []))
        self.console.print(f"[bold]next[/]   {plain(next_step)}", soft_wrap=True)

    def _examples(self, examples: Sequence[Mapping[str, str]]) -> None:
        """Print prompts with their answers."""
        if not examples:
            return
        table = Table(title="Held-out prompts", title_justify="left", box=None, pad_edge=False)
        for heading in ("prompt", "tuned source", "target before", "target after"):
            table.add_column(heading, overflow="fold", max_width=44, header_style="cyan")
        for example in examples:
            table.add_row(*(_short(example[name]) for name in ("prompt", "source", "before", "after")))
        self.console.print(table)


def _short(text: str) -> str:
    """A text in one line, cut where it is long."""
    line = " ".join(plain(text).split())
    return line if len(line) <= SHORT else f"{line[: SHORT - 1]}…"


def worse(told: Mapping[str, Any]) -> bool:
    """True where the samples say that the output does harm."""
    return told.get("state") == HARMS


def next_after(settings: TransferSettings, outcome: Outcome) -> str:
    """What to type after a transfer."""
    if outcome.written is None:
        return "try more samples, another --objective, or add --scale 1 to the same command to write it anyway"
    if worse(outcome.record["verdict"]):
        again = f"rm -r {shlex.quote(str(settings.out))}, then the same command"
        return f"{again} with more samples" if settings.scale == "auto" else f"{again} without --scale"
    test = _test(settings, outcome)
    lines = [
        f"taskferry evaluate {written_by(settings)} {test}",
        f"taskferry evaluate {shlex.quote(settings.target_base)} {test}   (the target alone)",
        f"taskferry report {shlex.quote(str(settings.out))}",
    ]
    if not settings.refine and settings.engine_name == "whole" and len(outcome.record["calibration"]["indices"]) >= FEW:
        lines.append("to recover more by training: add --refine 30 and another --out")
    return "\n       ".join(lines)


def _test(settings: TransferSettings, outcome: Outcome) -> str:
    """The held-out samples that `evaluate` takes, and those that a head is made from."""
    data = Path(settings.calibration)
    beside = data.with_name(f"test{data.suffix}")
    test = shlex.quote(str(beside)) if data.is_file() and beside.is_file() and beside != data else "TEST_DATA"
    made = outcome.record["calibration"].get("head_made_from_samples", False)
    shots = f" --shots {shlex.quote(settings.calibration)}" if made else ""
    return f"--test {test}{shots}"


def written_by(settings: TransferSettings | ApplySettings) -> str:
    """What `evaluate` takes of an output: a model, or the target with what is added to it."""
    out = shlex.quote(str(settings.out))
    if not settings.as_task_vector and not (settings.out / "adapter_config.json").exists():
        return out
    file = "/task_vector.safetensors" if settings.as_task_vector else ""
    return f"{shlex.quote(settings.target_base or 'BASE')} --add {out}{file}"


def _worst(errors: Mapping[str, float]) -> list[tuple[str, float]]:
    told = [(name, error) for name, error in errors.items() if error >= TOLD]
    return sorted(told, key=lambda item: -item[1])[:3]


def _bytes(count: int) -> str:
    return f"{count / 2**30:.1f} GiB" if count > 2**29 else f"{count / 2**20:.0f} MiB"


def _seconds(seconds: float) -> str:
    return f"{seconds / 60:.0f} minutes" if seconds > 120 else f"{max(1, round(seconds))} s"
