"""The models of a fresh install, and the scripts in examples/ as a user runs them."""

from __future__ import annotations

import json
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from taskferry.example import FILES, PARTS, write_example
from tests.helpers import folders
from tests.helpers.command import taskferry

pytest.importorskip("transformers")
peft = pytest.importorskip("peft")
pytest.importorskip("datasets")

ROOT = Path(__file__).parents[2]


def script(name: str, *arguments: object, cwd: Path, code: int = 0) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(ROOT / "examples" / name), *map(str, arguments)]
    done = subprocess.run(command, cwd=cwd, capture_output=True, text=True, timeout=900, check=False)
    assert done.returncode == code, done.stdout + done.stderr
    return done


@pytest.fixture(scope="module")
def demo(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("fresh") / "demo"
    taskferry("example", folder)
    return folder


def test_the_example_is_whole_and_small(demo: Path) -> None:
    assert {p.name for p in demo.iterdir()} == set(PARTS)
    assert sum(file.stat().st_size for file in FILES.rglob("*") if file.is_file()) < 6_000_000, "it comes in the wheel"
    with pytest.raises(Exception, match="exists"):
        write_example(demo)


def test_the_example_moves_and_helps(demo: Path) -> None:
    """The loss per token on held-out books falls."""
    told = taskferry("transfer", "--source-base", "base-a", "--source-tuned", "my-lora", "--target-base", "base-b",
                     "--calibration", "data.jsonl", "--samples", 40, "--out", "my-lora-on-b", "--json",
                     cwd=demo).json  # fmt: skip
    assert told["verdict"]["loss_after"] < told["verdict"]["loss_before"]
    losses = [taskferry("evaluate", "base-b", *more, "--test", "test.jsonl", "--json", cwd=demo).json["loss"]
              for more in ([], ["--add", "my-lora-on-b"])]  # fmt: skip
    assert losses[0] - losses[1] > 0.08


def test_adapters_for_a_server(demo: Path) -> None:
    """Files only: what `--lora-modules` lists are whole PEFT adapters of one base with one scaling."""
    taskferry("fit", "--source-base", "base-a", "--target-base", "base-b", "--calibration", "data.jsonl",
              "--samples", 32, "--out", "a.alignment", cwd=demo)  # fmt: skip
    for name in ("scripture", "again"):
        taskferry("apply", "a.alignment", "my-lora", "--target-base", "base-b", "--out", f"served/{name}", cwd=demo)
    words = shlex.split(script("serve.py", "served", cwd=demo).stdout)
    assert words[:3] == ["vllm", "serve", str(demo / "base-b")]
    assert words[words.index("--max-lora-rank") + 1] == "8"
    modules = dict(word.split("=") for word in words[words.index("--lora-modules") + 1 :])
    assert set(modules) == {"scripture", "again"}
    import transformers

    base = transformers.AutoModelForCausalLM.from_pretrained(demo / "base-b")
    for folder in modules.values():
        config = peft.PeftConfig.from_pretrained(demo / folder)
        assert config.lora_alpha == config.r
        peft.PeftModel.from_pretrained(base, demo / folder).unload()

    shutil.copytree(demo / "served" / "again", demo / "served" / "foreign")
    file = demo / "served" / "foreign" / "adapter_config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), "base_model_name_or_path": "other"}))
    assert "several bases" in script("serve.py", "served", cwd=demo, code=1).stderr
    file.write_text(json.dumps({**json.loads(file.read_text()), "modules_to_save": ["lm_head"]}))
    assert "foreign has modules" in script("serve.py", "served", cwd=demo, code=1).stderr


def test_merging_with_mergekit(tmp_path: Path) -> None:
    """A task-arithmetic merge of two moved fine-tunes is the sum of their moved task vectors."""
    pytest.importorskip("mergekit", reason="mergekit is not installed: pip install mergekit==0.1.5")
    from taskferry import load_model, load_tuned

    folders.causal(tmp_path / "a", "LlamaForCausalLM", 16, 2, 1)
    folders.causal(tmp_path / "b", "LlamaForCausalLM", 24, 3, 2)
    folders.prompts(tmp_path / "data.jsonl")
    for name, size in (("one", 0.02), ("two", 0.03)):
        folders.shifted(tmp_path / "a", tmp_path / f"tuned-{name}", size=size)
        taskferry("transfer", "--source-base", "a", "--source-tuned", f"tuned-{name}", "--target-base", "b",
                  "--calibration", "data.jsonl", "--method", "bico",
                          "--scale", 1, "--force", "--out", name, cwd=tmp_path)  # fmt: skip
    script("merge.py", "b", "one=0.5", "two=0.25", "--out", "merged", cwd=tmp_path)
    base = load_model(str(tmp_path / "b"))
    one, two, merged = (load_tuned(str(tmp_path / name), base).tau for name in ("one", "two", "merged"))
    expected = 0.5 * one + 0.25 * two
    assert len(merged) == len(expected) > 0
    assert (merged - expected).norm() < 1e-5 * expected.norm()
