"""taskferry compare: methods on one pair, one table."""

from __future__ import annotations

from typing import Any

from rich.console import Console

from taskferry.cli.options import Json, Quiet, YamlFile, with_settings
from taskferry.cli.terminal import plain, print_json, waiting
from taskferry.config import CompareSettings, load_settings


@with_settings(CompareSettings)
def run(given: dict[str, Any], config: YamlFile = None, quiet: Quiet = False, as_json: Json = False) -> None:
    """Compare methods on one pair of models, with the same samples and test data."""
    with waiting(quiet or as_json):
        settings = load_settings(CompareSettings, config, given)
        from taskferry.compare import compare
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
