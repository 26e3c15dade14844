"""Fuzzing guided by coverage, with atheris: mutants that reach new lines of a reader are mutated further.

    python benchmarks/guided.py adapters|indexes|alignments RUNS

Mutants are made as in benchmarks/fuzzing.py; an escape ends the process with its traceback and an exit code.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

import atheris

sys.path.insert(0, str(Path(__file__).parents[1]))
with atheris.instrument_imports(include=["taskferry.checkpoints", "taskferry.alignment", "taskferry.consistency",
                                         "taskferry.files", "taskferry.taskvector"]):  # fmt: skip
    import fuzzing
    from mutation import Mutator
    from tests import hostile

    from taskferry import Alignment, TaskVector
    from taskferry.checkpoints import read_adapter
    from taskferry.checkpoints.folders import check_folder
    from taskferry.errors import TaskferryError
    from taskferry.files import HEADER


def adapters(folder: Path, data: bytes) -> None:
    """The configuration up to a mark, then the factors."""
    config, _, factors = data.partition(b"\x1e")
    (folder / "adapter_config.json").write_bytes(config)
    (folder / "adapter_model.safetensors").write_bytes(factors)
    read_adapter(folder, fuzzing.SKELETON)


def indexes(folder: Path, data: bytes) -> None:
    (folder / "model.safetensors.index.json").write_bytes(data)
    check_folder(folder)


def alignments(folder: Path, data: bytes) -> None:
    (folder / "x.alignment").write_bytes(data)
    Alignment.load(folder / "x.alignment").apply(TaskVector({}))


READERS: dict[str, Callable[[Path, bytes], None]] = {"adapters": adapters, "indexes": indexes, "alignments": alignments}


def seed(reader: str) -> bytes:
    """What the first mutants are made from."""
    if reader == "alignments":
        return fuzzing._good("alignment")
    if reader == "indexes":
        return json.dumps({"weight_map": {"a": "a.safetensors"}}).encode()
    config = {"peft_type": "LORA", "r": 2, "lora_alpha": 4, "alpha_pattern": {"q.*y": 2}, "rank_pattern": {"key": 1}}
    return json.dumps(config).encode() + b"\x1e" + fuzzing.save(hostile.factors())


def mutate(reader: str, data: bytes, most: int, number: int) -> bytes:
    """By structure where there is one left, by bytes otherwise."""
    mutant = Mutator(number)
    try:
        if reader == "alignments":
            return mutant.safetensors(data, HEADER)[:most]
        config, mark, rest = data.partition(b"\x1e")
        if mark and number % 2:
            return (config + mark + mutant.safetensors(rest))[:most]
        return (mutant.text(json.loads(config)) + mark + rest)[:most]
    except Exception:  # there is no structure left
        return mutant.blob(data)[:most]


def main() -> None:
    reader, runs = sys.argv[1], sys.argv[2]
    work = Path(tempfile.mkdtemp(dir="/dev/shm" if os.path.isdir("/dev/shm") else None))
    corpus, folder = work / "corpus", work / "folder"
    corpus.mkdir()
    folder.mkdir()
    (corpus / "good").write_bytes(seed(reader))
    (folder / "a.safetensors").write_bytes(fuzzing.save(hostile.factors()))

    def one(data: bytes) -> None:
        try:
            READERS[reader](folder, data)
        except TaskferryError:
            return

    def custom(data: bytes, most: int, number: int) -> bytes:
        return mutate(reader, data, most, number)

    words = [sys.argv[0], f"-runs={runs}", "-timeout=10", "-rss_limit_mb=4000", "-max_len=100000", "-verbosity=0",
             f"-artifact_prefix={tempfile.gettempdir()}/", str(corpus)]  # fmt: skip
    atheris.Setup(words, one, custom_mutator=custom)
    atheris.Fuzz()


if __name__ == "__main__":
    main()
