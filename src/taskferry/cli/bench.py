"""taskferry bench compare, run, smoke, recipes: tables."""

from __future__ import annotations

import tempfile
import time
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeRemainingColumn
from rich.table import Table

from taskferry.cli.options import DryRun, Json, Quiet, YamlFile, with_settings
from taskferry.cli.terminal import plain, print_json, waiting
from taskferry.settings import CompareSettings, load_settings

if TYPE_CHECKING:
    from taskferry.bench.planning import RecipePlan
    from taskferry.bench.recipe import Cell
    from taskferry.bench.running import Places, Record, Reporter

bench = typer.Typer(help="Compare methods, and make tables from recipes.", no_args_is_help=True)

Models = Annotated[Path, typer.Option("--models", help="the folder of models that a recipe names")]
Data = Annotated[Path, typer.Option("--data", help="the folder of data sets that a recipe names")]
Work = Annotated[Path, typer.Option("--work", help="fine-tunes and results are kept here; rerun to resume")]
Device = Annotated[str, typer.Option("--device", help="cpu, cuda, or auto")]
StandIn = Annotated[bool, typer.Option("--stand-in", help="tiny random models and data: is nothing amiss?")]
ZOO = Path("benchmarks") / "zoo"


def register(app: typer.Typer) -> None:
    """Add the verb and its parts."""
    bench.command("compare")(with_settings(CompareSettings)(run_compare))
    bench.command("run")(run)
    bench.command("smoke")(smoke)
    bench.command("recipes")(recipes)
    app.add_typer(bench, name="bench")


def run_compare(given: dict[str, Any], config: YamlFile = None, quiet: Quiet = False, as_json: Json = False) -> None:
    """All methods on one pair of models, with the same samples, seeds and test data."""
    with waiting(quiet or as_json):
        settings = load_settings(CompareSettings, config, given)
        from taskferry.bench.comparing import compare
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
    """Make a table: fine-tune, draw calibration sets, move, score. Rerun to resume."""
    with waiting(quiet or as_json):
        from taskferry.bench.planning import plan_recipe
        from taskferry.bench.recipe import load_recipe
        from taskferry.bench.running import Places
        from taskferry.bench.standin import stand_in
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
    """One scenario with every row in five minutes of one core; exits with 1 where the rows are not in their order."""
    with waiting(quiet or as_json):
        from taskferry.bench.recipe import load_recipe
        from taskferry.bench.running import Places
        from taskferry.bench.smoke import smoke_failures
    started = time.process_time()
    with tempfile.TemporaryDirectory() as folder:
        records = _run(
            load_recipe("zoo/smoke"), "zoo/smoke", Places(models, data, Path(folder), device), quiet or as_json
        )
    seconds = time.process_time() - started
    failures = smoke_failures(records, seconds)
    if as_json:
        print_json({"records": records, "cpu_seconds": round(seconds), "failures": failures})
    else:
        console = Console(highlight=False, soft_wrap=True)
        if not quiet:
            console.print(f"\n{_page(records)}\n\n{seconds:.0f} CPU-seconds", markup=False)
        for failure in failures:
            console.print(f"[bold red]missed[/]  {plain(failure)}")
    raise typer.Exit(1 if failures else 0)


def recipes(as_json: Json = False) -> None:
    """List the recipes."""
    from taskferry.bench.recipe import load_recipe, recipe_names

    titles = {name: load_recipe(name).title for name in recipe_names()}
    if as_json:
        print_json(titles)
        return
    for name, title in titles.items():
        Console(highlight=False).print(f"[bold]{name:<14}[/] {plain(title)}")


def _bars(bars: Progress, name: str) -> Reporter:
    """A bar for the cells, one for the fine-tune that runs, and a line for every score."""
    from taskferry.bench.running import Reporter

    cells = bars.add_task(plain(name), total=None)
    tuning: dict[str, TaskID] = {}

    class Bars(Reporter):
        """Drawn in a terminal."""

        def training(self, model: str, task: str, step: int, steps: int) -> None:
            """Move the bar of a fine-tune."""
            name = f"fine-tune {model} on {task}"
            if name not in tuning:
                tuning[name] = bars.add_task(plain(name), total=steps)
            bars.update(tuning[name], completed=step, visible=step < steps)

        def cell(self, done: int, total: int, cell: Cell) -> None:  # noqa: ARG002
            """Move the bar of cells."""
            bars.update(cells, completed=done, total=total)

        def score(self, record: Record) -> None:
            """Print a score."""
            shown = f"{record['score']:.1f}" if "score" in record else "refused"
            where = f"{record['task']} N={record.get('samples', record.get('per_class'))} seed {record['seed']}"
            bars.console.print(f"[dim]{plain(where):>28}  {plain(record['row']):<28}[/]{shown}")

    return Bars()


def _run(recipe: Any, name: str, places: Places, silent: bool) -> list[Record]:
    from taskferry.bench.running import run_recipe

    if silent:
        return run_recipe(recipe, name, places)
    columns = (TextColumn("{task.description:>28}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=Console(highlight=False)) as progress:
        return run_recipe(recipe, name, places, _bars(progress, name))


def _page(records: list[Record], count_name: str = "N") -> str:
    from taskferry.bench.tables import collect, markdown, refusals

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
            plain(name), plain(f"{size.given}: {size.parameters / 1e6:,.1f} M, {size.tokens} tokens per sample")
        )
    for name, given in plan.tasks.items():
        table.add_row(plain(name), plain(given))
    table.add_row("pairs", plain(", ".join(f"{a} → {b}" for a, b in plan.pairs)))
    table.add_row("fine-tunes", f"{plan.finetunes}, about {plan.finetune_flops / 1e15:,.2f} PFLOP")
    table.add_row("draws", f"{plan.cells} with {plan.rows} rows, about {plan.transfer_flops / 1e15:,.2f} PFLOP")
    Console(highlight=False).print(table)
