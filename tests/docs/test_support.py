"""docs/support.md: what works and what is refused, every cell run by the command on a tiny model of the real class.

The change of a cell that works, as the library's own loader gives it, is what the saved maps predict. A cell that does
not work is refused by one sentence, and nothing is written. TASKFERRY_WRITE_SUPPORT=1 writes the page anew.
"""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from taskferry import Alignment
from taskferry.models import load_model, load_tuned
from tests.helpers import folders, quantised
from tests.helpers.classes import CLASSES, Class
from tests.helpers.command import MAPS, Ran, taskferry
from tests.helpers.often import often

peft = pytest.importorskip("peft")
transformers = pytest.importorskip("transformers")
pytest.importorskip("datasets")

DOCS = Path(__file__).parents[2] / "docs"
PAGE, CELLS = DOCS / "support.md", DOCS / "support.json"
WRITE = bool(os.environ.get("TASKFERRY_WRITE_SUPPORT"))
EQUAL = 1e-5
TOLERANCE = 1e-3  # the engines add in another order: directions that are rounding alone would differ
ENGINES = ("whole", "blockwise")
PLAIN = ("adapters", "files", "libraries", "bases")  # tables whose rows are no classes
Loader = Callable[[Path], Any]
# The gate runs these, and every row of adapters and files; `-m every` runs the rest.
OFTEN = {
    *("LlamaForCausalLM", "Gemma3ForCausalLM", "Phi3ForCausalLM", "GPTNeoXForCausalLM", "GPT2LMHeadModel", "BertModel"),
    *(
        "ViTModel",
        "ModernBertModel",
        "AlbertModel",
        "BartForConditionalGeneration",
        "MixtralForCausalLM",
        "Lfm2ForCausalLM",
    ),
}
MODULES = ["q_proj", "v_proj", "down_proj"]
LORA: dict[str, dict[str, Any]] = {
    "LoRA": {},
    "LoRA, rsLoRA": {"use_rslora": True},
    "LoRA, ranks by module": {"rank_pattern": {"v_proj": 2}, "alpha_pattern": {"v_proj": 3}},
    "LoRA with a saved module": {"modules_to_save": ["lm_head"]},
    "LoRA, activated (aLoRA)": {"alora_invocation_tokens": [5, 6]},
    "DoRA": {"use_dora": True},
}
OTHER: dict[str, tuple[str, dict[str, Any]]] = {
    "LoHa": ("LoHa", {"r": 2}),
    "LoKr": ("LoKr", {"r": 2}),
    "VeRA": ("Vera", {"r": 8, "projection_prng_key": 1}),
    "MiSS": ("Miss", {"r": 2}),
    "OFT": ("OFT", {"oft_block_size": 4}),
    "AdaLoRA": ("AdaLora", {"init_r": 4, "target_r": 2, "total_step": 10}),
    "IA³": ("IA3", {"feedforward_modules": ["down_proj"]}),
    "prompt tuning": ("PromptTuning", {"num_virtual_tokens": 3}),
}


def cells(
    folder: Path, tuned: Path, data: Path, bases: tuple[str, str] = ("a", "b"), loader: Loader | None = None
) -> dict[str, str]:
    """Engine -> what becomes of it; `loader` is the library's own, of a whole model."""
    A, B, fitted = folder / bases[0], folder / bases[1], folder / "maps.alignment"
    words: list[object] = ["--source-base", A, "--source-tuned", tuned, "--target-base", B, "--calibration", data]
    words += [
        "--samples",
        8,
        "--set",
        "micro_batch=8",
        "--method",
        "bico",
        "--set",
        f"tolerance={TOLERANCE}",
        "--quiet",
    ]
    made = taskferry("fit", *words, "--out", fitted, code=None)
    found = {}
    for engine in ENGINES:
        out = folder / engine
        ran = taskferry("transfer", *words, *MAPS, "--force", "--engine", engine, "--out", out, code=None)
        assert out.exists() == (ran.code == 0)
        found[engine] = sentence(ran) if ran.code else as_predicted(Alignment.load(fitted), tuned, A, B, out, loader)
    assert (made.code == 0) == found["whole"].startswith("works"), made.err
    return found


def sentence(ran: Ran) -> str:
    """A refusal without the names of this run."""
    assert ran.code == 2, f"{ran.out}\n{ran.err}"
    assert "Traceback" not in ran.err
    return re.sub(r"(/[\w.-]+)+/", "", " ".join(ran.err.split()).removeprefix("taskferry: "))


def as_predicted(alignment: Alignment, tuned: Path, A: Path, B: Path, out: Path, loader: Loader | None = None) -> str:
    """What the library's loader makes of the output is what the maps predict; all else stands in the coverage."""
    predicted = alignment.apply(load_tuned(str(tuned), load_model(str(A))).tau).dense()
    base = load_model(str(B)).model
    before = {name: parameter.detach().clone() for name, parameter in base.named_parameters()}
    if (out / "adapter_config.json").exists():
        after = peft.PeftModel.from_pretrained(base, str(out)).merge_and_unload()
    elif loader is not None:
        after = loader(out)
    else:
        after = type(base).from_pretrained(out, dtype=torch.float32)
    record = json.loads((out / "taskferry.json").read_text(encoding="utf-8"))
    kept = {row["parameter"]: row["reason"] for row in record["coverage"]["rows"] if row["status"] == "kept"}
    moved = 0
    for name, parameter in after.named_parameters():
        change, wanted = (parameter.detach() - before[name]).double(), predicted.deltas.get(name)
        if wanted is None or kept.get(name):
            assert not change.any(), name
            continue
        rounding = EQUAL * (before[name].double().norm() + wanted.double().norm())
        assert (change - wanted.double()).norm() <= rounding < 0.1 * wanted.double().norm(), name
        moved += 1
    assert moved == len(set(predicted.deltas) - set(kept)) > 0
    share = sum(record["verdict"].get("change", {}).get("moved", {"": 1.0}).values())
    return "works" if share > 0.995 else f"works; {100 * share:.0f} % of the change finds a place"


def held(table: str, row: str, found: dict[str, str]) -> None:
    """Against what the page was made from; or the page is made anew."""
    known = json.loads(CELLS.read_text(encoding="utf-8")) if CELLS.exists() else {}
    if WRITE:
        known.setdefault(table, {})[row] = found
        CELLS.write_text(json.dumps(known, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
        PAGE.write_text(made(PAGE.read_text(encoding="utf-8"), known), encoding="utf-8")
    assert known.get(table, {}).get(row) == found, "run it with TASKFERRY_WRITE_SUPPORT=1"


@pytest.mark.parametrize("kind", often(CLASSES, OFTEN))
def test_a_lora_on_every_linear_layer_of_a_class(kind: Class, tmp_path: Path) -> None:
    for name, width, depth, seed in (("a", 16, 2, 1), ("b", 24, 3, 2)):
        folders.save(kind.build(width, depth, seed), tmp_path / name)
        if kind.group == "vision":
            folders.sees(tmp_path / name)
    lora = folders.lora(tmp_path / "a", tmp_path / "lora", kind.modules, seed=3)
    kinds = {"encoders": folders.texts, "vision": folders.pictures, "encoder-decoders": folders.prompts}
    make = kinds.get(kind.group, folders.passages)
    name = "images" if kind.group == "vision" else "data.jsonl"
    held(kind.group, kind.name, cells(tmp_path, lora, make(tmp_path / name)))


def openclip(folder: Path, width: int, depth: int) -> Any:
    """A folder as `push_to_hf_hub` makes it, and the library's own loader."""
    open_clip = pytest.importorskip("open_clip")
    vision = {"image_size": 32, "patch_size": 8, "width": width, "head_width": width // 4, "layers": depth}
    words = {"context_length": 16, "vocab_size": 49408, "width": width, "heads": 4, "layers": 1}
    config = {"model_cfg": {"embed_dim": 16, "vision_cfg": vision, "text_cfg": words}, "preprocess_cfg": {}}
    stored(folder, "open_clip", config, open_clip.CLIP(**config["model_cfg"]))
    return lambda out: open_clip.create_model(f"local-dir:{out}", load_weights=True)


def timm(folder: Path, width: int, depth: int) -> Any:
    """A folder as `push_to_hf_hub` makes it, and the library's own loader."""
    timm = pytest.importorskip("timm")
    size = {"img_size": 32, "patch_size": 8, "embed_dim": width, "depth": depth, "num_heads": 4, "num_classes": 3}
    name, pretrained = "vit_tiny_patch16_224", {"input_size": [3, 32, 32], "num_classes": 3}
    config = {"architecture": name, "model_args": size, "num_classes": 3, "pretrained_cfg": pretrained}
    stored(folder, "", config, timm.create_model(name, **size))
    return lambda out: timm.create_model(f"local-dir:{out}", pretrained=True)


def stored(folder: Path, library: str, config: dict[str, Any], model: torch.nn.Module) -> None:
    folder.mkdir()
    start = f"{library}_" if library else ""
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    (folder / f"{start}config.json").write_text(json.dumps(config))
    save_file({name: value.contiguous() for name, value in model.state_dict().items()},
              folder / f"{start}model.safetensors")  # fmt: skip


LIBRARIES = {"OpenCLIP, `CLIP`": openclip, "timm, `VisionTransformer`": timm}


@pytest.mark.every
@pytest.mark.parametrize("library", LIBRARIES)
def test_other_libraries(library: str, tmp_path: Path) -> None:
    loader = [LIBRARIES[library](tmp_path / name, width, depth) for name, width, depth in (("a", 16, 2), ("b", 24, 3))][
        1
    ]
    generator = torch.Generator().manual_seed(9)
    state = {
        name: value + 0.05 * torch.randn(value.shape, generator=generator) * ("blocks." in name)
        for name, value in load_file(next((tmp_path / "a").glob("*.safetensors"))).items()
    }
    save_file(state, tmp_path / "tuned.safetensors")
    data = folders.pictures(tmp_path / "images")
    held("libraries", library, cells(tmp_path, tmp_path / "tuned.safetensors", data, loader=loader))


@pytest.fixture(scope="module")
def llamas(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("llamas")
    folders.causal(root / "a", "LlamaForCausalLM", 16, 2, 1)
    folders.causal(root / "b", "LlamaForCausalLM", 24, 3, 2)
    folders.passages(root / "data.jsonl")
    return root


@pytest.fixture
def world(llamas: Path, tmp_path: Path) -> Path:
    shutil.copytree(llamas, tmp_path / "world")
    return tmp_path / "world"


@pytest.mark.parametrize("kind", LORA)
def test_kinds_of_lora(kind: str, world: Path) -> None:
    lora = folders.lora(world / "a", world / "lora", MODULES, seed=3, task_type="CAUSAL_LM", **LORA[kind])
    held("adapters", kind, cells(world, lora, world / "data.jsonl"))


@pytest.mark.parametrize("kind", OTHER)
def test_other_adapters(kind: str, world: Path) -> None:
    name, settings = OTHER[kind]
    modules = {} if name == "PromptTuning" else {"target_modules": MODULES}
    config = getattr(peft, f"{name}Config")(task_type="CAUSAL_LM", **modules, **settings)
    adapted = peft.get_peft_model(transformers.LlamaForCausalLM.from_pretrained(world / "a"), config)
    torch.manual_seed(1)
    with torch.no_grad():
        for parameter in adapted.parameters():
            if parameter.requires_grad:
                parameter.add_(0.1 * torch.randn_like(parameter))
    adapted.save_pretrained(world / "tuned")
    held("adapters", kind, cells(world, world / "tuned", world / "data.jsonl"))


def sharded(world: Path) -> Path:
    model = transformers.LlamaForCausalLM.from_pretrained(world / "a-tuned")
    shutil.rmtree(world / "a-tuned")
    model.save_pretrained(world / "a-tuned", max_shard_size="20KB")
    assert len(list((world / "a-tuned").glob("*.safetensors"))) > 1
    return world / "a-tuned"


def half(world: Path) -> Path:
    transformers.LlamaForCausalLM.from_pretrained(world / "a-tuned").bfloat16().save_pretrained(world / "half")
    return world / "half"


def torch_folder(world: Path) -> Path:
    state = transformers.LlamaForCausalLM.from_pretrained(world / "a-tuned").state_dict()
    for file in (world / "a-tuned").glob("*.safetensors"):
        file.unlink()
    torch.save(state, world / "a-tuned" / "pytorch_model.bin")
    return world / "a-tuned"


def state(suffix: str) -> Callable[[Path], Path]:
    def write(world: Path) -> Path:
        tensors = transformers.LlamaForCausalLM.from_pretrained(world / "a-tuned").state_dict()
        path = world / f"tuned{suffix}"
        if suffix == ".safetensors":
            save_file({name: value.clone() for name, value in tensors.items()}, path)
        else:
            torch.save(tensors, path)
        return path

    return write


def difference(world: Path) -> Path:
    load_tuned(str(world / "a-tuned"), load_model(str(world / "a"))).tau.save(world / "change.safetensors")
    return world / "change.safetensors"


def pickled(world: Path) -> Path:
    torch.save(transformers.LlamaForCausalLM.from_pretrained(world / "a-tuned"), world / "whole.pt")
    return world / "whole.pt"


FILES: dict[str, Callable[[Path], Path]] = {
    "folder, one safetensors file": lambda world: world / "a-tuned",
    "folder, shards": sharded,
    "folder, bfloat16": half,
    "folder, `pytorch_model.bin`": torch_folder,
    "state dictionary, `.safetensors`": state(".safetensors"),
    "state dictionary, `.pt`": state(".pt"),
    "task vector (`TaskVector.save`)": difference,
    "pickled model, `.pt`": pickled,
}


@pytest.mark.parametrize("form", FILES)
def test_forms_of_a_full_fine_tune(form: str, world: Path) -> None:
    folders.shifted(world / "a", world / "a-tuned", only=".layers.")
    held("files", form, cells(world, FILES[form](world), world / "data.jsonl"))


def scaled(world: Path) -> tuple[str, str]:
    for name in ("a", "b"):
        quantised.fp8(world / name, world / f"{name}-fp8", (4, 8))
    return "a-fp8", "b-fp8"


def named(method: str) -> Callable[[Path], tuple[str, str]]:
    def write(world: Path) -> tuple[str, str]:
        weights = load_file(world / "b" / quantised.WEIGHTS)
        quantised.configured(world / "b", world / "b-quantised", {"quant_method": method}, weights)
        return "a", "b-quantised"

    return write


BASES: dict[str, Callable[[Path], tuple[str, str]]] = {
    "FP8 with scales": scaled,
    "GPTQ": named("gptq"),
    "AWQ": named("awq"),
}


@pytest.mark.every
@pytest.mark.parametrize("form", BASES)
def test_bases_in_fewer_bits(form: str, world: Path) -> None:
    bases = BASES[form](world)
    lora = folders.lora(world / "a", world / "lora", MODULES, seed=3, task_type="CAUSAL_LM")
    held("bases", form, cells(world, lora, world / "data.jsonl", bases))


def test_the_page_is_made_of_these_cells() -> None:
    known, page = json.loads(CELLS.read_text(encoding="utf-8")), PAGE.read_text(encoding="utf-8")
    rows = {kind.group: [each.name for each in CLASSES if each.group == kind.group] for kind in CLASSES}
    rows |= {"adapters": [*LORA, *OTHER], "files": list(FILES), "libraries": list(LIBRARIES), "bases": list(BASES)}
    assert {table: set(cells) for table, cells in known.items()} == {table: set(names) for table, names in rows.items()}
    assert made(page, known) == page, "run it with TASKFERRY_WRITE_SUPPORT=1"


def made(page: str, known: dict[str, dict[str, dict[str, str]]]) -> str:
    """The page with its tables; refusals are numbered and stand below."""
    sentences: dict[str, int] = {}

    def cell(text: str) -> str:
        return text if text.startswith("works") else f"refused ({sentences.setdefault(text, len(sentences) + 1)})"

    def table(found: re.Match[str]) -> str:
        lines = ["| | whole | block by block |", "|---|---|---|"]
        for row, engines in known.get(found[1], {}).items():
            name = row if found[1] in PLAIN else f"`{row}`"
            lines.append(f"| {name} | " + " | ".join(cell(engines[engine]) for engine in ENGINES) + " |")
        return f"<!-- table {found[1]} -->\n\n" + "\n".join(lines) + "\n\n<!-- end -->"

    page = re.sub(r"<!-- table ([\w -]+) -->.*?<!-- end -->", table, page, flags=re.S)
    listed = "\n".join(f"{number}. {text}" for text, number in sentences.items())
    return re.sub(
        r"<!-- refusals -->.*?<!-- end -->", f"<!-- refusals -->\n\n{listed}\n\n<!-- end -->", page, flags=re.S
    )
