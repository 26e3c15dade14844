"""Make docs/images/transfer.svg: the README's command on the models of `taskferry example`, as the terminal shows it.

python docs/images/make.py
"""

from __future__ import annotations

import io
import os
import re
import tempfile
from pathlib import Path

from rich.console import Console

from taskferry.cli.screen import Screen, next_after
from taskferry.config import TransferSettings
from taskferry.example import write_example
from taskferry.jobs import transfer

HERE = Path(__file__).parent
README = HERE.parents[1] / "README.md"
WIDTH = 80  # columns: still read on a phone


def command_of(page: str) -> list[str]:
    """The words of the first transfer of a page, which the picture is of."""
    return page.split("$ taskferry transfer ", 1)[1].replace("\\\n", " ").split("\n", 1)[0].split()


def main() -> None:
    os.chdir(tempfile.mkdtemp())
    write_example(Path("demo"))
    os.chdir("demo")
    words = command_of(README.read_text(encoding="utf-8"))
    given = {name[2:].replace("-", "_"): value for name, value in zip(words[::2], words[1::2], strict=True)}
    options = [f"{name} {value}" for name, value in zip(words[::2], words[1::2], strict=True)]
    # Not a terminal: bars are drawn once, at their end, and the picture stays small.
    drawn = {"force_terminal": False, "color_system": "truecolor", "file": io.StringIO()}
    console = Console(record=True, width=WIDTH, highlight=False, **drawn)
    console.print(f"[bold green]$[/] taskferry transfer {' '.join(options[:2])} \\\n    {' '.join(options[2:])}")
    screen, settings = Screen(console=console), TransferSettings(**given)
    with screen.bars():
        outcome = transfer(settings, command=f"taskferry transfer {' '.join(options)}", reporter=screen)
    if outcome is None:
        raise SystemExit("a dry run draws nothing")
    screen.verdict(outcome, next_after(settings, outcome))
    # Without the fonts that rich would fetch from another host.
    drawing = re.sub(
        r"\s*@font-face \{.*?\}\s*(?=@font-face|\.)", "\n", console.export_svg(title="taskferry"), flags=re.S
    )
    (HERE / "transfer.svg").write_text(drawing, encoding="utf-8")


if __name__ == "__main__":
    main()
