"""taskferry bench compare: every method on one pair, one table. taskferry methods: what there is."""

from __future__ import annotations

from typing import Any

import typer
from rich.console import Console
from rich.table import Table

from taskferry.cli.options import Json, Quiet, YamlFile, with_settings
from taskferry.cli.screen import plain, print_json
from taskferry.comparing import compare
from taskferry.methods import methods
from taskferry.settings import CompareSettings, load_settings

bench = typer.Typer(help="Compare methods.", no_args_is_help=True)


def register(app: typer.Typer) -> None:
    """Add the verbs."""
    bench.command("compare")(with_settings(CompareSettings)(run))
    app.add_typer(bench, name="bench")
    app.command("methods")(show)


def run(given: dict[str, Any], config: YamlFile = None, quiet: Quiet = False, as_json: Json = False) -> None:
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
    Console(highlight=False).print(table)
