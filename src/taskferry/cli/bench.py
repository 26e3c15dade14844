"""taskferry bench compare, run, smoke, recipes: tables. taskferry methods: what there is."""

from __future__ import annotations

import tempfile
import time
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeRemainingColumn
from rich.table import Table

from taskferry.bench.comparing import compare
from taskferry.bench.planning import RecipePlan, plan_recipe
from taskferry.bench.recipe import Cell, load_recipe, recipe_names
from taskferry.bench.running import Places, Record, Reporter, run_recipe
from taskferry.bench.smoke import smoke_failures
from taskferry.bench.standin import stand_in
from taskferry.bench.tables import collect, markdown, refusals
from taskferry.cli.options import DryRun, Json, Quiet, YamlFile, with_settings
from taskferry.cli.screen import plain, print_json
from taskferry.methods import methods
from taskferry.settings import CompareSettings, load_settings

bench = typer.Typer(help="Compare methods, and make tables from recipes.", no_args_is_help=True)

Models = Annotated[Path, typer.Option("--models", help="the folder of models that a recipe names")]
Data = Annotated[Path, typer.Option("--data", help="the folder of data sets that a recipe names")]
Work = Annotated[Path, typer.Option("--work", help="fine-tunes and results are kept here; a second run goes on")]
Device = Annotated[str, typer.Option("--device", help="cpu, cuda, or auto")]
StandIn = Annotated[bool, typer.Option("--stand-in", help="tiny random models and data: is nothing amiss?")]
ZOO = Path("benchmarks") / "zoo"


def register(app: typer.Typer) -> None:
    """Add the verbs."""
    bench.command("compare")(with_settings(CompareSettings)(run_compare))
    bench.command("run")(run)
    bench.command("smoke")(smoke)
    bench.command("recipes")(recipes)
    app.add_typer(bench, name="bench")
    app.command("methods")(show)


def run_compare(given: dict[str, Any], config: YamlFile = None, quiet: Quiet = False, as_json: Json = False) -> None:
    """All methods on one pair of models, with the same samples, seeds and test data."""
    settings = load_settings(CompareSettings, config, given)
    console = Console(highlight=False)

    def tell(row: str, score: float) -> None:
        if not (quiet or as_json):
            console.print(f"[dim]{plain(row):>24}[/]  {score:.2f}")

    result = compare(settings, tell)
    if settings.out is not None:
        result.write(settings.out)
    if as_json:
        print_json(vars(result))
    elif not quiet:
        console.print()
        console.print(result.markdown(), markup=False)


def run(
    recipe: Annotated[str, typer.Argument(help="a recipe's name (`taskferry bench recipes`) or a YAML file")],
    models: Models = ZOO,
    data: Data = Path("benchmarks") / "data",
    work: Work = Path("bench-work"),
    device: Device = "auto",
    dry_run: DryRun = False,
    standing: StandIn = False,
    quiet: Quiet = False,
    as_json: Json = False,
) -> None:
    """Make a table: fine-tune, draw calibration sets, move, score. Interrupted, it goes on where it was."""
    chosen = load_recipe(recipe)
    if dry_run:
        _show_plan(plan_recipe(chosen, models), as_json)
        return
    with tempfile.TemporaryDirectory() as folder:
        places = Places(models, data, work, device)
        if standing:
            chosen, places = stand_in(chosen, Path(folder))
        records = _run(chosen, recipe, places, quiet or as_json)
    if as_json:
        print_json(records)
    elif not quiet:
        Console(highlight=False, soft_wrap=True).print(
            f"\n{_page(records, 'K' if chosen.per_class else 'N')}", markup=False
        )


def smoke(
    models: Models = ZOO,
    data: Data = Path("benchmarks") / "data",
    device: Device = "auto",
    quiet: Quiet = False,
    as_json: Json = False,
) -> None:
    """One scenario with every row in under five minutes; exits with 1 where the order of rows is not as it must be."""
    started = time.time()
    with tempfile.TemporaryDirectory() as folder:
        records = _run(
            load_recipe("zoo/smoke"), "zoo/smoke", Places(models, data, Path(folder), device), quiet or as_json
        )
    seconds = time.time() - started
    failures = smoke_failures(records, seconds)
    if as_json:
        print_json({"records": records, "seconds": round(seconds), "failures": failures})
    else:
        console = Console(highlight=False, soft_wrap=True)
        if not quiet:
            console.print(f"\n{_page(records)}\n\n{seconds:.0f} s", markup=False)
        for failure in failures:
            console.print(f"[bold red]missed[/]  {plain(failure)}")
    raise typer.Exit(1 if failures else 0)


def recipes(as_json: Json = False) -> None:
    """List the recipes."""
    titles = {name: load_recipe(name).title for name in recipe_names()}
    if as_json:
        print_json(titles)
        return
    for name, title in titles.items():
        Console(highlight=False).print(f"[bold]{name:<14}[/] {plain(title)}")


class _Bars(Reporter):
    """A bar for the cells, one for the fine-tune that runs, and a line for every score."""

    def __init__(self, progress: Progress, name: str) -> None:
        self.progress = progress
        self.cells = progress.add_task(plain(name), total=None)
        self.tuning: dict[str, TaskID] = {}

    def training(self, model: str, task: str, step: int, steps: int) -> None:
        """Move the bar of a fine-tune."""
        name = f"fine-tune {model} on {task}"
        if name not in self.tuning:
            self.tuning[name] = self.progress.add_task(plain(name), total=steps)
        self.progress.update(self.tuning[name], completed=step, visible=step < steps)

    def cell(self, done: int, total: int, cell: Cell) -> None:  # noqa: ARG002
        """Move the bar of cells."""
        self.progress.update(self.cells, completed=done, total=total)

    def score(self, record: Record) -> None:
        """Print a score."""
        shown = f"{record['score']:.1f}" if "score" in record else "refused"
        where = f"{record['task']} N={record.get('samples', record.get('per_class'))} seed {record['seed']}"
        self.progress.console.print(f"[dim]{plain(where):>28}  {plain(record['row']):<28}[/]{shown}")


def _run(recipe: Any, name: str, places: Places, silent: bool) -> list[Record]:
    if silent:
        return run_recipe(recipe, name, places)
    columns = (TextColumn("{task.description:>28}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=Console(highlight=False)) as progress:
        return run_recipe(recipe, name, places, _Bars(progress, name))


def _page(records: list[Record], count_name: str = "N") -> str:
    return markdown(collect(records), count_name, refusals(records))


def _show_plan(plan: RecipePlan, as_json: bool) -> None:
    if as_json:
        print_json(asdict(plan))
        return
    table = Table(title=plain(plan.title), title_justify="left", show_header=False, box=None, pad_edge=False)
    table.add_column(style="cyan", no_wrap=True)
    table.add_column(overflow="fold")
    for name, size in plan.models.items():
        table.add_row(
            plain(name), plain(f"{size.given}: {size.parameters / 1e6:,.1f} M, {size.tokens} tokens a sample")
        )
    for name, given in plan.tasks.items():
        table.add_row(plain(name), plain(given))
    table.add_row("pairs", plain(", ".join(f"{a} → {b}" for a, b in plan.pairs)))
    table.add_row("fine-tunes", f"{plan.finetunes}, about {plan.finetune_flops / 1e15:,.2f} PFLOP")
    table.add_row("draws", f"{plan.cells} with {plan.rows} rows, about {plan.transfer_flops / 1e15:,.2f} PFLOP")
    Console(highlight=False).print(table)


def show(as_json: Json = False) -> None:
    """List the methods with their settings."""
    known = methods()
    if as_json:
        print_json({n: {k: str(v) for k, v in m.settings.items()} for n, m in known.items()})
        return
    table = Table(box=None, pad_edge=False, header_style="cyan")
    for column in ("method", "setting", "default", "what it does"):
        table.add_column(column)
    for name, found in known.items():
        table.add_row(f"[bold]{name}[/]", "", "", plain(found.summary))
        for setting, (_, default, text) in found.settings.items():
            table.add_row("", setting, plain(str(default)), plain(text))
        for effort, settings in found.efforts.items():
            words = " ".join(f"{setting}={value}" for setting, value in settings.items())
            table.add_row("", plain(f"--effort {effort}"), "", plain(words))
    Console(highlight=False).print(table)
