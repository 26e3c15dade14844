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
from tests import folders
from tests.tiny import relative

pytest.importorskip("transformers")
pytest.importorskip("datasets")


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("ranks")
    folders.causal(root / "small", "LlamaForCausalLM", 16, 2, 1)
    folders.causal(root / "large", "LlamaForCausalLM", 24, 3, 2)
    folders.prompts(root / "prompts.jsonl")
    return root


def torchrun(world: Path, ranks: int, out: Path, code: int = 0, **environment: str) -> str:
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
    command += ["-m", "taskferry", "fit", "--source-base", world / "small", "--target-base", world / "large"]
    command += ["--calibration", world / "prompts.jsonl", "--samples", "12", "--micro-batch", "2", "--out", out]
    # Groups of one block each, so that there is something to resume.
    command += ["--statistics-memory", "0.00002"]
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


CRASH = """
import os
from taskferry.engines import distributed
solve, count = distributed.Ranks.solve, 0
def dying(self, *arguments):
    global count
    count += 1
    if self.rank == 1 and count == 3:
        os._exit(9)
    return solve(self, *arguments)
distributed.Ranks.solve = dying
"""


def test_a_rank_that_dies_ends_the_job_and_a_restart_goes_on(world: Path, tmp_path: Path) -> None:
    """The second rank is killed in the third group: no hang, one sentence, and two groups are not done again."""
    (tmp_path / "site").mkdir()
    (tmp_path / "site" / "sitecustomize.py").write_text(
        "import os\nif 'TASKFERRY_TEST_CRASH' in os.environ and 'RANK' in os.environ:\n"
        + "".join(f"    {line}\n" for line in CRASH.strip().splitlines())
    )
    out = tmp_path / "out.alignment"
    started = time.time()
    told = torchrun(world, 2, out, code=1, PYTHONPATH=str(tmp_path / "site"), TASKFERRY_TEST_CRASH="1")
    assert time.time() - started < 120
    assert not out.exists()
    groups = sorted((tmp_path / f".{out.name}.groups").glob("*.alignment"))
    assert len(groups) == 2
    assert "exitcode" in told or "lost another rank" in told
    before = {path.name: path.stat().st_mtime_ns for path in groups}
    kept = {path.name: path.read_bytes() for path in groups}
    assert before.keys() == kept.keys()
    torchrun(world, 2, out)
    torchrun(world, 2, tmp_path / "fresh.alignment")
    resumed, fresh = Alignment.load(out), Alignment.load(tmp_path / "fresh.alignment")
    assert resumed.pairs == fresh.pairs
    for key, R in fresh.R_out.items():
        assert torch.equal(R.dense(), resumed.R_out[key].dense())
    assert not (tmp_path / f".{out.name}.groups").exists()
