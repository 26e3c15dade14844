"""Adapters are named as the model that they are for: around a head or bare, whatever class the target's folder has."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from taskferry import TaskferryError
from taskferry.jobs.output import write_form
from taskferry.models import Skeleton, load_model, load_tuned, read_adapter
from taskferry.objectives.teacher import check_whole, teacher_model
from tests.helpers import folders
from tests.helpers.command import taskferry

transformers = pytest.importorskip("transformers")
peft = pytest.importorskip("peft")


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("names")
    folders.causal(root / "llama", "LlamaForCausalLM", 32, 2, 1)
    folders.causal(root / "qwen", "Qwen3ForCausalLM", 24, 2, 2)
    folders.causal(root / "biased", "Qwen2ForCausalLM", 16, 2, 5)
    small = {"vocab_size": 400, "max_position_embeddings": 64, "encoder_ffn_dim": 32, "decoder_ffn_dim": 32}
    heads = {"encoder_attention_heads": 4, "decoder_attention_heads": 4, "encoder_layers": 2, "decoder_layers": 2}
    bart = transformers.BartConfig(d_model=16, **small, **heads)
    folders.save(transformers.BartForConditionalGeneration(bart), root / "bart")
    t5 = transformers.T5Config(d_model=24, d_kv=6, d_ff=48, num_layers=2, num_heads=4, vocab_size=400)
    t5.decoder_start_token_id = 0
    folders.save(transformers.T5ForConditionalGeneration(t5), root / "t5")
    folders.prompts(root / "prompts.jsonl")
    folders.encoder(root / "masked", 16, 2, 3, "BertForMaskedLM")
    folders.encoder(root / "bert", 24, 2, 4)
    folders.texts(root / "texts.jsonl")
    return root


def made(model: Any, folder: Path, modules: list[str], **more: Any) -> Path:
    """A LoRA with random factors, and random biases where it trains them."""
    adapter = peft.get_peft_model(model, peft.LoraConfig(r=2, target_modules=modules, **more))
    generator = torch.Generator().manual_seed(0)
    for name, parameter in adapter.named_parameters():
        if parameter.requires_grad and "lora_A" not in name:
            parameter.data = 0.3 * torch.randn(parameter.shape, generator=generator)
    adapter.save_pretrained(folder)
    return folder


CASES: list[tuple[str, str, str, list[str], str]] = [
    # the source's folder and the target's, the class that the adapter is for, its modules, its task
    ("llama", "qwen", "AutoModel", ["q_proj", "v_proj"], "FEATURE_EXTRACTION"),
    ("llama", "qwen", "AutoModelForCausalLM", ["q_proj", "v_proj"], "CAUSAL_LM"),
    ("masked", "bert", "AutoModelForSequenceClassification", ["query", "value"], "SEQ_CLS"),
    ("masked", "bert", "AutoModel", ["query", "value"], "FEATURE_EXTRACTION"),
    ("bert", "masked", "AutoModel", ["query", "value"], "FEATURE_EXTRACTION"),
    ("bert", "masked", "AutoModelForQuestionAnswering", ["query", "value"], "QUESTION_ANS"),
    ("bert", "masked", "AutoModelForTokenClassification", ["query", "value"], "TOKEN_CLS"),
]


@pytest.mark.parametrize(
    ("source", "target", "cls", "modules", "task", "through"),
    [(*case, "transfer") for case in CASES] + [(*case, "apply") for case in CASES[:3]],
    ids=str,
)
def test_peft_finds_every_factor(
    source: str, target: str, cls: str, modules: list[str], task: str, through: str, world: Path, tmp_path: Path
) -> None:
    """On the class of model that the adapter was made for: before, PEFT left all factors at zero, with a warning."""
    of_class = getattr(transformers, cls)
    lora = made(of_class.from_pretrained(world / source), tmp_path / "lora", modules, task_type=task)
    pair = ["--source-base", world / source, "--target-base", world / target, "--calibration", world / "texts.jsonl",
            "--samples", 6, "--method", "bico", "--max-length", 16]  # fmt: skip
    if through == "transfer":
        taskferry("transfer", *pair, "--source-tuned", lora, "--scale", 1, "--force", "--out", tmp_path / "moved")
    else:
        taskferry("fit", *pair, "--out", tmp_path / "maps.alignment")
        taskferry("apply", tmp_path / "maps.alignment", lora, "--out", tmp_path / "moved")
    loaded = peft.PeftModel.from_pretrained(of_class.from_pretrained(world / target), tmp_path / "moved")
    factors = [p for n, p in loaded.named_parameters() if "lora_B" in n]
    assert len(factors) == 4
    assert all(bool(factor.any()) for factor in factors)


def test_a_target_that_calls_its_body_otherwise_keeps_its_names(world: Path, tmp_path: Path) -> None:
    """T5's classes have a prefix that a model which generates does not use."""
    of_class = transformers.AutoModelForSeq2SeqLM
    lora = made(of_class.from_pretrained(world / "bart"), tmp_path / "lora", ["q_proj"], task_type="SEQ_2_SEQ_LM")
    taskferry("transfer", "--source-base", world / "bart", "--source-tuned", lora, "--target-base", world / "t5",
              "--calibration", world / "prompts.jsonl", "--samples", 6, "--method", "bico", "--scale", 1,
              "--force", "--out", tmp_path / "moved")  # fmt: skip
    loaded = peft.PeftModel.from_pretrained(of_class.from_pretrained(world / "t5"), tmp_path / "moved")
    factors = [p for n, p in loaded.named_parameters() if "lora_B" in n]
    assert len(factors) == 6
    assert all(bool(factor.any()) for factor in factors)


def test_a_frozen_table_beside_a_lora_is_no_part_of_it(world: Path, tmp_path: Path) -> None:
    """PEFT saves the base's own output layer beside its LoRA: base and change are all of the tuned source."""
    lora = made(transformers.AutoModelForCausalLM.from_pretrained(world / "llama"), tmp_path / "lora",
                ["q_proj", "lm_head"], task_type="CAUSAL_LM")  # fmt: skip
    base = load_model(str(world / "llama"))
    tuned = load_tuned(str(lora), base)
    assert not tuned.ignored
    assert "lm_head.weight" in tuned.tau.deltas
    reference = peft.PeftModel.from_pretrained(transformers.AutoModelForCausalLM.from_pretrained(world / "llama"), lora)
    with teacher_model(base, tuned) as teacher, torch.no_grad():
        ids = torch.arange(6)[None]
        assert torch.allclose(teacher.model(ids).logits, reference(ids).logits, atol=1e-5)


def test_a_lora_with_biases_is_no_teacher(world: Path, tmp_path: Path) -> None:
    lora = made(transformers.AutoModelForMaskedLM.from_pretrained(world / "masked"), tmp_path / "lora",
                ["query"], bias="all")  # fmt: skip
    tuned = load_tuned(str(lora), load_model(str(world / "masked")))
    with pytest.raises(TaskferryError, match=r"has also trained .*bias.* merge the adapter"):
        check_whole(tuned, "give labels")


def test_biases_of_the_layers_of_a_lora_are_part_of_it(world: Path, tmp_path: Path) -> None:
    """PEFT saves them inside the wrapped layer, where it also saves what is frozen."""
    lora = made(transformers.AutoModelForCausalLM.from_pretrained(world / "biased"), tmp_path / "lora",
                ["q_proj", "k_proj", "v_proj"], bias="all", task_type="CAUSAL_LM")  # fmt: skip
    tuned = load_tuned(str(lora), load_model(str(world / "biased")))
    assert all("bias trained beside" in why for why in tuned.ignored.values())
    assert len(tuned.ignored) == 6
    with pytest.raises(TaskferryError, match="bias"):
        check_whole(tuned, "leave --refine out", heads=False)


def test_what_the_base_has_no_use_for_is_no_hindrance(world: Path, tmp_path: Path) -> None:
    """Tensors of another class in a fine-tune's files, and the second name of a tied weight."""
    folders.shifted(world / "llama", tmp_path / "tuned")
    file = tmp_path / "tuned" / "model.safetensors"
    save_file({**load_file(file), "v_head.summary.weight": torch.zeros(1, 32)}, file, {"format": "pt"})
    base = load_model(str(world / "llama"))
    tuned = load_tuned(str(tmp_path / "tuned"), base)
    assert list(tuned.ignored) == ["v_head.summary.weight"]
    check_whole(tuned, "leave --refine out")
    model = transformers.AutoModelForCausalLM.from_pretrained(world / "llama", tie_word_embeddings=True)
    folders.save(model, tmp_path / "tied")
    torch.save(model.state_dict(), tmp_path / "state.pt")
    assert not load_tuned(str(tmp_path / "state.pt"), load_model(str(tmp_path / "tied"))).ignored


def test_a_resized_fine_tune_teaches_as_it_was_saved_or_not_at_all(world: Path, tmp_path: Path) -> None:
    model = transformers.AutoModelForCausalLM.from_pretrained(world / "llama")
    model.resize_token_embeddings(401)
    folders.save(model, tmp_path / "more")
    base = load_model(str(world / "llama"))
    tuned = load_tuned(str(tmp_path / "more"), base)
    with teacher_model(base, tuned) as teacher:
        assert teacher.model.get_input_embeddings().num_embeddings == 401
    with pytest.raises(TaskferryError, match="leave --refine out"):
        check_whole(tuned, "leave --refine out")
    torch.save(model.state_dict(), tmp_path / "more.pt")
    with (
        pytest.raises(TaskferryError, match="give labels"),
        teacher_model(base, load_tuned(str(tmp_path / "more.pt"), base)),
    ):
        pass


@pytest.mark.parametrize(("given", "name", "revision"), [
    ("org/tiny@v1", "org/tiny", "v1"), ("org/tiny", "org/tiny", None), ("./at@home/b", "./at@home/b", None),
])  # fmt: skip
def test_a_revision_stands_where_peft_reads_it(
    given: str, name: str, revision: str | None, world: Path, tmp_path: Path
) -> None:
    lora = made(transformers.AutoModelForCausalLM.from_pretrained(world / "llama"), tmp_path / "lora", ["q_proj"])
    skeleton = Skeleton.of(load_model(str(world / "llama")).model)
    adapter = read_adapter(lora, skeleton)
    (tmp_path / "out").mkdir()
    write_form("lora", adapter.tau, tmp_path / "out", target=skeleton, adapter=adapter, base=given)
    config = json.loads((tmp_path / "out" / "adapter_config.json").read_text())
    assert (config["base_model_name_or_path"], config["revision"]) == (name, revision)
    assert peft.LoraConfig.from_pretrained(tmp_path / "out").revision == revision


def test_patterns_are_in_the_names_that_the_adapter_has(tmp_path: Path) -> None:
    """Names of an older release are read, and α by module with them."""
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
    lora = made(model, tmp_path / "lora", r".*language_model.*q_proj",  # type: ignore[arg-type]
                lora_alpha=2, alpha_pattern={f"{now}.0.self_attn.q_proj": 32})  # fmt: skip
    base = load_model(tmp_path / "base")
    known = load_tuned(lora, base).tau
    for file in (lora / "adapter_model.safetensors", lora / "adapter_config.json"):
        if file.suffix == ".json":
            file.write_text(file.read_text().replace(f'"{now}', f'"{then}'))
        else:
            save_file({name.replace(now, then): tensor for name, tensor in load_file(file).items()}, file)
    older = load_tuned(lora, base).tau
    assert len(known) == 2
    for name, delta in known.deltas.items():
        assert torch.allclose(older.deltas[name].dense(), delta.dense()), name  # type: ignore[union-attr]


def test_a_lora_of_a_convolution_is_called_one(tmp_path: Path) -> None:
    sight = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2,
             "image_size": 16, "patch_size": 8}  # fmt: skip
    model = transformers.ViTModel(transformers.ViTConfig(**sight))
    model.save_pretrained(tmp_path / "base")
    tuned = load_tuned(made(model, tmp_path / "lora", ["projection", "query", "q_proj"]), load_model(tmp_path / "base"))
    assert len(tuned.ignored) == 2
    assert set(tuned.ignored.values()) == {"a LoRA of a convolution: only linear layers move"}
    assert tuned.adapter is not None
    assert not tuned.adapter.saved


def test_inspect_reads_files_of_older_releases(world: Path, tmp_path: Path) -> None:
    lora = made(transformers.AutoModel.from_pretrained(world / "bert"), tmp_path / "lora", ["query"])
    torch.save(load_file(lora / "adapter_model.safetensors"), lora / "adapter_model.bin")
    (lora / "adapter_model.safetensors").unlink()
    assert "lora_A" in taskferry("inspect", lora).out
