"""What a reader found wrong once, kept mended: adapters, answers, labels, checks, records."""

from __future__ import annotations

import copy
import json
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from taskferry import Calibration, TaskferryError, TaskVector
from taskferry.calibration.data import load_samples
from taskferry.calibration.language import Segment, language_calibration
from taskferry.checkpoints import Skeleton, load_model, load_tuned, read_adapter
from taskferry.forms import check_output
from taskferry.methods import CannotMove, Job, run
from taskferry.methods.transfusion import Spaces
from taskferry.preparing import complete
from tests import folders
from tests.command import taskferry
from tests.test_calibration import SECOND, TEXTS, train
from tests.tiny import TINY, hf, tuned

transformers = pytest.importorskip("transformers")
peft = pytest.importorskip("peft")


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("world")
    folders.encoder(root / "bert", 16, 2, 1)
    folders.encoder(root / "masked", 24, 3, 2, "BertForMaskedLM")
    folders.encoder(root / "head", 16, 2, 1, "BertForSequenceClassification")
    folders.encoder(root / "wide", 24, 3, 2)
    folders.lora(root / "head", root / "lora", ["query"], task_type="SEQ_CLS")
    folders.shifted(root / "bert", root / "tuned")
    folders.texts(root / "texts.jsonl")
    return root


def test_an_adapter_s_prefix_is_not_doubled(world: Path, tmp_path: Path) -> None:
    """From a headless base to a target whose class has a head: PEFT must find every factor."""
    taskferry("transfer", "--source-base", world / "bert", "--source-tuned", world / "lora", "--scale", 1,
              "--target-base", world / "masked", "--calibration", world / "texts.jsonl",
              "--out", tmp_path / "moved")  # fmt: skip
    target = transformers.BertForMaskedLM.from_pretrained(world / "masked")
    loaded = peft.PeftModel.from_pretrained(target, tmp_path / "moved")
    factors = [p for n, p in loaded.named_parameters() if "lora_B" in n]
    assert len(factors) == 3
    assert all(bool(factor.any()) for factor in factors)


@pytest.mark.parametrize("start", ["pissa", "olora", "pissa_niter_4", "corda"])
def test_adapters_that_rewrite_the_base_are_refused(start: str, world: Path, tmp_path: Path) -> None:
    bad = shutil.copytree(world / "lora", tmp_path / "bad")
    config = json.loads((bad / "adapter_config.json").read_text())
    (bad / "adapter_config.json").write_text(json.dumps({**config, "init_lora_weights": start}))
    with pytest.raises(TaskferryError, match="changes the base's own weights"):
        read_adapter(bad, Skeleton.of(load_model(str(world / "bert")).model))


def test_half_precision_adapters_move(world: Path, tmp_path: Path) -> None:
    half = shutil.copytree(world / "lora", tmp_path / "half")
    state = load_file(half / "adapter_model.safetensors")
    save_file({k: v.to(torch.bfloat16) for k, v in state.items()}, half / "adapter_model.safetensors")
    taskferry("transfer", "--source-base", world / "bert", "--source-tuned", half, "--target-base", world / "wide",
              "--calibration", world / "texts.jsonl", "--scale", 1, "--out", tmp_path / "moved")  # fmt: skip
    written = load_file(tmp_path / "moved" / "adapter_model.safetensors")
    assert all(tensor.dtype == torch.bfloat16 for tensor in written.values())


def test_heads_of_the_tuned_model_may_differ(world: Path, tmp_path: Path) -> None:
    """A masked language model as base, a classifier as its fine-tune: the commonest case there is."""
    torch.manual_seed(1)
    folders.save(hf("BertForMaskedLM", 16, 2, vocab_size=400), tmp_path / "base")
    classifier = transformers.BertForSequenceClassification.from_pretrained(tmp_path / "base")
    with torch.no_grad():
        classifier.bert.encoder.layer[0].output.dense.weight.add_(0.1)
    classifier.save_pretrained(tmp_path / "tuned")
    found = load_tuned(str(tmp_path / "tuned"), load_model(str(tmp_path / "base")))
    assert list(found.tau.deltas) == ["bert.encoder.layer.0.output.dense.weight"]
    assert any("classifier" in name for name in found.ignored)


def test_short_answers_are_counted_in_their_place() -> None:
    tokenizer = train("bytes")
    tokenizer.chat_template = "{% for m in messages %}<|{{ m.role }}|> {{ m.content }}\n{% endfor %}"
    chat = [[Segment("Which letter?", False, "user"), Segment("a", True, "assistant")]]
    ((batch, _),) = language_calibration(chat, tokenizer).pairs
    ids, labels = batch.inputs["input_ids"][0], batch.inputs["labels"][0]
    counted = (labels != -100).nonzero().flatten().tolist()
    assert tokenizer.decode(ids[: counted[-1] + 1]).endswith("<|assistant|> a")
    assert len(counted) <= 2


def test_long_prompts_keep_their_answers() -> None:
    tokenizer = train("bytes")
    long = [[Segment("The ferry leaves. " * 30, counted=False), Segment(" At dawn.")]]
    ((batch, _),) = language_calibration(long, tokenizer, max_length=24).pairs
    ids, labels = batch.inputs["input_ids"][0], batch.inputs["labels"][0]
    assert len(ids) == 24
    assert tokenizer.decode(ids[labels != -100]).strip() == "At dawn."
    hopeless = [[Segment("Yes.", counted=False), Segment("")]]
    with pytest.raises(TaskferryError, match="nothing of its answer fits"):
        language_calibration(hopeless, tokenizer)


def test_completions_keep_the_space_before_them(tmp_path: Path) -> None:
    folders.causal(tmp_path / "llama", "LlamaForCausalLM", 16, 1, 0, "bytes")
    loaded = load_model(str(tmp_path / "llama"))
    tokenizer = loaded.tokenizer()
    (answer,) = complete(loaded.model, tokenizer, [TEXTS[0]], length=6)
    inputs = tokenizer(TEXTS[0], return_tensors="pt")
    whole = loaded.model.generate(**inputs, max_new_tokens=6, do_sample=False, pad_token_id=tokenizer.eos_token_id)
    assert tokenizer.decode(whole[0], skip_special_tokens=True) == TEXTS[0] + answer


def test_labels_keep_their_numbers(tmp_path: Path) -> None:
    def write(name: str, labels: list[object]) -> str:
        rows = [json.dumps({"text": f"{i}", "label": label}) for i, label in enumerate(labels)]
        (tmp_path / name).write_text("\n".join(rows))
        return str(tmp_path / name)

    train_data = load_samples(write("train.jsonl", ["b", "c", "a"]))
    test = load_samples(write("test.jsonl", ["c", "b"]), classes=train_data.classes)
    assert train_data.labels == (1, 2, 0)
    assert test.labels == (2, 1)
    with pytest.raises(TaskferryError, match="class 'd'"):
        load_samples(write("other.jsonl", ["d", "a"]), classes=train_data.classes)
    assert load_samples(write("digits.jsonl", ["10", "2"])).labels == (10, 2)
    with pytest.raises(TaskferryError, match="fractions"):
        load_samples(write("scores.jsonl", [0.5, 1.5]))


def test_pairs_that_are_missing_in_some_rows_are_told(world: Path, tmp_path: Path) -> None:
    rows = [
        {"text": a, "text_pair": b if i else None, "label": i % 2}
        for i, (a, b) in enumerate(zip(TEXTS, SECOND, strict=True))
    ]
    (tmp_path / "data.jsonl").write_text("\n".join(map(json.dumps, rows)))
    given = ["--source-base", world / "bert", "--source-tuned", world / "tuned", "--target-base", world / "wide"]
    ran = taskferry("transfer", *given, "--calibration", tmp_path / "data.jsonl", "--out", tmp_path / "x", code=2)
    assert "1 of 12 rows have no text_pair" in ran.err


@pytest.mark.parametrize("name", ["bert-classifier", "t5", "whisper"])
def test_transfusion_refuses_what_it_cannot_keep_true(name: str) -> None:
    with pytest.raises(CannotMove, match="transfusion does not know"):
        Spaces.of(TINY[name].model(16, 2, 0))


def test_theseus_needs_no_labels() -> None:
    tiny = TINY["bert"]
    A, B = tiny.model(16, 2, 0), tiny.model(24, 2, 1)
    plain = Calibration((replace(a, labels=None), replace(b, labels=None)) for a, b in tiny.calibration())
    tau = TaskVector.between(dict(A.named_parameters()), tuned(A))
    assert len(run("theseus", Job(A, B, tau, plain))) > 10


def test_settings_that_a_method_does_not_have_are_refused(world: Path, tmp_path: Path) -> None:
    given = ["--source-base", world / "bert", "--source-tuned", world / "tuned", "--target-base", world / "wide",
             "--calibration", world / "texts.jsonl", "--scale", 1, "--out", tmp_path / "x"]  # fmt: skip
    assert "has no map_rank" in taskferry("transfer", *given, "--method", "naive", "--map-rank", "full", code=2).err
    assert "no method 'nonsense'" in taskferry("transfer", *given, "--method", "nonsense", "--dry-run", code=2).err
    given[3] = world / "lora"
    assert "keeps its rank exactly" in taskferry("transfer", *given, "--as-lora", "--rank", 2, code=2).err
    given[-3] = "nan"
    assert "scale" in taskferry("transfer", *given, code=2).err
    given[-3] = 1
    plan = taskferry("transfer", *given, "--dry-run", "--json").json["plan"]
    assert plan["pairs"] == 3


def test_apply_knows_the_models_it_was_fitted_on(world: Path, tmp_path: Path) -> None:
    folders.encoder(tmp_path / "twin", 24, 3, 7)
    data = ["--calibration", world / "texts.jsonl", "--samples", 12]
    taskferry(
        "fit",
        "--source-base",
        world / "bert",
        "--target-base",
        world / "wide",
        *data,
        "--out",
        tmp_path / "x.alignment",
    )
    ran = taskferry("apply", tmp_path / "x.alignment", world / "tuned", "--source-base", world / "bert",
                    "--target-base", tmp_path / "twin", "--out", tmp_path / "y", code=2)  # fmt: skip
    assert "is not the target that this alignment was fitted on" in ran.err
    assert not (tmp_path / "y").exists()


def test_the_check_of_an_output_sees_a_small_error(world: Path, tmp_path: Path) -> None:
    target = load_model(str(world / "wide"))
    tau = TaskVector({"encoder.layer.0.output.dense.weight": torch.full((24, 48), 1e-3)})
    folder = shutil.copytree(world / "wide", tmp_path / "unchanged")
    with pytest.raises(TaskferryError, match="was written with an error"):
        check_output(folder, "model", tau, target)
    right = copy.deepcopy(target.model)
    tau.add_to(right)
    right.save_pretrained(tmp_path / "right")
    check_output(tmp_path / "right", "model", tau, target)


def test_names_from_files_do_not_reach_the_terminal_raw(world: Path, tmp_path: Path) -> None:
    TaskVector({"evil\x1b[31m[bold]x": torch.ones(2)}).save(tmp_path / "evil.safetensors")
    shown = taskferry("inspect", tmp_path / "evil.safetensors").out
    assert "\x1b" not in shown
    assert "[bold]x" in shown
    assert "LORA adapter of rank 4" in taskferry("inspect", world / "lora").out
    (tmp_path / "file").write_text("x")
    under = ["--source-base", world / "bert", "--target-base", world / "wide", "--calibration", world / "texts.jsonl"]
    assert "is a file" in taskferry("fit", *under, "--out", tmp_path / "file" / "x.alignment", code=2).err


def test_the_verdict_is_that_of_what_is_written(world: Path, tmp_path: Path) -> None:
    """Cut to rank 1 before the scale is chosen: the loss in the record is the written LoRA's."""
    from taskferry import Prototypes, text_calibration
    from taskferry.scale import calibration_loss

    ran = taskferry("transfer", "--source-base", world / "bert", "--source-tuned", world / "tuned", "--target-base",
                    world / "wide", "--calibration", world / "texts.jsonl", "--samples", 12, "--scale", 1, "--as-lora",
                    "--rank", 1, "--out", tmp_path / "low", "--json")  # fmt: skip
    rows = [json.loads(line) for line in (world / "texts.jsonl").read_text().splitlines()]
    chosen = [rows[i] for i in ran.json["calibration"]["indices"]]
    target = load_model(str(world / "wide"))
    tokenizer = target.tokenizer()
    shots = text_calibration(
        [r["text"] for r in chosen],
        tokenizer,
        pairs=[r["text_pair"] for r in chosen],
        labels=[r["label"] for r in chosen],
    ).side(1)
    loss = Prototypes().bind(target.model, shots)
    assert calibration_loss(target.model, loss, shots) == pytest.approx(ran.json["verdict"]["loss_before"], rel=1e-4)
    read_adapter(tmp_path / "low", Skeleton.of(target.model)).tau.add_to(target.model)
    assert calibration_loss(target.model, loss, shots) == pytest.approx(ran.json["verdict"]["loss_after"], rel=1e-4)


def test_blank_answers_of_the_teacher_are_left_out_and_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One sample without an answer must not end the whole transfer; one in the data still does."""
    from taskferry import load_model, preparing
    from taskferry.settings import CalibrationSettings

    folders.causal(tmp_path / "a", "LlamaForCausalLM", 16, 2, 1)
    data = folders.prompts(tmp_path / "asked.jsonl", completions=False)
    loaded = load_model(str(tmp_path / "a"))
    settings = CalibrationSettings(calibration=str(data), samples=6)
    answers = [" the ferry", "  ", " a quay", "", " the sea", " a boat"]
    monkeypatch.setattr(preparing, "complete", lambda *_: answers)
    prepared = preparing.prepare(settings, loaded, loaded, str(tmp_path / "a"))
    assert prepared.calibration.samples == len(prepared.indices) == 4
    assert prepared.labels == "4 completions of the tuned source (teacher); 2 blank ones left out"
