"""Sites behind wrappers, and packed matrices that are not three equal parts."""

from __future__ import annotations

from torch import nn

from taskferry.layers.discovery import find_sites
from tests.helpers.tiny import TINY, hf


def test_wrappers_do_not_hide_heads() -> None:
    wrapped = nn.ModuleDict({"module": TINY["llama"].model(16, 1, 0)})
    wrapped.config = wrapped["module"].config  # type: ignore[assignment]
    head = next(site for site in find_sites(wrapped) if site.name.endswith("lm_head"))
    assert head.fixed is not None


def test_multi_query_attention_is_not_cut_in_thirds() -> None:
    model = hf("GPTBigCodeForCausalLM", 24, 1, n_embd=24, n_head=4, n_layer=1, vocab_size=40)
    packed = [site for site in find_sites(model) if "c_attn" in site.name]
    assert [site.rows for site in packed] == [(0, 24), (24, 30), (30, 36)]
    phi = hf("Phi3ForCausalLM", 16, 1, vocab_size=40, num_key_value_heads=2, pad_token_id=0)
    assert {s.role: s.rows for s in find_sites(phi) if s.block is not None} == {
        "attn.q": (0, 16), "attn.k": (16, 24), "attn.v": (24, 32), "attn.o": None,
        "mlp.gate": (0, 32), "mlp.up": (32, 64), "mlp.down": None,
    }  # fmt: skip
