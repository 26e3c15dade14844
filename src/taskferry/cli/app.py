"""The verbs together, exit codes, and one sentence for every mistake.

Exit codes: 0 done; 1 a fault of ours; 2 something in the input to mend; 3 the transfer does not help, nothing written;
4 some adapters of a fleet failed, the others moved; 130 interrupted, nothing half-written.
"""

from __future__ import annotations

import os
import sys
import warnings
from typing import Any

import typer
from rich.console import Console

from taskferry.cli import (
    analyze,
    apply,
    bench,
    diff,
    doctor,
    evaluate,
    example,
    fit,
    fleet,
    inspect,
    plan,
    push,
    report,
    transfer,
)
from taskferry.cli.screen import plain
from taskferry.errors import TaskferryError, TaskferryWarning
from taskferry.version import __version__

INTERRUPTED = 130  # what typer makes of an interrupt, and what shells expect

app = typer.Typer(
    name="taskferry",
    help="Carry a fine-tune from one base model to another, without training.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
example.register(app)
transfer.register(app)
fit.register(app)
plan.register(app)
fleet.register(app)
apply.register(app)
diff.register(app)
evaluate.register(app)
inspect.register(app)
analyze.register(app)
report.register(app)
push.register(app)
doctor.register(app)
bench.register(app)


def _version(show: bool) -> None:
    if show:
        print(__version__)
        raise typer.Exit


@app.callback()
def _root(
    version: bool = typer.Option(False, "--version", callback=_version, is_eager=True, help="Show the version."),
) -> None:
    """Carry a fine-tune from one base model to another, without training."""


def main() -> None:
    """Run the command; errors become one sentence on standard error."""
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    console = Console(stderr=True, highlight=False, soft_wrap=True)

    def show(message: Warning | str, category: type[Warning], *where: Any, **more: Any) -> None:
        if issubclass(category, TaskferryWarning):
            console.print(f"[bold yellow]taskferry:[/] {plain(message)}")
        else:
            usual(message, category, *where, **more)

    usual, warnings.showwarning = warnings.showwarning, show
    try:
        code = app(standalone_mode=False)
        if code == INTERRUPTED:
            raise KeyboardInterrupt
    except TaskferryError as error:
        console.print(f"[bold red]taskferry:[/] {plain(error)}")
        sys.exit(2)
    except (KeyboardInterrupt, typer.Abort):
        console.print("[bold red]taskferry:[/] interrupted; nothing was written")
        sys.exit(INTERRUPTED)
    except Exception as error:
        if not hasattr(error, "show"):
            raise
        error.show()  # a word that is no option: the command line's own message
        sys.exit(2)
    sys.exit(code if isinstance(code, int) else 0)
