"""Files of llama.cpp, made from tiny folders."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from tests.helpers.quantised import WEIGHTS, configured

NAMES = {
    "model.embed_tokens": "token_embd", "lm_head": "output", "model.norm": "output_norm", "model.layers.": "blk.",
    "input_layernorm": "attn_norm", "post_attention_layernorm": "ffn_norm", "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k", "self_attn.v_proj": "attn_v", "self_attn.o_proj": "attn_output",
    "mlp.gate_proj": "ffn_gate", "mlp.up_proj": "ffn_up", "mlp.down_proj": "ffn_down",
}  # fmt: skip


def settings(writer: Any, folder: Path) -> None:
    """What a file says of its model and its tokenizer."""
    transformers = pytest.importorskip("transformers")
    config = transformers.AutoConfig.from_pretrained(folder)
    writer.add_vocab_size(config.vocab_size)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(10_000.0)
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    known = tokenizer.convert_ids_to_tokens(range(len(tokenizer)))
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("llama-bpe")
    writer.add_token_list([*known, *(f"[unused{i}]" for i in range(config.vocab_size - len(known)))])
    merges = tokenizer.backend_tokenizer.to_str()
    writer.add_token_merges([" ".join(pair) for pair in json.loads(merges)["model"]["merges"]])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_pad_token_id(0)


def written(folder: Path, out: Path, stored: str = "Q8_0") -> Path:
    """A Llama in some type as llama.cpp writes it, and the numbers that it stands for (`out.plain`, a folder)."""
    gguf = pytest.importorskip("gguf", reason="gguf is not installed")
    transformers = pytest.importorskip("transformers")
    kind = gguf.GGMLQuantizationType[stored]
    heads = transformers.AutoConfig.from_pretrained(folder)
    writer, plain = gguf.GGUFWriter(str(out), "llama"), {}
    settings(writer, folder)
    for name, value in load_file(folder / WEIGHTS).items():
        called = name
        for ours, theirs in NAMES.items():
            called = called.replace(ours, theirs)
        if value.ndim == 1:
            writer.add_tensor(called, value.numpy())
            plain[name] = value
            continue
        plain[name] = torch.from_numpy(gguf.quants.dequantize(gguf.quants.quantize(value.numpy(), kind), kind))
        count = {"q_proj": heads.num_attention_heads, "k_proj": heads.num_key_value_heads}.get(name.split(".")[-2])
        if count is not None:  # the halves of a head take turns, as llama.cpp turns them
            rows, columns = value.shape
            value = value.reshape(count, 2, rows // count // 2, columns).transpose(1, 2).reshape(rows, columns)
        writer.add_tensor(called, gguf.quants.quantize(value.contiguous().numpy(), kind), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    same_words = configured(folder, out.with_suffix(".plain"), None, {n: v.contiguous() for n, v in plain.items()})
    transformers.AutoTokenizer.from_pretrained(out.parent, gguf_file=out.name).save_pretrained(same_words)
    return out
