"""A dozen pairs of sentences, and tokenizers that were trained on them."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import Any

import pytest

from taskferry import Calibration
from taskferry.calibration.language import Segment, language_calibration

TEXTS = [
    "The ferry leaves the harbour at dawn.",
    "Nobody expected such a long crossing, unfortunately.",
    "Rain fell on the quay all night.",
    "A lighthouse keeper waved to the passengers.",
] * 3
WORDS = ("a film", "it", "the speech", "one", "an old letter", "we", "all of them")
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


def prompts(micro_batch: int = 4, words: Sequence[str] = WORDS) -> Calibration:
    """A question about each word with its answer, by two tokenizers."""
    rows = [
        [Segment(f"Question: is {word} long?\nAnswer:", counted=False), Segment(" yes" if len(word) > 4 else " no")]
        for word in words
    ]
    return language_calibration(rows, *_both(), micro_batch=micro_batch)


@cache
def _both() -> tuple[Any, Any]:
    """Two tokenizers, the same for all samples: training breaks ties in another order each time."""
    return train("bytes"), train("pieces")
