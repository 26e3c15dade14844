"""PEFT adapters: read as the change that PEFT makes of them, written so that PEFT finds every factor."""

from __future__ import annotations

import json
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from taskferry import TaskferryError
from taskferry.models import Skeleton, load_model, load_tuned, read_adapter
from taskferry.models.peft import EXPERTS
from taskferry.objectives.teacher import check_whole, teacher_model
from taskferry.output.write import write_form
from tests.helpers import folders
from tests.helpers.command import Ran, taskferry
from tests.helpers.mixtures import mixture
from tests.helpers.tiny import relative

peft = pytest.importorskip("peft")
transformers = pytest.importorskip("transformers")
pytest.importorskip("datasets")


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("world")
    folders.causal(root / "llama", "LlamaForCausalLM", 32, 2, 1)
    folders.causal(root / "qwen", "Qwen3ForCausalLM", 24, 2, 2)
    folders.causal(root / "biased", "Qwen2ForCausalLM", 16, 2, 5)
    folders.encoder(root / "masked", 16, 2, 3, "BertForMaskedLM")
    folders.encoder(root / "bert", 24, 2, 4)
    folders.texts(root / "texts.jsonl")
    made(transformers.AutoModelForSequenceClassification.from_pretrained(root / "masked"), root / "lora", ["query"],
         task_type="SEQ_CLS")  # fmt: skip
    return root


def made(model: Any, folder: Path, modules: Sequence[str], kind: str = "Lora", **more: Any) -> Path:
    """An adapter with random numbers, written by PEFT."""
    adapted = peft.get_peft_model(model, getattr(peft, f"{kind}Config")(**{"r": 2, "target_modules": modules, **more}))
    generator = torch.Generator().manual_seed(0)
    for parameter in adapted.parameters():
        if parameter.requires_grad:
            parameter.data += 0.1 * torch.randn(parameter.shape, generator=generator)
    adapted.save_pretrained(folder)
    return folder


def configured(lora: Path, folder: Path, **more: object) -> Path:
    """The adapter with other settings."""
    shutil.copytree(lora, folder)
    config = json.loads((folder / "adapter_config.json").read_text())
    (folder / "adapter_config.json").write_text(json.dumps({**config, **more}))
    return folder


def moved(world: Path, tuned: object, out: Path, *more: object, source: str = "masked", target: str = "bert",
          code: int = 0, **environment: str) -> Ran:  # fmt: skip
    return taskferry("transfer", "--source-base", world / source, "--source-tuned", tuned, "--target-base",
                     world / target, "--calibration", world / "texts.jsonl", "--samples", 6, "--method", "bico",
                     "--set", "max_length=16", "--method", "bico",
                             "--scale", 1, "--force", "--out", out, *more, code=code,
                     **environment)  # fmt: skip


CASES: list[tuple[str, str, str, list[str], str]] = [
    # the source's folder and the target's, the class that the adapter is for, its modules, its task
    ("llama", "qwen", "AutoModel", ["q_proj", "v_proj"], "FEATURE_EXTRACTION"),
    ("llama", "qwen", "AutoModelForCausalLM", ["q_proj", "v_proj"], "CAUSAL_LM"),
    ("masked", "bert", "AutoModelForSequenceClassification", ["query", "value"], "SEQ_CLS"),
    ("masked", "bert", "AutoModel", ["query", "value"], "FEATURE_EXTRACTION"),
    ("bert", "masked", "AutoModel", ["query", "value"], "FEATURE_EXTRACTION"),
    ("bert", "masked", "AutoModelForTokenClassification", ["query", "value"], "TOKEN_CLS"),
]


@pytest.mark.parametrize(
    ("source", "target", "cls", "modules", "task", "through"),
    [(*case, "transfer") for case in CASES] + [(*CASES[2], "apply")],
    ids=str,
)
def test_peft_finds_every_factor(
    source: str, target: str, cls: str, modules: list[str], task: str, through: str, world: Path, tmp_path: Path
) -> None:
    """On the class of model that the adapter was made for, whatever class the target's folder has."""
    of_class = getattr(transformers, cls)
    lora = made(of_class.from_pretrained(world / source), tmp_path / "lora", modules, task_type=task)
    if through == "transfer":
        moved(world, lora, tmp_path / "moved", source=source, target=target)
    else:
        taskferry("fit", "--source-base", world / source, "--target-base", world / target, "--calibration",
                  world / "texts.jsonl", "--method", "bico", "--out", tmp_path / "maps.alignment")  # fmt: skip
        taskferry("apply", tmp_path / "maps.alignment", lora, "--out", tmp_path / "moved")
    loaded = peft.PeftModel.from_pretrained(of_class.from_pretrained(world / target), tmp_path / "moved")
    factors = [p for n, p in loaded.named_parameters() if "lora_B" in n]
    assert len(factors) == 4
    assert all(bool(factor.any()) for factor in factors)


def test_a_target_that_calls_its_body_otherwise_keeps_its_names(tmp_path: Path) -> None:
    """T5's classes have a prefix that a model which generates does not use."""
    small = {"vocab_size": 400, "max_position_embeddings": 64, "encoder_ffn_dim": 32, "decoder_ffn_dim": 32}
    heads = {"encoder_attention_heads": 4, "decoder_attention_heads": 4, "encoder_layers": 2, "decoder_layers": 2}
    bart = transformers.BartForConditionalGeneration(transformers.BartConfig(d_model=16, **small, **heads))
    t5 = transformers.T5Config(d_model=24, d_kv=6, d_ff=48, num_layers=2, num_heads=4, vocab_size=400)
    t5.decoder_start_token_id = 0
    folders.save(bart, tmp_path / "bart")
    folders.save(transformers.T5ForConditionalGeneration(t5), tmp_path / "t5")
    folders.prompts(tmp_path / "texts.jsonl")
    lora = made(bart, tmp_path / "lora", ["q_proj"], task_type="SEQ_2_SEQ_LM")
    moved(tmp_path, lora, tmp_path / "moved", source="bart", target="t5")
    target = transformers.AutoModelForSeq2SeqLM.from_pretrained(tmp_path / "t5")
    loaded = peft.PeftModel.from_pretrained(target, tmp_path / "moved")
    factors = [p for n, p in loaded.named_parameters() if "lora_B" in n]
    assert len(factors) == 6
    assert all(bool(factor.any()) for factor in factors)


def test_half_precision_stays_half_precision(world: Path, tmp_path: Path) -> None:
    half = shutil.copytree(world / "lora", tmp_path / "half")
    state = load_file(half / "adapter_model.safetensors")
    save_file({k: v.to(torch.bfloat16) for k, v in state.items()}, half / "adapter_model.safetensors")
    moved(world, half, tmp_path / "moved")
    written = load_file(tmp_path / "moved" / "adapter_model.safetensors")
    assert all(tensor.dtype == torch.bfloat16 for tensor in written.values())


@pytest.mark.parametrize("start", ["pissa_niter_4", "olora", "corda"])
def test_adapters_that_rewrite_the_base_are_refused(start: str, world: Path, tmp_path: Path) -> None:
    bad = configured(world / "lora", tmp_path / "bad", init_lora_weights=start)
    with pytest.raises(TaskferryError, match="changes the base's own weights"):
        read_adapter(bad, Skeleton.of(load_model(world / "masked").model))


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("use_dora", True),
        ("alora_invocation_tokens", [5, 6]),
        ("layer_replication", [[0, 2], [1, 2]]),
        ("lora_bias", True),
        ("trainable_token_indices", [1, 2]),
        ("arrow_config", {"top_k": 3}),
        ("setting_of_tomorrow", {"way": "other"}),
    ],
)
def test_settings_that_may_change_what_an_adapter_computes_are_refused(
    key: str, value: object, world: Path, tmp_path: Path
) -> None:
    bad = configured(world / "lora", tmp_path / "bad", **{key: value})
    with pytest.raises(TaskferryError, match=rf"adapter_config\.json sets {key}.* merge it into its base"):
        read_adapter(bad, Skeleton.of(load_model(world / "masked").model))


def test_settings_that_change_nothing_are_no_obstacle(world: Path, tmp_path: Path) -> None:
    more = {"exclude_modules": ["key"], "lora_dropout": 0.1, "velora_config": {"scale": 1.0}, "peft_version": "9.9",
            "eva_config": {"rho": 2.0}, "setting_of_tomorrow": None, "another_of_tomorrow": False}  # fmt: skip
    base = Skeleton.of(load_model(world / "masked").model)
    assert len(read_adapter(configured(world / "lora", tmp_path / "good", **more), base).tau) == 2


def test_ranks_and_scales_by_module_are_those_of_peft(world: Path, tmp_path: Path) -> None:
    """Also where names are those of an older release."""
    text = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2,
            "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 64}  # fmt: skip
    sight = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
             "image_size": 16, "patch_size": 8}  # fmt: skip
    config = transformers.LlavaConfig(
        text_config=transformers.LlamaConfig(**text), vision_config=transformers.CLIPVisionConfig(**sight)
    )
    model = transformers.LlavaForConditionalGeneration(config)
    model.save_pretrained(tmp_path / "base")
    now, then = "model.language_model.layers", "language_model.model.layers"
    lora = made(model, tmp_path / "lora", r".*language_model.*q_proj", lora_alpha=2, use_rslora=True,
                rank_pattern={f"{now}.0.self_attn.q_proj": 3}, alpha_pattern={r"layers\.1.*q_proj": 32})  # fmt: skip
    base = load_model(tmp_path / "base")
    known = load_tuned(lora, base).tau
    plain = transformers.LlavaForConditionalGeneration.from_pretrained(tmp_path / "base")
    merged = peft.PeftModel.from_pretrained(plain, lora).merge_and_unload()
    assert len(known) == 2
    for name, delta in known.dense().deltas.items():
        assert relative(merged.get_parameter(name) - base.model.get_parameter(name), torch.as_tensor(delta)) < 1e-4
    for file in (lora / "adapter_model.safetensors", lora / "adapter_config.json"):
        if file.suffix == ".json":
            file.write_text(file.read_text().replace(f'"{now}', f'"{then}'))
        else:
            save_file({name.replace(now, then): tensor for name, tensor in load_file(file).items()}, file)
    older = load_tuned(lora, base).tau.dense()
    assert all(torch.equal(older.deltas[name], delta) for name, delta in known.dense().deltas.items())


def test_a_frozen_table_beside_a_lora_is_no_part_of_it(world: Path, tmp_path: Path) -> None:
    """PEFT saves the base's own output layer beside its LoRA: base and change are all of the tuned source."""
    llama = transformers.AutoModelForCausalLM.from_pretrained(world / "llama")
    lora = made(llama, tmp_path / "lora", ["q_proj", "lm_head"], task_type="CAUSAL_LM")
    base = load_model(world / "llama")
    tuned = load_tuned(lora, base)
    assert not tuned.ignored
    assert "lm_head.weight" in tuned.tau.deltas
    reference = peft.PeftModel.from_pretrained(transformers.AutoModelForCausalLM.from_pretrained(world / "llama"), lora)
    with teacher_model(base, tuned) as teacher, torch.no_grad():
        ids = torch.arange(6)[None]
        assert torch.allclose(teacher.model(ids).logits, reference(ids).logits, atol=1e-5)


@pytest.mark.parametrize(("name", "modules", "count"), [
    ("masked", ["query"], None), ("biased", ["q_proj", "k_proj", "v_proj"], 6),
])  # fmt: skip
def test_biases_are_reported_and_are_no_teacher(
    name: str, modules: list[str], count: int | None, world: Path, tmp_path: Path
) -> None:
    """PEFT saves those of wrapped layers inside of them, where it also saves what is frozen."""
    model = load_model(world / name).model
    tuned = load_tuned(made(model, tmp_path / "lora", modules, bias="all"), load_model(world / name))
    assert count is None or len(tuned.ignored) == count
    assert any("bias trained beside" in why for why in tuned.ignored.values())
    with pytest.raises(TaskferryError, match=r"has also trained .*bias.* merge the adapter"):
        check_whole(tuned, "give labels")


@pytest.mark.parametrize("name", ["Mixtral", "GptOss"])
def test_experts_are_reported_and_stay(name: str, tmp_path: Path) -> None:
    """As PEFT saves them by `target_parameters`, and as older releases did, one module an expert."""
    parameters = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj", "mlp.gate.weight", "mlp.router.weight"]
    lora = made(mixture(name), tmp_path / "lora", ["q_proj"], target_parameters=parameters)
    adapter = read_adapter(lora, Skeleton.of(mixture(name)))
    assert {key.rsplit(".", 2)[-2] for key in adapter.tau.deltas} == {"q_proj"}
    assert len(adapter.ignored) == 12
    file = lora / "adapter_model.safetensors"
    old = {f"base_model.model.model.layers.0.mlp.experts.3.w1.lora_{side}.weight": torch.ones(2, 2) for side in "AB"}
    save_file({**load_file(file), **old}, file)
    adapter = read_adapter(lora, Skeleton.of(mixture(name)))
    assert len(adapter.ignored) == 14
    assert set(adapter.ignored.values()) == {EXPERTS}
    with pytest.raises(TaskferryError, match="all of it is a LoRA of experts"):
        save_file(old, file)
        read_adapter(lora, Skeleton.of(mixture(name)))


def test_a_lora_of_a_convolution_is_called_one(tmp_path: Path) -> None:
    sight = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2,
             "image_size": 16, "patch_size": 8}  # fmt: skip
    model = transformers.ViTModel(transformers.ViTConfig(**sight))
    model.save_pretrained(tmp_path / "base")
    tuned = load_tuned(made(model, tmp_path / "lora", ["projection", "query", "q_proj"]), load_model(tmp_path / "base"))
    assert len(tuned.ignored) == 2
    assert set(tuned.ignored.values()) == {"a LoRA of a convolution: only linear layers move"}


@pytest.mark.parametrize(("given", "name", "revision"), [
    ("org/tiny@v1", "org/tiny", "v1"), ("org/tiny", "org/tiny", None), ("./at@home/b", "./at@home/b", None),
])  # fmt: skip
def test_a_revision_stands_where_peft_reads_it(
    given: str, name: str, revision: str | None, world: Path, tmp_path: Path
) -> None:
    skeleton = Skeleton.of(load_model(world / "masked").model)
    adapter = read_adapter(world / "lora", skeleton)
    write_form(tmp_path, "lora", adapter.tau, skeleton, base=given, like=adapter)
    config = peft.LoraConfig.from_pretrained(tmp_path)
    assert (config.base_model_name_or_path, config.revision) == (name, revision)


def test_the_hub_id_of_an_adapter(world: Path, tmp_path: Path) -> None:
    """A cache as huggingface_hub lays it out: snapshots of links to blobs, and names of revisions."""
    home = tmp_path / "hub" / "models--me--my-lora"
    model = transformers.AutoModelForSequenceClassification.from_pretrained(world / "masked")
    other = made(model, tmp_path / "other", ["value"], task_type="SEQ_CLS")
    torch.save(load_file(other / "adapter_model.safetensors"), other / "adapter_model.bin")  # of older releases
    (other / "adapter_model.safetensors").unlink()
    for number, (revision, folder) in enumerate((("main", world / "lora"), ("v2", other))):
        snapshot = home / "snapshots" / (f"{number}" * 40)
        for path in (snapshot, home / "blobs", home / "refs"):
            path.mkdir(parents=True, exist_ok=True)
        (home / "refs" / revision).write_text(snapshot.name)
        for file in folder.iterdir():
            shutil.copyfile(file, home / "blobs" / f"{number}-{file.name}")
            (snapshot / file.name).symlink_to(Path("../../blobs") / f"{number}-{file.name}")
    hub = {"HF_HUB_CACHE": str(tmp_path / "hub")}
    moved(world, "me/my-lora@v2", tmp_path / "v2", **hub)
    moved(world, other, tmp_path / "folder")
    one, two = (load_file(tmp_path / name / "adapter_model.safetensors") for name in ("v2", "folder"))
    assert all(torch.equal(one[key], value) for key, value in two.items())  # the revision counts
    record = json.loads((tmp_path / "v2" / "taskferry.json").read_text())
    assert "adapter_model.bin" in record["inputs"]["source_tuned"]
    assert "LORA adapter of rank 2" in taskferry("inspect", "me/my-lora", **hub).out
    ran = moved(world, "me/nothing", tmp_path / "none", code=2, **hub)
    assert "me/nothing is neither a folder nor a model that the hub gives" in ran.err


@pytest.mark.parametrize(("kind", "settings"), [("LoHa", {}), ("LoKr", {}), ("Vera", {"r": 8})])
def test_what_peft_converts_moves_as_a_lora(kind: str, settings: dict[str, Any], world: Path, tmp_path: Path) -> None:
    of_class = transformers.LlamaForCausalLM
    other = made(of_class.from_pretrained(world / "llama"), tmp_path / kind, ["q_proj", "v_proj"], kind,
                 task_type="CAUSAL_LM", **settings)  # fmt: skip
    base = load_model(world / "llama")
    before = {name: value.clone() for name, value in base.model.state_dict().items()}
    tau = load_tuned(other, base).tau
    after = base.model.state_dict()
    assert after.keys() == before.keys()
    assert all(torch.equal(after[name], value) for name, value in before.items())
    merged = peft.PeftModel.from_pretrained(of_class.from_pretrained(world / "llama"), other).merge_and_unload()
    assert len(tau) == 4
    for name, delta in tau.dense().deltas.items():
        assert relative(torch.as_tensor(delta), merged.get_parameter(name) - before[name]) < 1e-3
    if kind == "LoHa":
        moved(world, other, tmp_path / "out", source="llama", target="qwen")
        config = json.loads((tmp_path / "out" / "adapter_config.json").read_text())
        assert (config["peft_type"], config["task_type"]) == ("LORA", "CAUSAL_LM")
        told = moved(world, other, tmp_path / "no", "--engine", "blockwise", source="llama", target="qwen", code=2).err
        assert "save_as_lora" in told  # without the base in memory the way is named


@pytest.mark.parametrize(("kind", "settings"), [
    ("OFT", {"r": 0, "oft_block_size": 4}), ("AdaLora", {"init_r": 4, "target_r": 2, "total_step": 10}),
])  # fmt: skip
def test_what_peft_cannot_convert_is_refused_with_the_way(
    kind: str, settings: dict[str, Any], world: Path, tmp_path: Path
) -> None:
    other = made(load_model(world / "llama").model, tmp_path / kind, ["q_proj"], kind, **settings)
    with pytest.raises(TaskferryError, match="PEFT cannot convert: merge it into its base"):
        load_tuned(other, load_model(world / "llama"))


@pytest.mark.parametrize("change", [
    {"target_modules": "(x|xx)*y"}, {"setting_of_tomorrow": 1}, {"r": 3}, {"peft_type": "OF_TOMORROW"},
])  # fmt: skip
def test_damaged_ones_of_other_kinds_are_refused(change: dict[str, Any], world: Path, tmp_path: Path) -> None:
    made(load_model(world / "llama").model, tmp_path / "loha", ["q_proj"], "LoHa")
    bad = configured(tmp_path / "loha", tmp_path / "bad", **change)
    with pytest.raises(TaskferryError, match="merge it into its base"):
        load_tuned(bad, load_model(world / "llama"))
