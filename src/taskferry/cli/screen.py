"""What people see of a run: what will be done, progress bars, the verdict and the next command."""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path

from rich.console import Console
from rich.table import Table

from taskferry.cli.terminal import plain, print_json, warn
from taskferry.config import ApplySettings, TransferSettings
from taskferry.display.bars import Bars
from taskferry.estimate import Estimate
from taskferry.opening import Reporter
from taskferry.output.record import Result
from taskferry.output.verdict import HARMS, HELPS, NOT_SHOWN
from taskferry.output.write import TASK_VECTOR

MARKS: dict[str | None, str] = {
    HELPS: "[bold green]It helps[/]",
    NOT_SHOWN: "[bold yellow]Not shown to help[/]",
    HARMS: "[bold red]It does harm[/]",
}
SHORT = 80  # characters of a prompt or an answer in the terminal
EXAMPLES = 2


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

    def say(self, lines: Mapping[str, str], estimate: Estimate | None = None) -> None:
        """Print what will be done as soon as it is known, and what it takes at the end of a dry run."""
        self.lines.update(lines)
        if self.as_json and self.dry_run and estimate is not None:
            print_json({"plan": {**self.lines, **asdict(estimate)}})
        if self.silent:
            return
        shown = dict(lines)
        if estimate is not None:
            memory = estimate.memory_bytes / 2**20
            shown["moves"] = f"into {estimate.pairs} of {estimate.layers} linear layers of the target"
            shown["memory"] = f"about {memory:,.0f} MiB for weights and sums, activations on top"
            minutes = estimate.seconds / 60
            shown["time"] = f"roughly {minutes:.0f} minutes" if minutes > 2 else f"roughly {estimate.seconds:.0f} s"
        table = Table(show_header=False, box=None, pad_edge=False)
        table.add_column(style="cyan", no_wrap=True, min_width=8)
        table.add_column(overflow="fold")
        for name, value in shown.items():
            table.add_row(name, plain(value))
        self.console.print(table)

    def step(self, what: str, done: int, total: int) -> None:
        """Move a bar."""
        if self._bars is not None:
            self._bars(what, done, total)

    def note(self, what: str) -> None:
        """Show a line that says what takes a while."""
        if self._bars is not None:
            self._bars.note(what)

    def warning(self, what: str) -> None:
        """Print a line that stays."""
        if not self.silent:
            warn(self.console, [what])

    def verdict(self, result: Result, next_step: str) -> None:
        """Notes and warnings; then the verdict, two prompts, the folder and the next command; or all of it as JSON."""
        if self.as_json:
            written = None if result.folder is None else str(result.folder)
            print_json({**result.record, "written": written})
        if self.silent:
            return
        verdict, console = result.record["verdict"], self.console
        for note in verdict["notes"]:
            console.print(f"[dim]{plain(note)}[/]")
        for line in str(result.record["coverage_summary"]).splitlines()[1:]:
            console.print(f"[dim]{plain(line)}[/]")
        warn(console, verdict["warnings"])
        _, colon, rest = result.verdict.partition(":")
        mark = MARKS.get(result.state) if result.folder is not None and colon else None
        console.print(f"\n{mark}:{plain(rest)}" if mark else f"\n[bold]{plain(result.verdict)}[/]")
        self._examples((verdict.get("answers") or {}).get("examples", ())[:EXAMPLES])
        if result.folder is None:
            console.print("[bold yellow]refused[/]  nothing was written; --force writes it anyway")
        else:
            console.print(f"[bold]written[/]  {plain(result.folder)}")
        console.print(f"[bold]next[/]     {plain(next_step)}", soft_wrap=True)

    def _examples(self, examples: Sequence[Mapping[str, str]]) -> None:
        """Print prompts with the answers before and after."""
        for example in examples:
            self.console.print(f"[cyan]prompt[/]   {_short(example['prompt'])}")
            self.console.print(f"  [cyan]before[/] {_short(example['before'])}")
            self.console.print(f"  [cyan]after[/]  {_short(example['after'])}")


def _short(text: str) -> str:
    """A text in one line, cut where it is long."""
    line = " ".join(plain(text).split())
    return line if len(line) <= SHORT else f"{line[: SHORT - 1]}…"


def next_after(settings: TransferSettings, result: Result) -> str:
    """The command to type after a transfer."""
    if result.folder is None:
        return f"the same command with more --samples{_longer(settings)}"
    if result.state == HARMS:
        other = "without --scale" if settings.scale != "auto" else f"with more --samples{_longer(settings)}"
        return f"rm -r {shlex.quote(str(result.folder))}, then the same command {other}"
    calibration = result.record["calibration"]
    data = Path(settings.calibration)
    beside = data.with_name(f"test{data.suffix}")
    test = shlex.quote(str(beside)) if data.is_file() and beside.is_file() and beside != data else "TEST_DATA"
    shots = f" --shots {shlex.quote(settings.calibration)}" if calibration["head_made_from_samples"] else ""
    return f"taskferry evaluate {scored(settings, result)} --test {test}{shots}"


def _longer(settings: TransferSettings) -> str:
    """What else may help."""
    return ", or --set steps=100" if settings.method == "distil" else ", or --method distil"


def scored(settings: TransferSettings | ApplySettings, result: Result) -> str:
    """What `evaluate` takes of an output: a model, or the target with what is added to it."""
    out = result.folder or Path()
    form = result.record["form"]
    if form == "model":
        return shlex.quote(str(out))
    added = out / TASK_VECTOR if form == "task-vector" else out
    return f"{shlex.quote(settings.target_base or 'BASE')} --add {shlex.quote(str(added))}"
