"""Tiny models of the real classes of every family, each with its inputs: built from a configuration, random weights."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from taskferry import Batch, Calibration, Head, LanguageModel, Objective, Prototypes, TaskVector
from taskferry.data.batch import IGNORED
from taskferry.engines.whole import WholePair
from taskferry.methods import Job

VOCABULARY = 40


@dataclass(frozen=True)
class Tiny:
    """How to build a model of one family at a width and depth, and what to feed it."""

    name: str
    build: Callable[[int, int], nn.Module]
    batch: Callable[[int, int], Batch]  # (first sample, number)
    objective: Objective

    def model(self, width: int, depth: int, seed: int) -> nn.Module:
        torch.manual_seed(seed)
        model = self.build(width, depth)
        # Initial biases and class tokens are zero: give every parameter a value a real model could have.
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(0.05 * torch.randn_like(parameter))
        return model.eval()

    def calibration(self, samples: int = 24, micro_batch: int = 8) -> Calibration:
        starts = range(0, samples, micro_batch)
        sizes = [min(micro_batch, samples - start) for start in starts]
        batches = [self.batch(start, n) for start, n in zip(starts, sizes, strict=True)]
        return Calibration([(batch, batch) for batch in batches])


def per_sample(first: int, n: int, make: Callable[[torch.Generator], Tensor]) -> Tensor:
    """Sample i is the same whatever micro-batch it stands in."""
    return torch.stack([make(torch.Generator().manual_seed(1000 + i)) for i in range(first, first + n)])


def classes(first: int, n: int) -> Tensor:
    return torch.arange(first, first + n) % 3


def text(first: int, n: int, labels: str | None = None) -> Batch:
    ids = per_sample(first, n, lambda g: torch.randint(3, VOCABULARY, (10,), generator=g))
    mask = torch.ones_like(ids)
    for row in range(n):
        mask[row, 10 - (first + row) % 4 :] = 0
    inputs = {"input_ids": ids, "attention_mask": mask}
    if labels == "causal":
        inputs["labels"] = ids.masked_fill(mask == 0, IGNORED)
    if labels == "sequence":
        answer = per_sample(first, n, lambda g: torch.randint(3, VOCABULARY, (7,), generator=g))
        inputs["labels"] = answer.index_fill(1, torch.tensor([6]), IGNORED)
    return Batch(inputs, classes(first, n), tuple(range(first, first + n)))


def images(key: str) -> Callable[[int, int], Batch]:
    def batch(first: int, n: int) -> Batch:
        pixels = per_sample(first, n, lambda g: torch.randn(3, 32, 32, generator=g))
        return Batch({key: pixels}, classes(first, n), tuple(range(first, first + n)))

    return batch


def speech(first: int, n: int) -> Batch:
    labels = text(first, n, "sequence").inputs["labels"]
    features = per_sample(first, n, lambda g: torch.randn(8, 40, generator=g))
    return Batch({"input_features": features, "labels": labels}, None, tuple(range(first, first + n)))


def _common(width: int, depth: int) -> dict[str, int]:
    return {
        "hidden_size": width,
        "intermediate_size": 2 * width,
        "num_hidden_layers": depth,
        "num_attention_heads": 4,
    }


def hf(name: str, width: int, depth: int, **more: object) -> nn.Module:
    transformers = pytest.importorskip("transformers")
    kind = {"BertModel": "Bert", "RobertaModel": "Roberta", "ViTModel": "ViT"}.get(name, name.split("For")[0])
    settings: dict[str, object] = {**_common(width, depth), **more}
    return getattr(transformers, name)(getattr(transformers, f"{kind}Config")(**settings))


def clip(width: int, depth: int) -> nn.Module:
    transformers = pytest.importorskip("transformers")
    vision = {**_common(width, depth), "image_size": 32, "patch_size": 8}
    words = {**_common(width, depth), "vocab_size": VOCABULARY, "bos_token_id": 1, "eos_token_id": 2}
    return transformers.CLIPModel(
        transformers.CLIPConfig(text_config=words, vision_config=vision, projection_dim=width // 2)
    )


def t5(width: int, depth: int) -> nn.Module:
    transformers = pytest.importorskip("transformers")
    config = transformers.T5Config(
        vocab_size=VOCABULARY,
        d_model=width,
        d_kv=width // 4,
        d_ff=2 * width,
        num_layers=depth,
        num_heads=4,
        feed_forward_proj="gated-gelu",
        decoder_start_token_id=0,
    )
    return transformers.T5ForConditionalGeneration(config)


def t5_encoder(width: int, depth: int) -> nn.Module:
    transformers = pytest.importorskip("transformers")
    return transformers.T5EncoderModel(t5(width, depth).config)


def gpt2(width: int, depth: int) -> nn.Module:
    transformers = pytest.importorskip("transformers")
    config = transformers.GPT2Config(
        vocab_size=VOCABULARY, n_embd=width, n_layer=depth, n_head=4, n_positions=64, bos_token_id=1, eos_token_id=2
    )
    return transformers.GPT2LMHeadModel(config)


def whisper(width: int, depth: int) -> nn.Module:
    transformers = pytest.importorskip("transformers")
    sides = {}
    for side in ("encoder", "decoder"):
        sides |= {f"{side}_layers": depth, f"{side}_attention_heads": 4, f"{side}_ffn_dim": 2 * width}
    tokens = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "decoder_start_token_id": 1}
    config = transformers.WhisperConfig(
        vocab_size=VOCABULARY, d_model=width, num_mel_bins=8, max_source_positions=20, **sides, **tokens
    )
    return transformers.WhisperForConditionalGeneration(config)


def openclip(width: int, depth: int, block_type: str = "default") -> nn.Module:
    open_clip = pytest.importorskip("open_clip")
    vision = {
        "image_size": 32,
        "patch_size": 8,
        "width": width,
        "head_width": width // 4,
        "layers": depth,
        "block_type": block_type,
    }
    words = {"context_length": 8, "vocab_size": VOCABULARY, "width": width, "heads": 4, "layers": depth}
    return open_clip.CLIP(embed_dim=width // 2, vision_cfg=vision, text_cfg=words)


def timm_vit(width: int, depth: int) -> nn.Module:
    timm = pytest.importorskip("timm")
    return timm.models.VisionTransformer(
        img_size=32, patch_size=8, embed_dim=width, depth=depth, num_heads=4, num_classes=3
    )


class Plain(nn.Module):
    """Any module with linear layers."""

    def __init__(self, width: int, depth: int) -> None:
        super().__init__()
        self.start = nn.Linear(10, width)
        self.layers = nn.ModuleList(nn.Linear(width, width) for _ in range(depth))
        self.attention = nn.MultiheadAttention(width, 4, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        x = self.start(x)
        for layer in self.layers:
            x = x + torch.tanh(layer(x))
        return x + self.attention(x, x, x)[0]


def sequences(first: int, n: int) -> Batch:
    x = per_sample(first, n, lambda g: torch.randn(6, 10, generator=g))
    return Batch({"x": x}, classes(first, n), tuple(range(first, first + n)))


def _text(first: int, n: int) -> Batch:
    return text(first, n)


def _causal(first: int, n: int) -> Batch:
    return text(first, n, "causal")


def _sequence(first: int, n: int) -> Batch:
    return text(first, n, "sequence")


def _decoder(name: str) -> Callable[[int, int], nn.Module]:
    # Grouped-query attention: keys and values are narrower than queries.
    extra: dict[str, object] = {"vocab_size": VOCABULARY, "num_key_value_heads": 2}

    def build(width: int, depth: int) -> nn.Module:
        more = {**extra, "head_dim": width // 4} if name.startswith("Qwen3") else extra
        return hf(name, width, depth, **more)

    return build


TINY = {
    tiny.name: tiny
    for tiny in (
        Tiny("bert", lambda w, d: hf("BertModel", w, d, vocab_size=VOCABULARY), _text, Prototypes()),
        Tiny("bert-classifier", lambda w, d: hf("BertForSequenceClassification", w, d, vocab_size=VOCABULARY,
                                                num_labels=3), _text, Head()),
        Tiny("roberta", lambda w, d: hf("RobertaModel", w, d, vocab_size=VOCABULARY, pad_token_id=1), _text,
             Prototypes()),
        Tiny("vit", lambda w, d: hf("ViTModel", w, d, image_size=32, patch_size=8), images("pixel_values"),
             Prototypes()),
        Tiny("clip", clip, images("pixel_values"), Prototypes()),
        Tiny("t5", t5, _sequence, LanguageModel()),
        Tiny("t5-encoder", t5_encoder, _text, Prototypes()),
        Tiny("gpt2", gpt2, _causal, LanguageModel()),
        Tiny("llama", _decoder("LlamaForCausalLM"), _causal, LanguageModel()),
        Tiny("qwen2", _decoder("Qwen2ForCausalLM"), _causal, LanguageModel()),
        Tiny("qwen3", _decoder("Qwen3ForCausalLM"), _causal, LanguageModel()),
        Tiny("whisper", whisper, speech, LanguageModel()),
        Tiny("openclip", openclip, images("image"), Prototypes()),
        Tiny("openclip-own-attention", lambda w, d: openclip(w, d, "custom"), images("image"), Prototypes()),
        Tiny("timm", timm_vit, images("x"), Prototypes()),
        Tiny("plain", Plain, sequences, Prototypes()),
    )
}  # fmt: skip


def tuned(model: nn.Module, seed: int = 5, size: float = 0.02) -> dict[str, Tensor]:
    """Parameters of a pretended fine-tune of the model."""
    generator = torch.Generator().manual_seed(seed)
    return {
        name: parameter.detach() + size * torch.randn(parameter.shape, generator=generator).to(parameter)
        for name, parameter in model.named_parameters()
    }


def relative(a: Tensor, b: Tensor) -> float:
    """‖a − b‖ / ‖b‖."""
    return float(torch.linalg.vector_norm((a - b).double()) / torch.linalg.vector_norm(b.double()))


def double(batch: Batch) -> Batch:
    """The batch in double precision; numbers of tokens stay whole."""
    return replace(batch, inputs={k: v.double() if v.is_floating_point() else v for k, v in batch.inputs.items()})


def job(name: str, source: tuple[int, int] = (16, 2), target: tuple[int, int] = (16, 2), micro_batch: int = 6) -> Job:
    """A transfer between two models of a family in double precision."""
    tiny = TINY[name]
    A, B = tiny.model(*source, seed=1).double(), tiny.model(*target, seed=2).double()
    tau = TaskVector.between(dict(A.named_parameters()), tuned(A))
    pairs = Calibration((double(a), double(b)) for a, b in tiny.calibration(24, micro_batch))
    return Job.of(A, B, tau, pairs, tiny.objective)


def rebuilt(given: Job, **changes: Any) -> Job:
    """The same transfer with another source, target, tau, calibration, objective or work."""
    pair = given.pair
    parts = {name: changes.pop(name, getattr(given, name)) for name in ("source", "target", "calibration", "tau")}
    objective, work = changes.pop("objective", pair.objective), changes.pop("work", pair.work)
    assert not changes
    tau = parts.pop("tau")
    return Job(WholePair(**parts, objective=objective, work=work), tau)
