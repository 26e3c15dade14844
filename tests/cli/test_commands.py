"""The installed command on small models of real classes, as a new user would drive it."""

from __future__ import annotations

import json
import re
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors import safe_open

from taskferry import Alignment, LowRank, TaskVector
from taskferry.models import Skeleton, load_model, load_tuned, read_adapter
from tests.helpers import folders
from tests.helpers.command import taskferry
from tests.helpers.often import often
from tests.helpers.tiny import gpt2, relative, t5

transformers = pytest.importorskip("transformers")
peft = pytest.importorskip("peft")
pytest.importorskip("datasets")


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two decoders, two encoders, their fine-tunes and data."""
    root = tmp_path_factory.mktemp("world")
    folders.causal(root / "llama", "LlamaForCausalLM", 16, 2, 1)
    folders.causal(root / "qwen", "Qwen3ForCausalLM", 24, 3, 2)
    folders.causal(root / "other", "LlamaForCausalLM", 24, 3, 3, "bytes")
    folders.lora(root / "llama", root / "llama-lora", ["q_proj", "v_proj", "gate_proj"], task_type="CAUSAL_LM")
    folders.shifted(root / "llama", root / "llama-full")
    folders.encoder(root / "bert", 16, 2, 1)
    folders.encoder(root / "wide", 24, 3, 2)
    folders.shifted(root / "bert", root / "bert-full")
    folders.encoder(root / "head", 16, 2, 1, "BertForSequenceClassification")
    folders.texts(root / "texts.jsonl")
    folders.texts(root / "plain.jsonl", labels=False)
    folders.prompts(root / "prompts.jsonl")
    folders.prompts(root / "asked.jsonl", completions=False)
    folders.chats(root / "chats.jsonl")
    return root


def pair(world: Path, source: str, target: str, tuned: str, data: str) -> list[object]:
    return ["--source-base", world / source, "--source-tuned", world / tuned, "--target-base", world / target,
            "--calibration", world / data, "--samples", 12]  # fmt: skip


def test_a_lora_from_llama_to_qwen(world: Path, tmp_path: Path) -> None:
    """Other width, other depth, other family; q, v and gate only; generation runs."""
    ran = taskferry("transfer", *pair(world, "llama", "qwen", "llama-lora", "prompts.jsonl"), "--method", "bico",
            "--scale", 1, "--force",
                    "--out", tmp_path / "moved", "--json")  # fmt: skip
    assert ran.json["verdict"]["moved"] == 9
    config = json.loads((tmp_path / "moved" / "adapter_config.json").read_text())
    assert sorted(config["target_modules"]) == ["gate_proj", "q_proj", "v_proj"]
    assert config["task_type"] == "CAUSAL_LM"
    base = transformers.AutoModelForCausalLM.from_pretrained(world / "qwen")
    tokenizer = transformers.AutoTokenizer.from_pretrained(world / "qwen")
    inputs = {k: v for k, v in tokenizer("The ferry", return_tensors="pt").items() if k != "token_type_ids"}
    before = base(**inputs).logits
    model = peft.PeftModel.from_pretrained(base, tmp_path / "moved")
    assert sum("lora_A" in name for name, _ in model.named_parameters()) == 9
    assert not torch.allclose(model(**inputs).logits, before, atol=1e-4)
    assert model.generate(**inputs, max_new_tokens=5, do_sample=False).shape[1] > inputs["input_ids"].shape[1]


def test_adapters_are_read_as_peft_merges_them(world: Path, tmp_path: Path) -> None:
    """alpha, rsLoRA, ranks and alphas by module, transposed weights, heads trained beside."""
    cases = {
        "plain": ("llama", ["q_proj", "down_proj"], {"lora_alpha": 3}),
        "rslora": ("llama", ["q_proj"], {"use_rslora": True, "lora_alpha": 7}),
        "patterns": ("llama", ["q_proj", "v_proj"], {"rank_pattern": {"layers.1.self_attn.q_proj": 2},
                                                     "alpha_pattern": {"v_proj": 5}}),
        "head": ("head", ["query"], {"task_type": "SEQ_CLS"}),
    }  # fmt: skip
    torch.manual_seed(4)
    folders.save(gpt2(16, 2), tmp_path / "gpt2")
    cases["transposed"] = (str(tmp_path / "gpt2"), ["c_attn", "c_proj"], {"fan_in_fan_out": True})
    for name, (base, modules, more) in cases.items():
        folders.lora(world / base, tmp_path / name, modules, **more)
        loaded = load_model(str(world / base))
        adapter = read_adapter(tmp_path / name, Skeleton.of(loaded.model))
        kind = type(loaded.model)
        plain = kind.from_pretrained(world / base)
        before = {n: p.detach().clone() for n, p in plain.named_parameters()}
        merged = dict(peft.PeftModel.from_pretrained(plain, tmp_path / name).merge_and_unload().named_parameters())
        changed = {n for n in before if not torch.equal(before[n], merged[n]) and "classifier" not in n}
        assert changed == set(adapter.tau.deltas), name
        for parameter, delta in adapter.tau.deltas.items():
            assert isinstance(delta, LowRank)
            assert relative(delta.dense(), merged[parameter].detach() - before[parameter]) < 1e-4, (name, parameter)
        assert bool(adapter.ignored) == (name == "head")


def test_a_lora_of_a_classifier_keeps_its_prefix(world: Path, tmp_path: Path) -> None:
    """Trained on a model with a head, moved by the headless bases, loaded on the target with a head."""
    folders.lora(world / "head", tmp_path / "lora", ["query", "value"], task_type="SEQ_CLS")
    given = ["--source-base", world / "bert", "--source-tuned", tmp_path / "lora", "--target-base", world / "wide",
             "--calibration", world / "texts.jsonl", "--method", "bico", "--scale", 1, "--json"]  # fmt: skip
    taskferry("transfer", *given, "--out", tmp_path / "moved")
    target = transformers.AutoModelForSequenceClassification.from_pretrained(world / "wide", num_labels=2)
    loaded = peft.PeftModel.from_pretrained(target, tmp_path / "moved")
    weights = [p for n, p in loaded.named_parameters() if "lora_B" in n]
    assert len(weights) == 6
    assert all(bool(weight.any()) for weight in weights)


def test_fit_once_and_apply_many(world: Path, tmp_path: Path) -> None:
    given = ["--source-base", world / "llama", "--target-base", world / "other"]
    data = ["--calibration", world / "chats.jsonl", "--samples", 12]
    ran = taskferry("fit", *given, *data, "--out", tmp_path / "x.alignment")
    assert "taskferry apply" in ran.out
    taskferry("apply", tmp_path / "x.alignment", world / "llama-lora", "--out", tmp_path / "lora")
    taskferry(
        "apply", tmp_path / "x.alignment", world / "llama-full", *given, "--out", tmp_path / "full", "--scale", 0.5
    )
    load_tuned(str(world / "llama-full"), load_model(str(world / "llama"))).tau.save(tmp_path / "tau.safetensors")
    taskferry(
        "apply",
        tmp_path / "x.alignment",
        tmp_path / "tau.safetensors",
        "--as",
        "task-vector",
        "--out",
        tmp_path / "tau",
    )
    alignment = Alignment.load(tmp_path / "x.alignment")
    expected = alignment.apply(TaskVector.load(tmp_path / "tau.safetensors"))
    moved = TaskVector.load(tmp_path / "tau" / "task_vector.safetensors")
    assert all(torch.equal(moved.deltas[n], d) for n, d in expected.deltas.items())
    full = load_tuned(str(tmp_path / "full"), load_model(str(world / "other"))).tau
    assert (full - 0.5 * expected).norm() < 1e-5 * expected.norm()
    lora = read_adapter(tmp_path / "lora", Skeleton.of(load_model(str(world / "other")).model))
    base = load_model(str(world / "llama"))
    dense = alignment.apply(load_tuned(str(world / "llama-lora"), base).tau.dense())
    assert (lora.tau.dense() - dense).norm() < 1e-5 * dense.norm()

    shown = taskferry("inspect", tmp_path / "x.alignment", "--json").json
    assert len(shown["rows"]) == 21
    assert "21 pairs of linear layers" in shown["what"]
    assert "norm" in taskferry("inspect", tmp_path / "tau.safetensors").out
    assert "lm_head" in taskferry("inspect", world / "llama").out
    assert "moved at scale 0.5" in taskferry("inspect", tmp_path / "full").out


@pytest.mark.parametrize("dtype", [torch.bfloat16], ids=["bfloat16"])
def test_shards_and_precision_are_kept(dtype: torch.dtype, world: Path, tmp_path: Path) -> None:
    folders.causal(tmp_path / "base", "LlamaForCausalLM", 24, 3, 3, dtype=dtype, max_shard_size="20KB")
    shards = sorted(p.name for p in (tmp_path / "base").glob("model-*.safetensors"))
    assert len(shards) > 2
    folders.causal(tmp_path / "source", "LlamaForCausalLM", 16, 2, 1, dtype=dtype, max_shard_size="20KB")
    folders.shifted(tmp_path / "source", tmp_path / "tuned")
    given = [
        "--source-base",
        tmp_path / "source",
        "--source-tuned",
        tmp_path / "tuned",
        "--target-base",
        tmp_path / "base",
    ]
    taskferry("transfer", *given, "--calibration", world / "prompts.jsonl", "--method", "bico", "--scale", 1, "--force",
              "--out", tmp_path / "moved")  # fmt: skip
    written = sorted((tmp_path / "moved").glob("model-*.safetensors"))
    assert len(written) == len(shards)
    for file in written:
        with safe_open(file, "pt") as opened:
            assert all(opened.get_tensor(key).dtype == dtype for key in opened.keys())  # noqa: SIM118
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "moved", dtype="auto")
    assert model.dtype == dtype
    base = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "base", dtype="auto")
    assert torch.equal(model.model.norm.weight, base.model.norm.weight)
    assert not torch.equal(model.model.layers[0].mlp.up_proj.weight, base.model.layers[0].mlp.up_proj.weight)
    assert (tmp_path / "moved" / "tokenizer.json").read_bytes() == (tmp_path / "base" / "tokenizer.json").read_bytes()


@pytest.mark.parametrize("name", often(["gpt2", "t5"], ["t5"]))
def test_tied_weights_stay_tied(name: str, world: Path, tmp_path: Path) -> None:
    build = {"gpt2": gpt2, "t5": t5}[name]
    for folder, width, depth, seed in (("source", 16, 2, 0), ("target", 24, 3, 1)):
        torch.manual_seed(seed)
        model = build(width, depth)
        model.resize_token_embeddings(400)
        folders.save(model, tmp_path / folder)
    folders.shifted(tmp_path / "source", tmp_path / "tuned")
    given = [
        "--source-base",
        tmp_path / "source",
        "--source-tuned",
        tmp_path / "tuned",
        "--target-base",
        tmp_path / "target",
    ]
    taskferry("transfer", *given, "--calibration", world / "prompts.jsonl", "--method", "bico",
            "--scale", 1, "--set", "max_length=40",
              "--force", "--out", tmp_path / "moved")  # fmt: skip
    (file,) = (tmp_path / "moved").glob("*.safetensors")
    with safe_open(file, "pt") as opened:
        assert not any("lm_head" in key for key in opened.keys())  # noqa: SIM118
    kind = type(load_model(str(tmp_path / "moved")).model)
    model = kind.from_pretrained(tmp_path / "moved")
    assert model.lm_head.weight is model.get_input_embeddings().weight
    assert (tmp_path / "moved" / "generation_config.json").exists() == (
        tmp_path / "target" / "generation_config.json"
    ).exists()


def test_other_forms_of_the_tuned_source(world: Path, tmp_path: Path) -> None:
    """A .pt state dictionary as the task-arithmetic line of work writes it, and a LoRA as a full model."""
    tuned = transformers.AutoModel.from_pretrained(world / "bert-full")
    torch.save({"state_dict": {f"module.{n}": p for n, p in tuned.state_dict().items()}}, tmp_path / "tuned.pt")
    given = pair(world, "bert", "wide", "bert-full", "texts.jsonl")
    taskferry("transfer", *given, "--method", "bico", "--scale", 1, "--out", tmp_path / "one")
    given[3] = tmp_path / "tuned.pt"
    taskferry("transfer", *given, "--method", "bico", "--scale", 1, "--out", tmp_path / "two")
    one, two = (load_model(str(tmp_path / d)).model.state_dict() for d in ("one", "two"))
    assert all(torch.allclose(one[k], two[k], atol=1e-6) for k in one)
    folders.lora(world / "bert", tmp_path / "lora", ["query"])
    given[3] = tmp_path / "lora"
    ran = taskferry(
        "transfer", *given, "--method", "bico", "--scale", 1, "--as", "model", "--out", tmp_path / "three", "--json"
    )
    assert ran.json["verdict"]["moved"] == 3
    full = pair(world, "bert", "wide", "bert-full", "texts.jsonl")
    ran = taskferry(
        "transfer",
        *full,
        "--method",
        "bico",
        "--scale",
        1,
        "--as",
        "lora",
        "--rank",
        8,
        "--out",
        tmp_path / "low",
        "--json",
    )
    assert any("bias" in name for name in ran.json["not_in_the_lora"])
    peft.PeftModel.from_pretrained(transformers.AutoModel.from_pretrained(world / "wide"), tmp_path / "low")


def balanced(folder: Path, tokenizer: Path) -> None:
    """Give a random classifier the biases with which half of the texts are of either class, on any machine."""
    model = transformers.AutoModelForSequenceClassification.from_pretrained(folder).eval()
    tokens = transformers.AutoTokenizer.from_pretrained(tokenizer)
    given = tokens(folders.TEXTS, folders.SECOND, padding=True, return_tensors="pt")
    with torch.no_grad():
        logits = model(**given).logits
        model.classifier.bias[0] -= (logits[:, 0] - logits[:, 1]).median()
    model.save_pretrained(folder)


def test_labels_from_the_teacher(world: Path, tmp_path: Path) -> None:
    """Unlabelled data and a tuned source with a head; prompts without completions and a tuned decoder."""
    balanced(folders.shifted(world / "head", tmp_path / "tuned", size=0.3), world / "bert")
    given = ["--source-base", world / "bert", "--source-tuned", tmp_path / "tuned", "--target-base", world / "wide",
             "--calibration", world / "plain.jsonl", "--method", "bico", "--scale", 1]  # fmt: skip
    ran = taskferry("transfer", *given, "--out", tmp_path / "one")
    assert "from the tuned source (teacher), because the data has none" in ran.out
    told = " ".join(ran.out.split())
    assert "The answers are those of the tuned source: evaluate it on true ones." in told
    assert "did you mean bico?" in taskferry("transfer", *given, "--method", "bicos", "--out", "x", code=2).err
    asked = pair(world, "llama", "qwen", "llama-full", "asked.jsonl")
    ran = taskferry(
        "transfer", *asked, "--method", "bico", "--scale", 1, "--force", "--out", tmp_path / "two", "--json"
    )
    # A random decoder may answer with nothing that a tokenizer keeps: such a sample is left out and told.
    assert re.match(r"\d+ completions of the tuned source \(teacher\)", ran.json["calibration"]["labels"])


def test_settings_from_yaml_and_the_plan(world: Path, tmp_path: Path) -> None:
    values = pair(world, "bert", "wide", "bert-full", "texts.jsonl")[1:8:2]
    given = dict(zip(("source_base", "source_tuned", "target_base", "calibration"), map(str, values), strict=True))
    lines = [
        f"{key}: {json.dumps(value)}"
        for key, value in {**given, "samples": 9, "method": "bico", "scale": 1, "seed": 3}.items()
    ]
    (tmp_path / "move.yaml").write_text("\n".join(lines))
    dry = taskferry("transfer", "--config", tmp_path / "move.yaml", "--out", tmp_path / "moved", "--dry-run")
    for word in ("9 of", "moves", "memory", "time", "a full model", "seed 3"):
        assert word in dry.out, word
    assert not (tmp_path / "moved").exists()
    quiet = taskferry(
        "transfer", "--config", tmp_path / "move.yaml", "--out", tmp_path / "moved", "--samples", 8, "--quiet"
    )
    assert quiet.out == ""
    used = (tmp_path / "moved" / "taskferry.yaml").read_text()
    assert "samples: 8" in used
    assert "seed: 3" in used
    again = taskferry(
        "transfer", "--config", tmp_path / "moved" / "taskferry.yaml", "--out", tmp_path / "again", "--json"
    )
    assert again.json["settings"]["samples"] == 8
    one, two = (load_model(str(tmp_path / d)).model.state_dict() for d in ("moved", "again"))
    assert all(torch.equal(one[k], two[k]) for k in one)  # the same settings, the same bytes
    bad = (tmp_path / "move.yaml").read_text() + "\nsampels: 3\nmicro_batch: 0\nlabels: perhaps\n"
    (tmp_path / "bad.yaml").write_text(bad)
    wrong = taskferry("transfer", "--config", tmp_path / "bad.yaml", "--out", tmp_path / "x", code=2)
    for word in ("unknown setting 'sampels'", "micro_batch", "labels"):
        assert word in wrong.err, word


def test_the_automatic_scale(world: Path, tmp_path: Path) -> None:
    """It writes the scale it found, or refuses to do harm and writes nothing."""
    given = [*pair(world, "bert", "wide", "bert-full", "texts.jsonl"), "--method", "bico"]
    done = taskferry("transfer", *given, "--json", "--out", tmp_path / "moved", code=None)
    record = done.json
    curve = dict(map(tuple, record["scale_curve"]))
    best = record["verdict"]["scale"]
    assert len(curve) <= 12
    assert curve[best] == min(curve.values())
    assert done.code == (0 if best else 3)
    assert (tmp_path / "moved").exists() == bool(best)


def test_interrupting_leaves_nothing(world: Path, tmp_path: Path) -> None:
    given = [*pair(world, "llama", "qwen", "llama-full", "prompts.jsonl"), "--method", "bico"]
    slow = [
        "--set",
        "micro_batch=1",
        "--set",
        "statistics_memory=1e-9",
        "--force",
    ]  # one pass over the samples for every block
    command = [str(Path(sys.executable).with_name("taskferry")), "transfer", *map(str, given), *slow]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    # A shell that starts the tests in the background has them ignore the signal, and all that they start.
    pipes["preexec_fn"] = lambda: signal.signal(signal.SIGINT, signal.SIG_DFL)
    for _ in range(3):  # on a busy machine the job may end before the signal is sent
        running = subprocess.Popen([*command, "--out", str(tmp_path / "moved")], text=True, **pipes)
        for line in running.stdout:  # type: ignore[union-attr]
            if "loss" in line:
                break
        running.send_signal(signal.SIGINT)
        _, err = running.communicate(timeout=300)
        if running.returncode != 0:
            break
        shutil.rmtree(tmp_path / "moved")
    assert running.returncode == 130, err
    assert "interrupted" in err
    assert list(tmp_path.iterdir()) == []
