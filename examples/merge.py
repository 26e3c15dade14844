"""Merge fine-tunes that were moved to one base, with mergekit's task arithmetic.

    python examples/merge.py base-b one=0.5 two=0.25 --out merged

A moved fine-tune is an ordinary fine-tune of the target, so every merging tool takes it: `one` and `two` are folders
that `taskferry transfer` has written. Needs mergekit (`pip install mergekit`).
"""

from __future__ import annotations

import argparse
import shutil
import subprocess
import sys
from pathlib import Path

import yaml


def recipe(base: str, parts: dict[str, float]) -> dict[str, object]:
    """θ_B + Σ weight · τ of each part."""
    return {
        "merge_method": "task_arithmetic",
        "base_model": base,
        "models": [{"model": model, "parameters": {"weight": weight}} for model, weight in parts.items()],
        "dtype": "float32",
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("base", help="the base that all of them were moved to")
    parser.add_argument("parts", nargs="+", help="FOLDER=WEIGHT")
    parser.add_argument("--out", required=True, type=Path)
    options = parser.parse_args()
    # Whole paths: mergekit asks a hub about anything that could be a name there.
    base = str(Path(options.base).resolve())
    given = (part.rpartition("=") for part in options.parts)
    parts = {str(Path(folder).resolve()): float(weight) for folder, _, weight in given}
    command = shutil.which("mergekit-yaml", path=str(Path(sys.executable).parent)) or shutil.which("mergekit-yaml")
    if command is None:
        sys.exit("mergekit-yaml is not installed: pip install mergekit")
    file = options.out.with_suffix(".merge.yaml")
    file.write_text(yaml.safe_dump(recipe(base, parts), sort_keys=False), encoding="utf-8")
    subprocess.run([command, str(file), str(options.out)], check=True)


if __name__ == "__main__":
    main()
