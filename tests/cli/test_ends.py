"""A LoRA that ends its answers, trained by trl, moved: what it writes ends, or the verdict says so."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from typing import Any

import pytest

from taskferry.example import FILES
from tests.helpers.command import taskferry

transformers = pytest.importorskip("transformers")
peft = pytest.importorskip("peft")
trl = pytest.importorskip("trl")
datasets = pytest.importorskip("datasets")

REAL = Path(os.environ.get("TASKFERRY_REAL", Path.home() / ".cache" / "taskferry-real"))
KINDS = ("description", "entity", "abbreviation", "human", "location", "number")


def trained(base: Path, rows: list[dict[str, Any]], out: Path, steps: int, rate: float) -> Path:
    """A LoRA by trl's own handling of data: it adds the end of an answer, and counts the answer alone."""
    tokenizer = transformers.AutoTokenizer.from_pretrained(base)
    config = transformers.AutoConfig.from_pretrained(base)
    model = getattr(transformers, config.architectures[0]).from_pretrained(base, dtype="float32")
    lora = peft.LoraConfig(r=8, lora_alpha=16, target_modules="all-linear", task_type="CAUSAL_LM")
    arguments = trl.SFTConfig(
        output_dir=str(out.with_name("training")), max_steps=steps, per_device_train_batch_size=8, learning_rate=rate,
        warmup_steps=5, bf16=False, use_cpu=True, report_to="none", save_strategy="no", disable_tqdm=True,
        gradient_checkpointing=False, seed=0,
    )  # fmt: skip
    trainer = trl.SFTTrainer(
        model, arguments, train_dataset=datasets.Dataset.from_list(rows), processing_class=tokenizer, peft_config=lora
    )
    trainer.train()
    trainer.model.save_pretrained(out)
    return out


def write(path: Path, rows: list[dict[str, Any]]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def asked(text: str) -> dict[str, Any]:
    """Whether the beginning of a passage has a certain word."""
    words = text.split()[:10]
    return {"prompt": " ".join(words) + "\nWord:", "completion": " peace" if "the" in words[:5] else " war"}


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("ends")
    rows = [asked(json.loads(line)["text"]) for line in (FILES / "test.jsonl").read_text().splitlines()]
    trained(FILES / "base-a", rows[:140], root / "lora", steps=80, rate=1e-2)
    write(root / "data.jsonl", rows[:60])
    write(root / "test.jsonl", rows[140:])
    return root


def answers(folder: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((folder / "taskferry.json").read_text())["verdict"]["answers"]
    return found


def test_what_was_moved_ends_its_answers(world: Path, tmp_path: Path) -> None:
    """As the tuned source does on its own base; the record, the terminal and `evaluate` say so."""
    base, out, test = FILES / "base-b", tmp_path / "out", world / "test.jsonl"
    ran = taskferry("transfer", "--source-tuned", world / "lora", "--target-base", base, "--calibration",
                    world / "data.jsonl", "--out", out)  # fmt: skip
    own = taskferry("evaluate", FILES / "base-a", "--add", world / "lora", "--test", test, "--json").json
    assert own["stopped"] >= 98
    moved = taskferry("evaluate", base, "--add", out, "--test", test, "--json").json
    assert moved["stopped"] >= own["stopped"] - 2
    assert moved["exact"] > 40
    assert answers(out)["after"]["stopped"] >= answers(out)["source"]["stopped"] - 2
    assert answers(out)["before"]["stopped"] < 50
    assert "prompt" in ran.out
    alone = taskferry("evaluate", base, "--test", test, "--json").json
    assert alone["exact"] == 0


def test_an_answer_that_goes_on_is_told(world: Path, tmp_path: Path) -> None:
    """The move alone begins some answers right here, and ends none: that is no help."""
    out = tmp_path / "out"
    ran = taskferry("transfer", "--source-tuned", world / "lora", "--target-base", FILES / "base-b", "--calibration",
                    world / "data.jsonl", "--method", "bico", "--force", "--out", out)  # fmt: skip
    found = answers(out)
    if found["after"]["stopped"] < found["source"]["stopped"]:
        assert "of the answers end by themselves" in " ".join(ran.out.split())
    if found["gain"]["low"] <= 0:
        assert "It helps" not in ran.out


def test_a_base_model_takes_the_chat_template_of_the_source(world: Path, tmp_path: Path) -> None:
    """Both bases of the package have none: the source is given one, and what is written brings it along."""
    source = Path(shutil.copytree(FILES / "base-a", tmp_path / "chat-a"))
    tokenizer = transformers.AutoTokenizer.from_pretrained(source)
    turn = "[{{ m.role }}]\n{{ m.content }}" + tokenizer.eos_token + "\n"
    asks = "{% if add_generation_prompt %}[assistant]\n{% endif %}"
    tokenizer.chat_template = f"{{% for m in messages %}}{turn}{{% endfor %}}{asks}"
    tokenizer.save_pretrained(source)
    rows = [json.loads(line) for line in (world / "data.jsonl").read_text().splitlines()]
    halves = [
        {
            "prompt": [{"role": "user", "content": row["prompt"]}],
            "completion": [{"role": "assistant", "content": row["completion"].strip()}],
        }
        for row in rows
    ]
    lora = trained(source, halves, tmp_path / "lora", steps=50, rate=1e-2)
    chats = write(tmp_path / "chats.jsonl", [{"messages": row["prompt"] + row["completion"]} for row in halves])
    base, out = FILES / "base-b", tmp_path / "out"
    ran = taskferry("transfer", "--source-tuned", lora, "--target-base", base, "--calibration", chats,
                    "--out", out)  # fmt: skip
    record = json.loads((out / "taskferry.json").read_text())
    assert f"in the chat template of {source}" in record["calibration"]["labels"]
    assert "of the answers are right on" in " ".join(ran.out.split())
    assert transformers.AutoTokenizer.from_pretrained(base).eos_token in (out / "chat_template.jinja").read_text()
    own = taskferry("evaluate", source, "--add", lora, "--test", chats, "--json").json
    moved = taskferry("evaluate", base, "--add", out, "--test", chats, "--json").json
    assert own["stopped"] >= 95
    assert moved["stopped"] >= own["stopped"] - 2
    refused = taskferry("evaluate", base, "--test", chats, code=2)
    assert "has no chat template" in refused.err


@pytest.mark.real
@pytest.mark.every
def test_real_models(shared: Path, tmp_path: Path) -> None:
    """SmolLM2 to Gemma 3 on questions: answers end as those of the tuned source do."""
    smol, gemma = REAL / "smollm2-135m-instruct", REAL / "gemma-3-270m"
    if not (smol.is_dir() and gemma.is_dir()):
        pytest.skip(f"no real language models at {REAL}: set TASKFERRY_REAL")
    rows = {}
    for split in ("train", "test"):
        given = [json.loads(line) for line in (shared / "data" / "trec" / f"{split}.jsonl").read_text().splitlines()]
        rows[split] = [
            {"prompt": f"Question: {row['text']}\nAnswer type:", "completion": f" {KINDS[row['label']]}"}
            for row in given
        ]
    lora = trained(smol, rows["train"][:960], tmp_path / "lora", steps=120, rate=1e-3)
    data, test = write(tmp_path / "data.jsonl", rows["train"]), write(tmp_path / "test.jsonl", rows["test"])
    given = ["--test", test, "--test-samples", 100, "--json"]
    own = taskferry("evaluate", smol, "--add", lora, *given).json
    taskferry("transfer", "--source-base", smol, "--source-tuned", lora, "--target-base", gemma, "--calibration", data,
              "--out", tmp_path / "out")  # fmt: skip
    moved = taskferry("evaluate", gemma, "--add", tmp_path / "out", *given).json
    assert moved["stopped"] >= own["stopped"] - 2
    assert moved["exact"] > 30
