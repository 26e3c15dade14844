"""The command on real sentence encoders: a real PEFT LoRA and a full fine-tune, there and back."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

from taskferry import Alignment, TaskVector
from tests.helpers import real
from tests.helpers.command import taskferry
from tests.helpers.tiny import relative

pytestmark = pytest.mark.real
transformers = pytest.importorskip("transformers")
peft = pytest.importorskip("peft")


def train(model: nn.Module, tokenizer, rows: list[dict], steps: int = 4) -> None:
    """A short real fine-tune of an encoder: sentences of one sentiment towards each other."""
    head = nn.Linear(384, 2)
    optimiser = torch.optim.AdamW([*(p for p in model.parameters() if p.requires_grad), *head.parameters()], lr=6e-4)
    for step in range(steps):
        some = rows[step * 8 : (step + 1) * 8]
        batch = tokenizer([r["text"] for r in some], padding=True, truncation=True, max_length=48, return_tensors="pt")
        hidden = model(**batch).last_hidden_state.mean(1)
        loss = nn.functional.cross_entropy(head(hidden), torch.tensor([r["label"] for r in some]))
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()


@pytest.fixture(scope="module")
def tuned(shared: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """LoRA and full fine-tunes of both encoders on a few real sentences."""
    root = tmp_path_factory.mktemp("tuned")
    rows = real.texts(shared, "sst2", 32)
    made = {}
    for short, name in (("minilm", "all-MiniLM-L6-v2"), ("gte", "gte-small")):
        torch.manual_seed(0)
        model, tokenizer = real.bert(shared, name)
        config = peft.LoraConfig(r=4, lora_alpha=16, target_modules=["query", "value", "dense"], lora_dropout=0.0)
        adapted = peft.get_peft_model(model, config)
        train(adapted, tokenizer, rows)
        made[f"{short}-lora"] = root / f"{short}-lora"
        adapted.save_pretrained(made[f"{short}-lora"])
        model, tokenizer = real.bert(shared, name)
        train(model.train(), tokenizer, rows, steps=2)
        made[f"{short}-full"] = root / f"{short}-full"
        model.save_pretrained(made[f"{short}-full"])
    return made


@pytest.fixture(scope="module")
def options(shared: Path) -> list[object]:
    data = shared / "data" / "sst2" / "train.jsonl"
    # Fewer tokens than a map is wide: its decomposition is that of the rows.
    return [
        "--calibration",
        data,
        "--samples",
        16,
        "--set",
        "max_length=24",
        "--method",
        "bico",
        "--scale",
        1,
        "--json",
    ]


@pytest.mark.parametrize(
    ("source", "target"),
    [("minilm", "gte"), pytest.param("gte", "minilm", marks=pytest.mark.every)],
    ids=["deeper", "shallower"],
)
def test_a_lora_moves_and_loads_with_peft(
    shared: Path, tuned: dict[str, Path], options: list[object], tmp_path: Path, source: str, target: str
) -> None:
    names = {"minilm": shared / "models/all-MiniLM-L6-v2", "gte": shared / "models/gte-small"}
    pair = ["--source-base", names[source], "--target-base", names[target]]
    taskferry("fit", *pair, *options[:-3], "--out", tmp_path / "x.alignment")
    lora, base = tuned[f"{source}-lora"], names[target]
    ran = taskferry("transfer", *pair, "--source-tuned", lora, *options, "--out", tmp_path / "moved")
    taskferry("apply", tmp_path / "x.alignment", lora, "--target-base", base, "--out", tmp_path / "applied")
    assert ran.json["verdict"]["scale"] == 1
    assert len(ran.json["calibration"]["indices"]) == 16

    model, _ = real.bert(shared, base.name)
    weights = {name: p.detach().clone() for name, p in model.named_parameters()}
    loaded = peft.PeftModel.from_pretrained(model, tmp_path / "moved")
    config = loaded.peft_config["default"]
    assert config.r == 4
    assert config.base_model_name_or_path == str(base)
    assert {p.shape[0] for n, p in loaded.named_parameters() if "lora_A" in n} == {4}
    merged = dict(loaded.merge_and_unload().named_parameters())

    alignment = Alignment.load(tmp_path / "x.alignment")
    dense = alignment.apply(lora_as_dense(lora, alignment))
    assert len(dense) == 6 * (12 if target == "gte" else 6) - 1 * (12 if target == "gte" else 6)  # all but keys
    for name, parameter in merged.items():
        change = parameter.detach() - weights[name]
        if name in dense.deltas:
            assert relative(parameter.detach(), weights[name] + dense.deltas[name]) < 1e-5, name
            assert relative(change, dense.deltas[name]) < 1e-3, name  # what float32 sums leave of the change
        else:
            assert not bool(change.any()), name
    one, two = (load_file(tmp_path / d / "adapter_model.safetensors") for d in ("moved", "applied"))
    assert one.keys() == two.keys()
    # transfer leaves maps as two factors for a LoRA, a saved alignment multiplies them out: equal up to rounding
    assert all(relative(one[key], two[key]) < 1e-5 for key in one)
    factors = {n: one[f"base_model.model.{n[:-7]}.lora_B.weight"] @ one[f"base_model.model.{n[:-7]}.lora_A.weight"]
               for n in dense.deltas}  # fmt: skip
    assert all(relative(factors[n], d) < 1e-5 for n, d in dense.deltas.items())


def lora_as_dense(folder: Path, alignment: Alignment) -> TaskVector:
    """Read independently of our reader: B A scaled by alpha / r."""
    state = load_file(folder / "adapter_model.safetensors")
    names = {key.removeprefix("base_model.model.").removesuffix(".lora_A.weight") for key in state if "lora_A" in key}
    deltas = {
        f"{n}.weight": 4.0 * state[f"base_model.model.{n}.lora_B.weight"] @ state[f"base_model.model.{n}.lora_A.weight"]
        for n in names
    }
    assert set(deltas) <= set(alignment.source_parameters)
    return TaskVector(deltas)


@pytest.mark.every
@pytest.mark.parametrize(("source", "target"), [("minilm", "gte"), ("gte", "minilm")], ids=["deeper", "shallower"])
def test_a_full_fine_tune_moves_and_loads_with_transformers(
    shared: Path, tuned: dict[str, Path], options: list[object], tmp_path: Path, source: str, target: str
) -> None:
    names = {"minilm": shared / "models/all-MiniLM-L6-v2", "gte": shared / "models/gte-small"}
    given = ["--source-base", names[source], "--target-base", names[target], "--source-tuned", tuned[f"{source}-full"]]
    ran = taskferry("transfer", *given, *options, "--out", tmp_path / "moved")
    record = json.loads((tmp_path / "moved" / "taskferry.json").read_text())
    assert record["verdict"] == ran.json["verdict"]
    assert record["inputs"]["target_base"]["model.safetensors"]
    model, info = transformers.AutoModel.from_pretrained(
        tmp_path / "moved", add_pooling_layer=False, output_loading_info=True
    )
    assert not info["missing_keys"]
    assert not info["unexpected_keys"]
    assert model.dtype == torch.float16  # as the target's
    base, _ = real.bert(shared, names[target].name)
    moved = {row["parameter"]: row["status"] for row in record["coverage"]["rows"]}
    for name, parameter in base.named_parameters():
        changed = not torch.equal(dict(model.named_parameters())[name].float(), parameter)
        assert not changed or moved[name] == "moved", name
        if parameter.ndim == 2:  # a bias may change by less than float16 can hold
            assert changed == (moved[name] == "moved"), name
    assert transformers.AutoTokenizer.from_pretrained(tmp_path / "moved")("a test").input_ids
    low = taskferry("transfer", *given, *options, "--as", "lora", "--rank", 8, "--out", tmp_path / "lora")
    errors = low.json["truncation"]
    assert len(errors) == 6 * (12 if target == "gte" else 6)
    assert all(0 <= error < 1 for error in errors.values())
    assert peft.PeftModel.from_pretrained(base, tmp_path / "lora").peft_config["default"].r == 8
    card = (tmp_path / "moved" / "README.md").read_text()
    assert card.startswith("---\nlibrary_name: transformers\n")  # a base on this machine has no name on a hub
    assert "taskferry transfer --source-base" in card
