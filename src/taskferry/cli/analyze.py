"""taskferry analyze: how alike two models are before and after alignment, and what a transfer costs."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import typer
from rich.console import Console
from rich.table import Table as RichTable

from taskferry.cli.options import Json, Quiet, YamlFile, with_settings
from taskferry.cli.terminal import plain, print_json, waiting
from taskferry.cli.transfer import command_line
from taskferry.settings import AnalyzeSettings, load_settings

if TYPE_CHECKING:
    from taskferry.report.parts import Figure


def register(app: typer.Typer) -> None:
    """Add the verb."""
    app.command("analyze")(with_settings(AnalyzeSettings)(run))


def run(given: dict[str, Any], config: YamlFile = None, quiet: Quiet = False, as_json: Json = False) -> None:
    """Measure how alike two models are: CKA and cosine by block, before and after alignment; cost; drift."""
    with waiting(quiet or as_json):
        settings = load_settings(AnalyzeSettings, config, given)
        from taskferry.analysis.study import analyze
        from taskferry.cli.screen import Screen
        from taskferry.disk.staging import check_free
        from taskferry.report.command import write_analysis
    if settings.out is not None:
        check_free(settings.out)
    screen = Screen(quiet=quiet, as_json=as_json)
    with screen.bars():
        study = analyze(settings, command=command_line(), tell=screen.step)
    if settings.out is not None:
        write_analysis(settings.out, study)
    if as_json:
        print_json(study)
    elif not quiet:
        _show(study, screen.console)
        if settings.out is not None:
            screen.console.print(f"[bold]next[/]   taskferry report {plain(settings.out)}")


def _show(study: Mapping[str, Any], console: Console) -> None:
    from taskferry.report.analysis import all_figures, analysis_report

    console.print(f"\n[bold]{plain(analysis_report(study, '').lead)}[/]")
    for figure in all_figures(study).values():
        console.print(_table(figure))


def _table(figure: Figure) -> RichTable:
    table = RichTable(title=plain(figure.caption), title_justify="left", box=None, pad_edge=False, header_style="cyan")
    if figure.numbers is not None:
        for column in figure.numbers.header:
            table.add_column(plain(column), justify="right")
        for row in figure.numbers.rows:
            table.add_row(*("" if cell is None else plain(getattr(cell, "shown", cell)) for cell in row))
    return table
