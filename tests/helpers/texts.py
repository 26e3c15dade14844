"""A dozen pairs of sentences, and tokenizers that were made of them."""

from __future__ import annotations

import re
from typing import Any

import pytest

TEXTS = [
    "The ferry leaves the harbour at dawn.",
    "Nobody expected such a long crossing, unfortunately.",
    "Rain fell on the quay all night.",
    "A lighthouse keeper waved to the passengers.",
] * 3
SECOND = ["It was still dark.", "They had no provisions.", "The deck was slippery.", "He was happy."] * 3


def _pieces(special: list[str]) -> dict[str, int]:
    """A vocabulary of letters, letters within words, and every other word.

    Not by the library's trainer: it breaks ties by the order of a hash that differs from process to process.
    """
    words = {word for text in [*TEXTS, *SECOND] for word in re.findall(r"\w+|[^\w\s]", text.lower())}
    letters = sorted(set("".join(words)))
    pieces = dict.fromkeys([*special, *letters, *(f"##{letter}" for letter in letters), *sorted(words)[::2]])
    return {piece: i for i, piece in enumerate(pieces)}


def train(kind: str) -> Any:
    """A real fast tokenizer of a kind, word pieces or bytes, made of a few sentences and the same in every process."""
    tokenizers = pytest.importorskip("tokenizers")
    transformers = pytest.importorskip("transformers")
    special = ["<pad>", "<s>", "</s>", "<unk>"]
    if kind == "pieces":
        model = tokenizers.Tokenizer(tokenizers.models.WordPiece(_pieces(special), unk_token="<unk>"))
        model.normalizer = tokenizers.normalizers.BertNormalizer()
        model.pre_tokenizer = tokenizers.pre_tokenizers.BertPreTokenizer()
        model.decoder = tokenizers.decoders.WordPiece()
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
