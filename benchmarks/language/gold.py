"""trl's distillation between two vocabularies (GOLD), as a row: what a user would take instead."""

from __future__ import annotations

from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch

from taskferry import TaskVector, load_tuned
from taskferry.collect.scale import moved_by
from taskferry.models import Loaded
from taskferry.objectives.preparation import Prepared

GOLD = {f"GOLD, {steps} steps": steps for steps in (10, 30, 100)}


def gold(
    A: Loaded, B: Loaded, tau: TaskVector, prepared: Prepared, lora: dict[str, Any], protocol: dict[str, Any]
) -> TaskVector:
    """Train a new LoRA of the target towards the tuned source on the calibration samples, with their answers."""
    import datasets
    import peft
    from trl.experimental.gold import GOLDConfig, GOLDTrainer

    assert prepared.questions is not None
    rows = [
        {"prompt": "".join(part.text for part in sample[:-1]), "completion": sample[-1].text}
        if sample[0].role is None
        else {"prompt": [{"role": part.role, "content": part.text} for part in sample[:-1]],
              "completion": [{"role": sample[-1].role, "content": sample[-1].text}]}
        for sample in prepared.questions.samples
    ]  # fmt: skip
    torch.manual_seed(0)
    student = peft.get_peft_model(B.model, peft.LoraConfig(**lora))
    with TemporaryDirectory() as scratch, moved_by(A.model, tau) as at:
        at(1.0)
        arguments = GOLDConfig(output_dir=scratch, lmbda=0.0, use_uld_loss=True, teacher_tokenizer_name_or_path=A.given,
                               **protocol)  # fmt: skip
        trainer = GOLDTrainer(student, A.model, arguments, train_dataset=datasets.Dataset.from_list(rows),
                              processing_class=B.tokenizer())  # fmt: skip
        trainer.train()
        student.save_pretrained(Path(scratch, "lora"))
        student.unload()
        for loaded in (A, B):
            loaded.model.eval().requires_grad_(True)
        return load_tuned(str(Path(scratch, "lora")), B).tau
