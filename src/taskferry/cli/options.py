"""Options of a verb from its settings: a setting is declared once, with its check and its help."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any, Literal, get_args, get_origin

import typer

from taskferry.config import Settings

Run = Callable[..., None]
EVERYWHERE = "Everywhere"  # the heading of flags that every verb has


def with_settings(settings: type[Settings], *, positional: tuple[str, ...] = ()) -> Callable[[Run], Run]:
    """Give a verb `run(given, **flags)` one option for every setting in its groups; `given` holds those the user set.

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
            run({name: value for name, value in values.items() if value not in (None, False, [])}, **flags)

        named = [(name, group) for group, names in settings.groups.items() for name in names]
        named.sort(key=lambda each: each[0] not in positional)
        parameters = [_parameter(name, group, settings, name in positional) for name, group in named]
        command.__signature__ = inspect.Signature([*parameters, *own])  # type: ignore[attr-defined]
        command.__annotations__ = {p.name: p.annotation for p in [*parameters, *own]}
        command.__doc__ = run.__doc__
        command.__name__ = run.__name__
        return command

    return decorate


def _parameter(name: str, group: str, settings: type[Settings], positional: bool) -> inspect.Parameter:
    field = settings.model_fields[name]
    kind: Any = str | None
    if field.annotation is bool:
        kind = bool
    elif get_origin(field.annotation) in (list, dict):
        kind = list[str] | None
    text = _help(name, settings)
    if positional:
        annotation: Any = Annotated[kind, typer.Argument(help=text, show_default=False, metavar=name.upper())]
    else:
        flag, metavar = f"--{(field.alias or name).replace('_', '-')}", _metavar(field.annotation)
        option = typer.Option(flag, help=text, show_default=False, rich_help_panel=group, metavar=metavar)
        annotation = Annotated[kind, option]
    default = False if kind is bool else None
    return inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=annotation)


def _help(name: str, settings: type[Settings]) -> str:
    """What a setting does, what it can be, its default, and whether it must be given."""
    field = settings.model_fields[name]
    text, choices = field.description or "", _choices(field.annotation)
    if len(choices) > 1:
        text += f": {', '.join(choices[:-1])} or {choices[-1]}"
    if field.is_required():
        return f"{text} (required)"
    if field.default not in (None, False, "", 0, [], {}):
        text += f" (default: {field.default[0] if isinstance(field.default, list) else field.default})"
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
    for option in get_args(annotation) or (annotation,):
        kind = get_args(option)[0] if get_origin(option) is Annotated else option
        if kind in (int, float, Path):
            return {int: "N", float: "X", Path: "PATH"}[kind]
    return "WORD" if _choices(annotation) else "TEXT"


YamlFile = Annotated[
    Path | None,
    typer.Option(
        "--config",
        help="settings in a YAML file, these and more; options override it",
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
    bool,
    typer.Option(
        "--dry-run", help="say what will happen, sizes and a rough time", metavar="", rich_help_panel=EVERYWHERE
    ),
]
