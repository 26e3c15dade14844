"""A dozen pairs of sentences, and tokenizers that were trained on them."""

from __future__ import annotations

from typing import Any

import pytest

TEXTS = [
    "The ferry leaves the harbour at dawn.",
    "Nobody expected such a long crossing, unfortunately.",
    "Rain fell on the quay all night.",
    "A lighthouse keeper waved to the passengers.",
] * 3
SECOND = ["It was still dark.", "They had no provisions.", "The deck was slippery.", "He was happy."] * 3


def train(kind: str) -> Any:
    """A real fast tokenizer of a kind, trained on a few sentences: word pieces, or bytes."""
    tokenizers = pytest.importorskip("tokenizers")
    transformers = pytest.importorskip("transformers")
    special = ["<pad>", "<s>", "</s>", "<unk>"]
    if kind == "pieces":
        model = tokenizers.Tokenizer(tokenizers.models.WordPiece(unk_token="<unk>"))
        model.normalizer = tokenizers.normalizers.BertNormalizer()
        model.pre_tokenizer = tokenizers.pre_tokenizers.BertPreTokenizer()
        model.decoder = tokenizers.decoders.WordPiece()
        trainer = tokenizers.trainers.WordPieceTrainer(vocab_size=90, special_tokens=special)
    else:
        model = tokenizers.Tokenizer(tokenizers.models.BPE())
        model.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
        model.decoder = tokenizers.decoders.ByteLevel()
        alphabet = tokenizers.pre_tokenizers.ByteLevel.alphabet()
        trainer = tokenizers.trainers.BpeTrainer(vocab_size=330, special_tokens=special, initial_alphabet=alphabet)
    model.train_from_iterator([*TEXTS, *SECOND], trainer)
    model.post_processor = tokenizers.processors.TemplateProcessing(
        single="<s> $A </s>", pair="<s> $A </s> $B:1 </s>:1", special_tokens=[("<s>", 1), ("</s>", 2)]
    )
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=model, pad_token="<pad>", bos_token="<s>", eos_token="</s>", unk_token="<unk>"
    )
