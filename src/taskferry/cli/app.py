"""The verbs together, exit codes, and one sentence for every mistake.

Exit codes: 0 done; 1 a bug in taskferry; 2 invalid input; 3 the move does not help, nothing written; 4 some
adapters of a fleet failed, the others moved; 130 interrupted, nothing half-written.
"""

from __future__ import annotations

import os
import sys
from importlib import import_module
from typing import Annotated, Any

import typer
from rich.console import Console
from typer.core import TyperGroup

from taskferry.cli.terminal import plain
from taskferry.errors import TaskferryError
from taskferry.version import __version__

INTERRUPTED = 130  # what typer makes of an interrupt, and what shells expect
FIRST = """\
[bold]taskferry[/] moves a fine-tune (a LoRA or a full model) from one base model to
another, without training.

[bold]Try it first[/], on two small models that come with the package:

  taskferry example demo
  cd demo
  taskferry transfer --source-tuned my-lora --target-base base-b \\
      --calibration data.jsonl

[bold]Then with your own[/]: the same command with your folders or hub names.
Add --dry-run to see what it takes before it starts.

  taskferry --help            all commands
  taskferry transfer --help   all options of one
"""

VERBS = {  # by panel of the help; a test holds each sentence to the verb's own
    "Move one fine-tune": {
        "example": "Write two small models, a LoRA and data into a new folder: every command of the documentation "
        "runs in it.",
        "transfer": "Move a fine-tune (a full model or a LoRA) to another base model.",
        "evaluate": "Score a model, or a model with an adapter added, on held-out samples.",
        "report": "Write the page of a transfer, for people: one HTML file that needs nothing else.",
    },
    "Move many": {
        "fit": "Fit the maps between two base models and save them as one alignment file.",
        "apply": "Move a LoRA, a task vector or a tuned model by a saved alignment.",
        "fleet": "Move every adapter of a folder to one or more new bases, in parallel; rerun to resume.",
    },
    "Look and compare": {
        "inspect": "Show what a model, an adapter, an alignment or an output holds, or how near two bases are.",
        "compare": "Compare methods on one pair of models, with the same samples and test data.",
    },
}

_TUNED, _DATA = ("--source-tuned", "--add"), ("--calibration", "--test")
MEANT = {  # what other tools call an option, and the options of ours that it can mean
    "--lora": _TUNED,
    "--adapter": _TUNED,
    "--model": ("--source-base", "--source-tuned", "--target-base"),
    "--base": ("--source-base", "--target-base"),
    "--data": _DATA,
    "--dataset": _DATA,
    "--output": ("--out",),
}


class Verbs(TyperGroup):
    """Imports a verb, with its settings and options, when it is called: the help of all needs none of them."""

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        """The verb that was typed, in place of its sentence."""
        name, known, rest = super().resolve_command(ctx, args)
        return name, _verb(str(name), ctx) if known else None, rest

    def invoke(self, ctx: Any) -> Any:
        """Run the verb; an interrupt keeps its message, which typer would drop."""
        try:
            return super().invoke(ctx)
        except KeyboardInterrupt as stop:
            raise typer.Abort(*stop.args) from stop

    def get_params(self, ctx: Any) -> Any:
        """The options of the command itself."""
        return _flags(super().get_params(ctx))


def _verb(name: str, context: Any) -> Any:
    """A verb as a command with all its options."""
    alone, module = typer.Typer(), import_module(f"taskferry.cli.{name}")
    alone.callback()(lambda: None)
    alone.command(name, epilog=getattr(module, "EXAMPLE", None))(module.run)
    command = typer.main.get_group(alone).commands[name]
    _flags(command.get_params(context))
    return command


def _flags(options: Any) -> Any:
    """Options, of which flags name no kind of value: they take none."""
    for option in options:
        if getattr(option, "is_flag", False) and option.metavar is None:
            option.metavar = ""
    return options


app = typer.Typer(
    name="taskferry",
    cls=Verbs,
    help="Move a fine-tune from one base model to another, without training.",
    epilog="First time? Type `taskferry` alone.",
    invoke_without_command=True,
    pretty_exceptions_enable=False,
)
for panel, verbs in VERBS.items():
    for name, sentence in verbs.items():
        app.command(name, rich_help_panel=panel, help=sentence)(lambda: None)


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
    try:
        code = app(standalone_mode=False)
        if code == INTERRUPTED:
            raise KeyboardInterrupt
    except TaskferryError as error:
        console.print(f"[bold red]taskferry:[/] {plain(error)}")
        sys.exit(2)
    except (KeyboardInterrupt, typer.Abort) as stop:
        kept = "".join(f"; {plain(text)}" for text in stop.args)
        console.print(f"[bold red]taskferry:[/] interrupted; nothing was written{kept}")
        sys.exit(INTERRUPTED)
    except Exception as error:
        if not hasattr(error, "show"):
            raise
        wrong: Any = error
        meant = MEANT.get(getattr(error, "option_name", ""))
        if meant is not None:  # names that are spelt alike would mislead
            known = {option for parameter in wrong.ctx.command.params for option in parameter.opts}
            wrong.possibilities = [option for option in meant if option in known]
        wrong.show()  # a word that is no option: the command line's own message
        sys.exit(2)
    sys.exit(code if isinstance(code, int) else 0)
