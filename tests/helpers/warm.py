"""A process with everything imported that runs commands in forks of itself: the start of Python is most of a small one.

Each line of the input is a request in JSON (arguments, folder, files for what is said, and the variables of each of its
processes, all of which run at once); each line of the output is the largest exit code. What runs is the installed
command's own `main`, in a process of its own.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import json
import os
import signal
import sys
import traceback
from typing import Any

IMPORTS = (
    "taskferry.cli.app", "taskferry.cli.screen", "taskferry.jobs", "taskferry.output.report",
    "taskferry.evaluation.command", "taskferry.compare",
    "torch", "transformers", "peft", "datasets", "pyarrow.parquet", "pandas",
    "safetensors.torch", "transformers.models.bert.modeling_bert", "transformers.models.llama.modeling_llama",
    "transformers.models.auto.tokenization_auto", "matplotlib.figure",
)  # fmt: skip


LIMIT = 1800  # seconds: a command that hangs fails its test


def run(request: dict[str, Any], variables: dict[str, str]) -> None:
    """In the fork; does not return."""
    code: Any = 1
    try:
        signal.alarm(LIMIT)
        for number, name in ((1, "out"), (2, "err")):
            os.dup2(os.open(request[name], os.O_WRONLY | os.O_CREAT | os.O_APPEND), number)
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        os.chdir(request["folder"])
        os.environ.clear()
        os.environ.update(variables)
        exec(request["before"], {})
        sys.argv = ["taskferry", *request["arguments"]]
        from taskferry.cli import main

        main()
        code = 0
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else int(end.code is not None)
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def warm() -> None:
    """What every command makes anew: imports, transformers' table of names (half a second)."""
    for name in IMPORTS:
        try:
            importlib.import_module(name)
        except ImportError:
            continue
    with contextlib.suppress(ImportError):
        from transformers import conversion_mapping

        conversion_mapping.get_checkpoint_conversion_mapping("llama")
    gc.freeze()


def serve() -> None:
    warm()
    told = os.fdopen(os.dup(1), "w", buffering=1)
    for line in sys.stdin:
        request = json.loads(line)
        children = []
        for variables in request["processes"]:
            child = os.fork()
            if child == 0:
                run(request, variables)
            children.append(child)
        codes = [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children]
        told.write(f"{max(codes, key=abs)}\n")


if __name__ == "__main__":
    serve()
