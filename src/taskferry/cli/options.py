"""Command options from settings: a setting is declared once, with its check and its help."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any, Literal, get_args, get_origin

import typer

from taskferry.settings import CalibrationSettings, OutputSettings, Settings, Writing

Run = Callable[..., None]
MOST_USED, EVERYWHERE = "Most used", "With every command"  # panels of the help


def with_settings(settings: type[Settings], *, positional: tuple[str, ...] = ()) -> Callable[[Run], Run]:
    """Give a verb `run(given, **flags)` one option for every setting; `given` holds those the user set.

    Values reach the settings as they were typed: pydantic checks them all together, also those of a YAML file.
    """

    def decorate(run: Run) -> Run:
        own = [
            p.replace(kind=inspect.Parameter.KEYWORD_ONLY)
            for p in inspect.signature(run, eval_str=True).parameters.values()
            if p.name != "given"
        ]

        def command(**values: Any) -> None:
            flags = {p.name: values.pop(p.name) for p in own}
            given = {name: value for name, value in values.items() if value not in (None, False, [])}
            run(given, **flags)

        fields = sorted(settings.model_fields, key=lambda name: _order(name, settings, positional))
        parameters = [_parameter(name, settings, name in positional) for name in fields]
        command.__signature__ = inspect.Signature([*parameters, *own])  # type: ignore[attr-defined]
        command.__annotations__ = {p.name: p.annotation for p in [*parameters, *own]}
        command.__doc__ = run.__doc__
        command.__name__ = run.__name__
        return command

    return decorate


def _parameter(name: str, settings: type[Settings], positional: bool) -> inspect.Parameter:
    field = settings.model_fields[name]
    help_text = _help(name, settings)
    kind: Any = str | None
    if field.annotation is bool:
        kind = bool
    elif get_origin(field.annotation) in (list, dict):
        kind = list[str] | None
    annotation: Any
    if positional:
        argument = typer.Argument(help=help_text, show_default=False, metavar=name.upper())
        annotation = Annotated[kind, argument]
    else:
        flag = f"--{name.replace('_', '-')}"
        panel = MOST_USED if name in settings.first else _owner(name, settings).panel
        metavar = _metavar(field.annotation)
        option = typer.Option(flag, help=help_text, show_default=False, rich_help_panel=panel, metavar=metavar)
        annotation = Annotated[kind, option]
    default = False if kind is bool else None
    return inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=annotation)


def _owner(name: str, settings: type[Settings]) -> type[Settings]:
    """The class that declares a setting: its options stand together in the help."""
    return next(c for c in reversed(settings.__mro__) if issubclass(c, Settings) and name in c.model_fields)


def _order(name: str, settings: type[Settings], positional: tuple[str, ...]) -> tuple[bool, int, int, bool]:
    """Arguments, then what most need, then the verb's own settings, then what verbs share."""
    first = settings.first.index(name) if name in settings.first else len(settings.first)
    ranks = {settings: 0, Writing: 1, CalibrationSettings: 2, OutputSettings: 3}
    rank = ranks.get(_owner(name, settings), 4)
    return name not in positional, first, rank, not settings.model_fields[name].is_required()


def _help(name: str, settings: type[Settings]) -> str:
    """What a setting does, what it can be, its default, and whether it must be given."""
    field = settings.model_fields[name]
    text = field.description or ""
    choices = _choices(field.annotation)
    if choices:
        text += f": {', '.join(choices[:-1])} or {choices[-1]}" if len(choices) > 1 else ""
    if field.is_required():
        return f"{text} (required)"
    if field.default not in (None, False, "", [], {}):
        shown = field.default[0] if isinstance(field.default, list) else field.default
        text += f" (default: {shown})"
    return text


def _choices(annotation: Any) -> list[str]:
    """The words that a setting takes."""
    if get_origin(annotation) is Literal:
        return [str(word) for word in get_args(annotation)]
    return [word for option in get_args(annotation) if get_origin(option) is Literal for word in _choices(option)]


def _metavar(annotation: Any) -> str:
    """The kind of a setting; its choices stand in its help, where words are not broken."""
    if annotation is bool:
        return ""  # a flag takes nothing
    if get_origin(annotation) is dict:
        return "NAME=VALUE"
    if get_origin(annotation) is Literal:
        return "WORD"
    for option in get_args(annotation) or (annotation,):
        kind = get_args(option)[0] if get_origin(option) is Annotated else option
        if kind in (int, float, Path):
            return {int: "N", float: "X", Path: "PATH"}[kind]
    return "TEXT"


def example(command: str) -> str:
    """What stands below the help of a verb."""
    return f"Example: {command}"


YamlFile = Annotated[
    Path | None,
    typer.Option(
        "--config",
        help="settings in a YAML file; options override it",
        exists=True,
        dir_okay=False,
        metavar="FILE",
        rich_help_panel=EVERYWHERE,
    ),
]
Quiet = Annotated[bool, typer.Option("--quiet", help="nothing but errors", metavar="", rich_help_panel=EVERYWHERE)]
Json = Annotated[
    bool, typer.Option("--json", help="the result as JSON on standard output", metavar="", rich_help_panel=EVERYWHERE)
]
DryRun = Annotated[
    bool, typer.Option("--dry-run", help="show the plan and stop", metavar="", rich_help_panel=MOST_USED)
]
