"""The verbs together, exit codes, and one sentence for every mistake.

Exit codes: 0 done; 1 a bug in taskferry; 2 invalid input; 3 the transfer does not help, nothing written; 4 some
adapters of a fleet failed, the others moved; 130 interrupted, nothing half-written.
"""

from __future__ import annotations

import os
import sys
import warnings
from typing import Annotated, Any

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
    methods,
    plan,
    push,
    report,
    transfer,
)
from taskferry.cli.terminal import plain
from taskferry.errors import TaskferryError, TaskferryWarning
from taskferry.version import __version__

INTERRUPTED = 130  # what typer makes of an interrupt, and what shells expect
FIRST = """\
[bold]taskferry[/] moves a fine-tune (a LoRA or a full model) from one base model to
another, without training.

[bold]Try it first[/], on two small models that come with the package:

  taskferry example demo
  cd demo
  taskferry transfer --source-base base-a --source-tuned my-lora \\
      --target-base base-b --calibration data.jsonl --out my-lora-on-b

[bold]Then with your own[/]: the same command with your folders or hub names.
Add --dry-run to see what it takes before it starts.

  taskferry --help            all commands
  taskferry transfer --help   all options of one
"""

app = typer.Typer(
    name="taskferry",
    help="Move a fine-tune from one base model to another, without training.",
    epilog="First time? Type `taskferry` alone.",
    invoke_without_command=True,
    pretty_exceptions_enable=False,
)
for panel, verbs in {
    "Move one fine-tune": (example, transfer, evaluate, report),
    "Move many": (fit, apply, fleet),
    "Look before and after": (plan, doctor, inspect, diff, analyze),
    "Compare and share": (methods, bench, push),
}.items():
    for verb in verbs:
        verb.register(app, panel)


def _version(show: bool) -> None:
    if show:
        print(__version__)
        raise typer.Exit


Version = Annotated[
    bool, typer.Option("--version", callback=_version, is_eager=True, metavar="", help="Show the version.")
]


@app.callback()
def _root(context: typer.Context, version: Version = False) -> None:  # noqa: ARG001  (its callback shows it)
    if context.invoked_subcommand is None:
        Console(highlight=False, soft_wrap=True).print(FIRST, end="")


def run() -> None:
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
