"""A LoRA on relatives of its base: the copy, its best scale, and what learns, beside how near the two bases are.

    python benchmarks/relatives/run.py [--quick] [--json benchmarks/results/relatives.json] [--base FOLDER]
        [--lora FOLDER] [--steps N …] [--targets NAME …] [--questions N] [--rows ROW …] [--shown]

The relatives are made here and kept in the folder of TASKFERRY_BENCH_DATA: the base after N steps of continued
pre-training of all weights on news and messages, and the base with its blocks rounded to 4 bits. The LoRA sorts the
questions of TREC; answers are generated. Every row is kept when it is done, and a run goes on where one stopped.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2]))

import torch
from torch import Tensor

from benchmarks.language.run import HOME, SMOL
from benchmarks.language.tasks import BATCH, LENGTH, TASKS
from benchmarks.shared import common
from benchmarks.shared.rows import ROWS, run_rows
from taskferry import TaskVector, load_model, load_samples, load_tuned
from taskferry.config import CalibrationSettings
from taskferry.methods.distil import STRENGTHS
from taskferry.methods.natural import mean_loss
from taskferry.models import Loaded
from taskferry.nearness import nearness
from taskferry.objectives.preparation import Prepared, prepare
from taskferry.objectives.teacher import lesson_of

SHOWN = ("copied", "copied, best scale", "default", "copied, distil, 40 steps", "distil, 40 steps", "BiCo, best scale")
TEXTS = ("ag_news", "emotion")  # what pre-training goes on with
RATE, WARMUP, SEQUENCES, TOKENS = 3e-4, 10, 4, 64  # of AdamW; texts of a step, and their length
GROUP, LEVELS = 64, 7  # weights that share a scale in 4 bits; steps on either side of zero


def text_tokens(base: Loaded, seed: int) -> Iterator[Tensor]:
    """Batches of tokens: the texts in a random order, one behind another, without an end."""
    texts = [row["text"] for name in TEXTS
             for row in load_samples(str(common.need_shared() / "data" / name), split="train").rows]  # fmt: skip
    generator, tokens, end = torch.Generator().manual_seed(seed), [], base.tokenizer().eos_token_id
    size = SEQUENCES * TOKENS
    while True:
        for i in torch.randperm(len(texts), generator=generator).tolist():
            tokens += [*base.tokenizer()(texts[i], add_special_tokens=False)["input_ids"], end]
            if len(tokens) >= size:
                yield torch.tensor(tokens[:size]).view(SEQUENCES, TOKENS)
                tokens = tokens[size:]


def continued(given: Path, folder: Path, steps: list[int]) -> dict[str, Path]:
    """Go on with the pre-training of a base on other text; its states after so many steps, all of one run."""
    made = {f"{count} steps of pre-training": folder / f"{given.name}-news-{count}" for count in sorted(steps)}
    if all(path.exists() for path in made.values()):
        return made
    base = load_model(str(given))
    weights = base.model.requires_grad_(True).train().parameters()
    optimiser = torch.optim.AdamW(weights, lr=RATE, betas=(0.9, 0.95), weight_decay=0.0)
    for step, tokens in zip(range(1, max(steps) + 1), text_tokens(base, 0), strict=False):
        with torch.autocast("cpu", torch.bfloat16):
            loss = base.model(input_ids=tokens, labels=tokens).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(base.model.parameters(), 1.0)
        optimiser.param_groups[0]["lr"] = RATE * min(1.0, step / WARMUP)
        optimiser.step()
        optimiser.zero_grad()
        if step in steps:
            print(f"step {step}: loss {loss.item():.3f}, {time.process_time():.0f} CPU-seconds", flush=True)
            save(base, made[f"{step} steps of pre-training"])
    return made


def rounded(given: Path, folder: Path) -> dict[str, Path]:
    """Round every matrix of the blocks to 4 bits, a scale for each group of weights, and write it in 16 bits again."""
    out = folder / f"{given.name}-4-bit"
    if not out.exists():
        base = load_model(str(given))
        for name, weight in base.model.named_parameters():
            if weight.ndim == 2 and any(part.isdigit() for part in name.split(".")):
                groups = weight.data.view(-1, GROUP)
                unit = (groups.abs().amax(1, keepdim=True) / LEVELS).clamp_min(1e-12)
                groups.copy_((groups / unit).round() * unit)
        save(base, out)
    return {"rounded to 4 bits": out}


def save(base: Loaded, out: Path) -> None:
    """Write the model and its tokenizer, in 16 bits."""
    part = out.with_name(f"{out.name}.part")
    base.model.save_pretrained(part, state_dict={name: t.half() for name, t in base.model.state_dict().items()})
    base.tokenizer().save_pretrained(part)
    part.rename(out)


def held_out_losses(models: tuple[Loaded, Loaded], change: TaskVector, prepared: Prepared) -> dict[str, float]:
    """Losses towards the tuned source's answers on the samples held out: untouched, copied, and the lowest there is."""
    bases, held_out = (models[0].model, models[1].model), prepared.calibration.split(0)[1]
    lesson = lesson_of(bases, change, held_out, prepared.objectives)
    losses = {scale: mean_loss(bases[1], lesson, scale * change) for scale in (0.0, *STRENGTHS)}
    return {"untouched": losses[0.0], "copied": losses[1.0], "best copy": min(losses.values()), "floor": lesson.floor}


def run_cell(
    models: tuple[Loaded, Loaded], lora: Path, questions: int, samples: int, rows: list[str], known: dict[str, Any]
) -> Iterator[str]:
    """Run every row that is not known yet; yields after each."""
    A, B = models
    change = load_tuned(str(lora), A)
    test = TASKS["trec"].questions(questions)
    if "nearness" not in known:
        norms = {name: float(delta.norm()) for name, delta in change.tau.deltas.items()}
        near = nearness(A.folder, B.folder, norms)
        known["nearness"] = {"relation": near.relation, **near.total}
        known["target facts"] = TASKS["trec"].score(B, test, TaskVector({}))
        known["target"] = known["target facts"]["score"]
    settings = CalibrationSettings(calibration="trec", samples=samples, micro_batch=BATCH, max_length=LENGTH)
    prepared = prepare(settings, A, B, change, samples=TASKS["trec"].samples("train"))
    if "held out" not in known:
        known["held out"] = held_out_losses(models, change.tau, prepared)

    def score(added: TaskVector) -> dict[str, float]:
        return TASKS["trec"].score(B, test, added)

    found = known.setdefault("rows", {})
    yield from run_rows((A.model, B.model), change.tau, prepared, rows, score, found)


def table(cells: dict[str, Any]) -> str:
    """One line a relative, the nearest first; CPU-seconds in brackets."""
    lines = []
    for name, cell in sorted(cells.items(), key=lambda item: item[1].get("nearness", {}).get("distance", 0.0)):
        if name == "source":
            continue
        near, run = cell["nearness"], [cell["rows"].get(row, {}) for row in SHOWN]
        shown = [f"{facts['score']:.1f} ({facts['cpu']:.0f})" if "score" in facts else "" for facts in run]
        closed = share_closed(cell["held out"], "best copy")
        lines.append([name, f"{near['distance']:.1%}", f"{near['cosine']:.3f}", f"{near['to_change']:.2g}",
                      f"{closed:.0%}", f"{cell['target']:.1f}", *shown])  # fmt: skip
    header = ["target", "apart", "cosine", "apart / change", "gap closed by the copy", "untouched", *SHOWN]
    source = f"{cells['source']['score']:.1f}"
    title = f"Right answers in % (CPU-seconds), 100 samples of TREC; the tuned source on its own base has {source}."
    return f"{title}\n\n{common.table(header, lines)}"


def share_closed(losses: dict[str, float], which: str) -> float:
    """Share of the held-out loss between the untouched target and the entropy of the answers that is gone."""
    return (losses["untouched"] - losses[which]) / (losses["untouched"] - losses["floor"])


def main() -> None:
    parser = common.parser(__doc__)
    parser.add_argument("--base", type=Path, default=HOME / SMOL)
    parser.add_argument("--lora", type=Path, default=common.DATA / "language" / f"{SMOL}-trec-120-sft")
    parser.add_argument("--steps", nargs="*", type=int, default=[30, 100, 300], help="of continued pre-training")
    parser.add_argument("--targets", nargs="+", metavar="NAME", help="the lines of the table to run (default: all)")
    parser.add_argument("--questions", type=int, default=200)
    parser.add_argument("--rows", nargs="+", choices=ROWS, default=list(SHOWN), metavar="ROW")
    parser.add_argument("--shown", action="store_true", help="run nothing: the table of what earlier runs finished")
    options = parser.parse_args()
    torch.set_num_threads(1)
    folder, samples = common.DATA / ("relatives-quick" if options.quick else "relatives"), 100
    if options.quick:
        from taskferry.example import FILES

        options.base, options.lora, options.steps = FILES / "base-a", FILES / "my-lora", [2]
        options.questions, samples, options.rows = 20, 20, ["copied", "copied, best scale"]
    folder.mkdir(parents=True, exist_ok=True)
    cells = common.keep(options.json, {})
    if not options.shown:
        A = load_model(str(options.base))
        if "source" not in cells:
            change = load_tuned(str(options.lora), A).tau
            cells["source"] = TASKS["trec"].score(A, TASKS["trec"].questions(options.questions), change)
            common.keep(options.json, cells)
        made = continued(options.base, folder, options.steps) if options.steps else {}
        for name, path in {**made, **rounded(options.base, folder)}.items():
            if name not in (options.targets or [name]):
                continue
            known = cells.setdefault(name, {})
            models = A, load_model(str(path))
            for row in run_cell(models, options.lora, options.questions, samples, options.rows, known):
                common.keep(options.json, {name: known})
                print(name, row, known["rows"][row], flush=True)
        print(f"{time.process_time():.0f} CPU-seconds", flush=True)
    text = table(cells)
    print(text)
    if options.json is not None:
        options.json.with_suffix(".md").write_text(f"{text}\n")


if __name__ == "__main__":
    main()
