"""Every bad input: one sentence with the next step, a non-zero code, no output."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from taskferry.example import FILES
from tests.helpers import folders
from tests.helpers.command import Ran, taskferry
from tests.helpers.tiny import hf

pytest.importorskip("transformers")
pytest.importorskip("peft")
pytest.importorskip("datasets")


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("world")
    folders.encoder(root / "bert", 16, 2, 1)
    folders.encoder(root / "wide", 24, 3, 2)
    folders.encoder(root / "deep", 16, 4, 2)
    folders.shifted(root / "bert", root / "tuned")
    folders.lora(root / "bert", root / "lora", ["query"])
    folders.causal(root / "llama", "LlamaForCausalLM", 16, 2, 1)
    folders.causal(root / "bytes", "LlamaForCausalLM", 24, 2, 2, "bytes")
    folders.shifted(root / "llama", root / "llama-tuned")
    folders.texts(root / "texts.jsonl")
    folders.texts(root / "plain.jsonl", labels=False)
    folders.prompts(root / "prompts.jsonl")
    return root


def refused(world: Path, tmp_path: Path, *words: str, more: tuple[object, ...] = (), **changed: object) -> Ran:
    """A transfer with some inputs changed ends with 2, one sentence that has these words, and no output."""
    inputs = {"source_base": world / "bert", "source_tuned": world / "tuned", "target_base": world / "wide",
              "calibration": world / "texts.jsonl", "out": tmp_path / "out", **changed}  # fmt: skip
    options = [part for name, value in inputs.items() for part in (f"--{name.replace('_', '-')}", value)]
    before = sorted(p.name for p in tmp_path.iterdir())
    ran = taskferry("transfer", *options, "--method", "bico", "--scale", 1, *more, code=2)
    assert ran.err.startswith("taskferry: "), ran.err
    assert "Traceback" not in ran.err
    for word in words:
        assert word in ran.err, (word, ran.err)
    assert sorted(p.name for p in tmp_path.iterdir()) == before
    return ran


def test_a_missing_file(world: Path, tmp_path: Path) -> None:
    refused(world, tmp_path, "nowhere does not exist", source_base=tmp_path / "nowhere")
    refused(world, tmp_path, "absent.jsonl does not exist", calibration=tmp_path / "absent.jsonl")


def test_the_wrong_base_for_an_adapter(world: Path, tmp_path: Path) -> None:
    folders.lora(world / "wide", tmp_path / "other", ["query"])
    refused(world, tmp_path, "another base model", source_tuned=tmp_path / "other")
    refused(world, tmp_path, "another base model", source_tuned=world / "lora", source_base=world / "llama",
            target_base=world / "bytes", calibration=world / "prompts.jsonl")  # fmt: skip


def test_an_adapter_is_refused_by_the_module_that_is_missing(world: Path, tmp_path: Path) -> None:
    """And not by its first one, which may be there; a head that is tied to the embedding is no other base."""
    folders.lora(world / "deep", tmp_path / "other", ["query"])
    refused(world, tmp_path, "no module encoder.layer.2.", source_tuned=tmp_path / "other")
    tied = tmp_path / "tied"
    folders.lora(world / "llama", tied, ["q_proj"])
    tensors = load_file(tied / "adapter_model.safetensors")
    A, B = torch.zeros(2, 16), torch.zeros(hf_vocabulary(world / "llama"), 2)
    head = {"base_model.model.lm_head.lora_A.weight": A, "base_model.model.lm_head.lora_B.weight": B}
    save_file({**tensors, **head}, tied / "adapter_model.safetensors")
    base = tmp_path / "tied-base"
    shutil.copytree(world / "llama", base)
    config = json.loads((base / "config.json").read_text())
    (base / "config.json").write_text(json.dumps({**config, "tie_word_embeddings": True}))
    weights = load_file(base / "model.safetensors")
    weights.pop("lm_head.weight", None)
    save_file(weights, base / "model.safetensors", {"format": "pt"})
    refused(world, tmp_path, "shares that of the embedding", source_tuned=tied, source_base=base,
            target_base=world / "bytes", calibration=world / "prompts.jsonl")  # fmt: skip


def hf_vocabulary(folder: Path) -> int:
    return int(json.loads((folder / "config.json").read_text())["vocab_size"])


def test_a_line_that_is_no_json_is_named(world: Path, tmp_path: Path) -> None:
    lines = (world / "texts.jsonl").read_text().splitlines()
    (tmp_path / "bad.jsonl").write_text("\n".join([lines[0], '{"text": }', *lines[1:]]))
    refused(world, tmp_path, "bad.jsonl, line 2: no JSON", calibration=tmp_path / "bad.jsonl")
    (tmp_path / "blank.jsonl").write_text('{"text": "The ferry leaves."}\n{"text": "  "}\n')
    refused(world, tmp_path, "a sample that is blank", source_base=world / "llama", target_base=world / "bytes",
            source_tuned=world / "llama-tuned", calibration=tmp_path / "blank.jsonl")  # fmt: skip


def test_a_tokenizer_without_words(world: Path, tmp_path: Path) -> None:
    """Some families load one from a folder that has no file of it."""
    shutil.copytree(FILES / "base-b", tmp_path / "bare", ignore=shutil.ignore_patterns("tokenizer*", "*.jinja"))
    scored = taskferry("evaluate", tmp_path / "bare", "--test", world / "plain.jsonl", code=2)
    assert "copy the files of the tokenizer" in scored.err
    refused(world, tmp_path, "copy the files of the tokenizer", source_base=world / "llama",
            target_base=tmp_path / "bare", source_tuned=world / "llama-tuned",
            calibration=world / "plain.jsonl")  # fmt: skip


def test_a_folder_in_place_of_an_alignment(world: Path, tmp_path: Path) -> None:
    ran = taskferry("apply", world / "lora", world / "lora", "--out", tmp_path / "out", code=2)
    assert "is a folder, where a file is wanted" in ran.err


def test_a_tuned_model_of_another_shape(world: Path, tmp_path: Path) -> None:
    refused(world, tmp_path, "give the base model that was tuned", source_tuned=world / "wide")
    refused(world, tmp_path, "give the base model that was tuned", source_base=world / "deep")
    for engine in ("whole", "blockwise"):
        refused(world, tmp_path, "does not differ", source_tuned=world / "bert", more=("--engine", engine))


def test_a_tuned_model_of_another_family(world: Path, tmp_path: Path) -> None:
    folders.causal(tmp_path / "qwen", "Qwen2ForCausalLM", 16, 2, 1)
    refused(world, tmp_path, f"{tmp_path / 'qwen'} is a Qwen2ForCausalLM, the base a LlamaForCausalLM",
            "give the base model that was tuned", source_base=world / "llama", source_tuned=tmp_path / "qwen",
            target_base=world / "bytes", calibration=world / "prompts.jsonl")  # fmt: skip


def test_a_setting_that_cannot_be_read(world: Path, tmp_path: Path) -> None:
    refused(world, tmp_path, "halfway=[0.5 cannot be read", more=("--set", "halfway=[0.5"))


def test_no_labels(world: Path, tmp_path: Path) -> None:
    refused(world, tmp_path, "--labels teacher", calibration=world / "plain.jsonl", more=("--labels", "data"))
    refused(world, tmp_path, "no column 'mood'", more=("--set", "label_column=mood"))
    refused(world, tmp_path, "predicts no classes", calibration=world / "plain.jsonl")


def test_one_sample(world: Path, tmp_path: Path) -> None:
    one = tmp_path / "one.jsonl"
    one.write_text(json.dumps({"text": "A ferry.", "label": 0}) + "\n")
    refused(world, tmp_path, "has 1 sample(s)", calibration=one)
    one.write_text(2 * (json.dumps({"text": "A ferry.", "label": 0}) + "\n"))
    refused(world, tmp_path, "at least two classes", calibration=one)
    one.write_text(2 * (json.dumps({"words": "A ferry."}) + "\n"))
    refused(world, tmp_path, "rename words to text", calibration=one)


@pytest.mark.parametrize("command", ["transfer", "blockwise", "fit"])
def test_data_are_refused_before_a_model_is_loaded(command: str, world: Path, tmp_path: Path) -> None:
    """A base without weights: what is wrong with the samples is said without them."""
    base = tmp_path / "llama"
    base.mkdir()
    shutil.copy(world / "llama" / "config.json", base)
    data = {
        "renamed": ({"question": "Where?", "answer": "Here."}, "rename question to prompt"),
        "unanswered": ({"messages": [{"role": "user", "content": "Where?"}]}, "without an answer"),
        "pairs": ({"anchor": "Where?", "positive": "Here."}, "pairs of texts are for sentence encoders"),
    }
    verb = "transfer" if command == "blockwise" else command
    for name, (row, word) in data.items():
        (tmp_path / f"{name}.jsonl").write_text(3 * f"{json.dumps(row)}\n")
        given = ["--source-base", base, "--target-base", base, "--calibration",
                 tmp_path / f"{name}.jsonl", "--out", tmp_path / "out",
                 *(["--source-tuned", world / "lora"] if verb == "transfer" else []),
                 *(["--engine", "blockwise"] if command == "blockwise" else [])]  # fmt: skip
        err = taskferry(verb, *given, code=2).err
        assert word in err, (name, err)


def test_two_tokenizers_without_offsets(world: Path, tmp_path: Path) -> None:
    """A tokenizer that is not fast has no character offsets."""
    slow = shutil.copytree(world / "bytes", tmp_path / "slow")
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (slow / name).unlink()
    torch.manual_seed(0)
    characters = {chr(i): i for i in range(3, 128)}
    (slow / "vocab.json").write_text(json.dumps(characters))
    config = {"tokenizer_class": "CanineTokenizer", "model_max_length": 64}
    (slow / "tokenizer_config.json").write_text(json.dumps(config))
    refused(world, tmp_path, "offsets", source_base=world / "llama", source_tuned=world / "llama-tuned",
            target_base=slow, calibration=world / "prompts.jsonl")  # fmt: skip


def test_settings_that_make_no_sense(world: Path, tmp_path: Path) -> None:
    refused(world, tmp_path, "samples", more=("--samples", "many"))
    refused(world, tmp_path, "rank is of a LoRA", more=("--as", "model", "--rank", 2))
    refused(
        world,
        tmp_path,
        "--rank 32",
        more=(
            "--as",
            "lora",
        ),
    )
    refused(world, tmp_path, "scale", more=("--scale", "big"))
    assert "--target-base is missing; --source-tuned is missing" in taskferry("transfer", code=2).err.replace("\n", " ")
    assert "No such option" in taskferry("transfer", "--sampels", 3, code=2).err


def test_an_output_that_exists(world: Path, tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "mine.txt").write_text("keep")
    refused(world, tmp_path, "exists: give another --out")
    assert (tmp_path / "out" / "mine.txt").read_text() == "keep"


@pytest.mark.parametrize(("out", "says"), [("/", "/ exists: give another --out"), ("n" * 300, "give a shorter --out")])
def test_a_place_that_cannot_be_written(out: str, says: str, world: Path, tmp_path: Path) -> None:
    refused(world, tmp_path, says, out=tmp_path / out)


def test_files_that_are_not_what_they_say(world: Path, tmp_path: Path) -> None:
    import pickle

    (tmp_path / "evil.pt").write_bytes(pickle.dumps(os.getcwd))
    refused(world, tmp_path, "could run code on loading, so it is refused", source_tuned=tmp_path / "evil.pt")
    (tmp_path / "short.safetensors").write_bytes(b"\x10\x00\x00\x00")
    refused(world, tmp_path, "no readable safetensors", source_tuned=tmp_path / "short.safetensors")
    save_file({"other": torch.ones(2)}, tmp_path / "other.safetensors")
    refused(world, tmp_path, "no parameter in common", source_tuned=tmp_path / "other.safetensors")
    empty = tmp_path / "empty"
    empty.mkdir()
    refused(world, tmp_path, "is not a model folder", target_base=empty)
    taskferry("apply", tmp_path / "short.safetensors", world / "lora", "--out", tmp_path / "x", code=2)


@pytest.mark.parametrize(
    ("change", "word"),
    [
        ({"use_dora": True}, "sets use_dora"),
        ({"peft_type": "IA3"}, "merge it into its base"),
        ({"r": 0}, "a positive number is needed"),
        ({"lora_alpha": -1}, "a positive number is needed"),
    ],
)
def test_adapters_that_cannot_be_moved(change: dict[str, object], word: str, world: Path, tmp_path: Path) -> None:
    bad = shutil.copytree(world / "lora", tmp_path / "bad")
    config = json.loads((bad / "adapter_config.json").read_text())
    (bad / "adapter_config.json").write_text(json.dumps({**config, **change}))
    refused(world, tmp_path, word, source_tuned=bad)


def test_an_adapter_with_numbers_that_are_none(world: Path, tmp_path: Path) -> None:
    bad = shutil.copytree(world / "lora", tmp_path / "bad")
    state = load_file(bad / "adapter_model.safetensors")
    next(iter(state.values()))[0, 0] = torch.nan
    save_file(state, bad / "adapter_model.safetensors")
    refused(world, tmp_path, "not finite", source_tuned=bad)
    half = {
        key: value for key, value in load_file(world / "lora" / "adapter_model.safetensors").items() if "lora_A" in key
    }
    save_file(half, bad / "adapter_model.safetensors")
    refused(world, tmp_path, "has only lora_A", source_tuned=bad)


def test_models_of_two_kinds(world: Path, tmp_path: Path) -> None:
    refused(world, tmp_path, "two models of one kind", target_base=world / "llama")
    refused(world, tmp_path, "--device cpu", more=("--device", "cuda" if not torch.cuda.is_available() else "tpu"))


def test_a_full_disk(world: Path, tmp_path: Path) -> None:
    """A small tmpfs: one sentence, and not a byte left."""
    small = tmp_path / "small"
    small.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=48k", "tmpfs", str(small)], capture_output=True, check=False
    )
    if mounted.returncode:
        pytest.skip("mounting a small tmpfs needs root")
    try:
        torch.manual_seed(0)
        folders.save(hf("BertModel", 64, 2, vocab_size=400), tmp_path / "large")
        refused(world, tmp_path, "disk is full", target_base=tmp_path / "large", out=small / "out")
        assert list(small.iterdir()) == []
    finally:
        subprocess.run(["umount", str(small)], check=True)


def test_settings_that_a_method_does_not_have_are_refused(world: Path, tmp_path: Path) -> None:
    given = ["--source-base", world / "bert", "--source-tuned", world / "tuned", "--target-base", world / "wide",
             "--calibration", world / "texts.jsonl", "--method", "bico",
                     "--scale", 1, "--out", tmp_path / "x"]  # fmt: skip
    wrong = taskferry("transfer", *given, "--method", "naive", "--set", "map_rank=full", code=2).err
    assert "unknown setting 'map_rank'" in wrong
    assert "no method 'nonsense'" in taskferry("transfer", *given, "--method", "nonsense", "--dry-run", code=2).err
    given[3] = world / "lora"
    given[-3] = "nan"
    assert "scale" in taskferry("transfer", *given, code=2).err
    given[-3] = 1
    plan = taskferry("transfer", *given, "--dry-run", "--json").json["plan"]
    assert plan["pairs"] == 3
