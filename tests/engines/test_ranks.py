"""Several processes on real gloo give the alignment of one; a lost rank ends the job, a restart goes on."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from taskferry import Alignment
from tests.helpers import folders
from tests.helpers.command import ranks
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


def words(world: Path, out: Path, *options: str) -> list[str]:
    given = ["fit", "--source-base", world / "small", "--target-base", world / "large"]
    given += ["--calibration", world / "prompts.jsonl", "--samples", "12", "--micro-batch", "2", "--out", out]
    # Groups of one block each, so that there is something to resume.
    return [*map(str, given), "--method", "bico", "--statistics-memory", "0.00002", *options]


@pytest.fixture(scope="module")
def alone(world: Path) -> Alignment:
    """The alignment of one process that is a rank."""
    ranks(1, *words(world, world / "alone.alignment"))
    return Alignment.load(world / "alone.alignment")


@pytest.mark.parametrize("count", [2, 4])
def test_one_two_and_four_processes_give_one_alignment(
    world: Path, alone: Alignment, count: int, tmp_path: Path
) -> None:
    ranks(count, *words(world, tmp_path / "found.alignment"))
    found = Alignment.load(tmp_path / "found.alignment")
    assert len(alone.pairs) == 3 * 7
    assert found.pairs == alone.pairs
    same(found, alone)
    assert found.quality_in.keys() == alone.quality_in.keys()
    assert [p.name for p in tmp_path.iterdir()] == ["found.alignment"]


def same(found: Alignment, meant: Alignment) -> None:
    for mine, theirs in ((found.R_in, meant.R_in), (found.R_out, meant.R_out)):
        assert set(mine) == set(theirs)
        for key, R in theirs.items():
            assert relative(mine[key].dense(), R.dense()) < 1e-5, key


def test_sharded_models_give_the_same_alignment(world: Path, alone: Alignment, tmp_path: Path) -> None:
    """Six micro-batches over four ranks: two of them run one for the others' sake, which must not count."""
    ranks(4, *words(world, tmp_path / "sharded.alignment", "--shard"))
    sharded = Alignment.load(tmp_path / "sharded.alignment")
    assert sharded.pairs == alone.pairs
    assert sharded.provenance == alone.provenance  # hashes of the whole models among it
    same(sharded, alone)


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
        "import os\nif 'RANK' in os.environ:\n" + "".join(f"    {line}\n" for line in WATCH.strip().splitlines())
    )
    out = tmp_path / "out.alignment"
    notes = [tmp_path / f"{number}.notes" for number in range(3)]
    path = os.pathsep.join([str(tmp_path / "site"), os.environ.get("PYTHONPATH", "")])
    told = torchrun(words(world, out), PYTHONPATH=path, TASKFERRY_TEST_WATCH=str(notes[0]), TASKFERRY_TEST_CRASH="3")
    assert not out.exists()
    groups = sorted((tmp_path / f".{out.name}.groups").glob("*.alignment"))
    assert len(groups) == 2
    assert "exitcode" in told or "lost another rank" in told
    ranks(2, *words(world, out), before=WATCH, TASKFERRY_TEST_WATCH=str(notes[1]))
    ranks(2, *words(world, tmp_path / "fresh.alignment"), before=WATCH, TASKFERRY_TEST_WATCH=str(notes[2]))
    resumed_groups, fresh_groups = (note.read_text().count("1") for note in notes[1:])
    assert (resumed_groups, fresh_groups) == (1, 3)
    resumed, fresh = Alignment.load(out), Alignment.load(tmp_path / "fresh.alignment")
    assert resumed.pairs == fresh.pairs
    for key, R in fresh.R_out.items():
        assert torch.equal(R.dense(), resumed.R_out[key].dense())
    assert not (tmp_path / f".{out.name}.groups").exists()


def torchrun(given: list[str], **environment: str) -> str:
    """The launcher itself, of a job that fails within its time; what it says."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "-m"]
    variables = {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", **environment}
    done = subprocess.run(
        [*command, "taskferry", *given], capture_output=True, text=True, env=variables, timeout=600, check=False
    )
    assert done.returncode, done.stdout + done.stderr
    return done.stdout + done.stderr
