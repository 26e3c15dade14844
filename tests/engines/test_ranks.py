"""Several processes on real gloo give the alignment of one; a lost rank ends the job, a restart goes on."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from taskferry import Alignment
from tests.helpers import folders
from tests.helpers.tiny import relative

pytest.importorskip("transformers")
pytest.importorskip("datasets")


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("ranks")
    folders.causal(root / "small", "LlamaForCausalLM", 16, 2, 1)
    folders.causal(root / "large", "LlamaForCausalLM", 24, 3, 2)
    folders.prompts(root / "prompts.jsonl")
    return root


def torchrun(
    world: Path, ranks: int, out: Path, code: int = 0, options: tuple[str, ...] = (), **environment: str
) -> str:
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
    command += ["-m", "taskferry", "fit", "--source-base", world / "small", "--target-base", world / "large"]
    command += ["--calibration", world / "prompts.jsonl", "--samples", "12", "--micro-batch", "2", "--out", out]
    # Groups of one block each, so that there is something to resume.
    command += ["--method", "bico", "--statistics-memory", "0.00002", *options]
    variables = {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", **environment}
    done = subprocess.run(
        [str(word) for word in command], capture_output=True, text=True, env=variables, timeout=300, check=False
    )
    assert (done.returncode == 0) == (code == 0), done.stdout + done.stderr
    return done.stdout + done.stderr


def test_one_two_and_four_processes_give_one_alignment(world: Path, tmp_path: Path) -> None:
    found = {}
    for ranks in (1, 2, 4):
        torchrun(world, ranks, tmp_path / f"{ranks}.alignment")
        found[ranks] = Alignment.load(tmp_path / f"{ranks}.alignment")
    reference = found[1]
    assert len(reference.pairs) == 3 * 7
    for ranks in (2, 4):
        assert found[ranks].pairs == reference.pairs
        for mine, theirs in ((found[ranks].R_in, reference.R_in), (found[ranks].R_out, reference.R_out)):
            assert set(mine) == set(theirs)
            for key, R in theirs.items():
                assert relative(mine[key].dense(), R.dense()) < 1e-5, key
        assert found[ranks].quality_in.keys() == reference.quality_in.keys()
    assert sorted(p.name for p in tmp_path.iterdir()) == ["1.alignment", "2.alignment", "4.alignment"]


def test_sharded_models_give_the_same_alignment(world: Path, tmp_path: Path) -> None:
    """Six micro-batches over four ranks: two of them run one for the others' sake, which must not count."""
    torchrun(world, 1, tmp_path / "whole.alignment")
    torchrun(world, 4, tmp_path / "sharded.alignment", options=("--shard",))
    whole, sharded = (Alignment.load(tmp_path / f"{name}.alignment") for name in ("whole", "sharded"))
    assert sharded.pairs == whole.pairs
    assert sharded.provenance == whole.provenance  # hashes of the whole models among it
    for mine, theirs in ((sharded.R_in, whole.R_in), (sharded.R_out, whole.R_out)):
        for key, R in theirs.items():
            assert relative(mine[key].dense(), R.dense()) < 1e-5, key


# Every rank notes the groups that it solves; one dies before the group whose number it is told.
WATCH = """
import os
from taskferry.engines import ranks
solve, count = ranks.RankedPair.solve, 0
def watched(self, *arguments):
    global count
    count += 1
    if self.rank == 1 and count == int(os.environ.get('TASKFERRY_TEST_CRASH', '0')):
        os._exit(9)
    with open(os.environ['TASKFERRY_TEST_WATCH'], 'a') as file:
        file.write(f'{self.rank}')
    return solve(self, *arguments)
ranks.RankedPair.solve = watched
"""


def test_a_rank_that_dies_ends_the_job_and_a_restart_goes_on(world: Path, tmp_path: Path) -> None:
    """The second rank is killed in the third group: no hang, one sentence, and two groups are not done again."""
    (tmp_path / "site").mkdir()
    (tmp_path / "site" / "sitecustomize.py").write_text(
        "import os\nif 'TASKFERRY_TEST_WATCH' in os.environ and 'RANK' in os.environ:\n"
        + "".join(f"    {line}\n" for line in WATCH.strip().splitlines())
    )
    out = tmp_path / "out.alignment"
    started = time.time()
    notes = [tmp_path / f"{number}.notes" for number in range(3)]
    watched = {"PYTHONPATH": os.pathsep.join([str(tmp_path / "site"), os.environ.get("PYTHONPATH", "")])}
    told = torchrun(world, 2, out, 1, **watched, TASKFERRY_TEST_WATCH=str(notes[0]), TASKFERRY_TEST_CRASH="3")
    assert time.time() - started < 120
    assert not out.exists()
    groups = sorted((tmp_path / f".{out.name}.groups").glob("*.alignment"))
    assert len(groups) == 2
    assert "exitcode" in told or "lost another rank" in told
    torchrun(world, 2, out, **watched, TASKFERRY_TEST_WATCH=str(notes[1]))
    torchrun(world, 2, tmp_path / "fresh.alignment", **watched, TASKFERRY_TEST_WATCH=str(notes[2]))
    resumed_groups, fresh_groups = (note.read_text().count("1") for note in notes[1:])
    assert (resumed_groups, fresh_groups) == (1, 3)
    resumed, fresh = Alignment.load(out), Alignment.load(tmp_path / "fresh.alignment")
    assert resumed.pairs == fresh.pairs
    for key, R in fresh.R_out.items():
        assert torch.equal(R.dense(), resumed.R_out[key].dense())
    assert not (tmp_path / f".{out.name}.groups").exists()
