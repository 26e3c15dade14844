"""The sections of docs/results-tables.md whose tables a benchmark writes as they are: a title, and what was measured.

In the order of the page. `results.py` adds the command, the time that it took, and the table.
"""

SECTIONS: dict[str, tuple[str, str]] = {
    "frontier": (
        "Quality against cost",
        """What each row recovers, and what it takes: CPU-seconds of one thread, and passes over the samples (a
forward with a backward is one, a forward alone a third). The parts of the default are added one after the other. Rows
that train stand beside them, because that is what a user would do instead: few-shot tuning with the true labels, and
refining towards the tuned source, which needs none (`--refine`); from scratch and from what was moved. Fine-tunes of
150 steps. A share is the sum of the gains over the cells, over the sum of the oracle's; a cell is a pair, a task and
a draw. Rows that train were run in fewer cells: compare rows with the same number of them; the figures draw the cells
that all rows share. The first table has share by training steps, CPU-seconds in brackets, on all pairs of the zoo
that were run. *Least gain* is that of the worst pair and task, in points over the target; the second table has it for
every row that chooses its scale, with the cell where it is. The new tasks (traffic signs, textures) and the new pair
(deep → wide) are held out: nothing was ever chosen on them.""",
    ),
    "beyond": (
        "Beyond the paper",
        """An earlier form of `twofold`, before its scales were judged on held-out folds and before efforts, with
what is now `--effort thorough`, beside BiCo: whitened gradients of one length, a second capture
halfway, three augmented views of each image labelled by the tuned source, a scale for each role of
layer, the target's own patch embedding; nothing is trained. It was chosen on mnist, fashion and
drawings (the tables below); an earlier form of it had been scored on the other four tasks, which are
shown here, on as many draws, pairs and tasks as each row says, 100 samples unless N says otherwise. The
goals that were set for it, 65 % with 100 samples and 70 % with 400, are missed. *Teacher* has no labels
but the tuned source's. *Least gain* is the worst of all pairs and tasks, in points over the unchanged
target. Where rows of `distil` are shown: they train (100 steps towards the tuned source's outputs), so
they are no replacement where nothing may be trained. The table above has today's default.""",
    ),
    "ideas": (
        "What was tried beyond the paper",
        """One draw each, 100 samples, on the tasks that settings were chosen on (mnist, fashion, drawings) and four
pairs (narrow → wide, wide → narrow, twin → deep, deep → narrow); rows were run in as many of the twelve cells as the
last column says, and BiCo in the same cells stands beside them. Kept: whitened outputs of equal weight, the second
pass, augmented views of images, a scale for each role, and no patch embedding. Not kept, because they do not help or
no longer do beside those: soft and random labels, truncation and shrinkage by noise, regression in place of
isometries, whitened or centred inputs, one map along the residual stream, third and fourth passes, a scale for each
block or site, matching blocks by CKA, splitting or summing over blocks. The rows called *a limit* look at the
oracle's own change and are no method: with the right maps the form R_outᵀ τ R_in carries nearly all of the gain, so
what is missing is in the maps that activations and gradients of frozen models can tell.""",
    ),
    "warm_start": (
        "A warm start for fine-tuning",
        """The target is tuned by the zoo's protocol on all training samples, from where it is and from what the
default method moved with 100 unlabelled samples; every ten steps the held-out tenth is scored. Columns of goals: steps
until so much of the cold start's gain is there, moved start / cold start. One task and one draw so far.""",
    ),
    "depth": (
        "Which block feeds which, where the truth is known",
        """Block i of MiniLM-L6 descends from block 2i of gte-small. Likeness of what the MLP reads, on 100 sentences;
the paper's rule, nearest in relative depth, is closest to the truth, and stays.""",
    ),
    "heads": (
        "Which loss gives an encoder's gradients",
        """BiCo at scale 1 with gradients of different losses, 100 samples; gain over the target, scored on
samples of the training set that the source never saw.""",
    ),
    "head": (
        "Does the task head of a classifier move too?",
        """A classifier's head on the target: moved by the map between what the two heads read of 100 samples, or fitted
to the labels of the same samples. all-MiniLM-L6-v2 to gte-small, accuracy on test data over three seeds, scale 1.""",
    ),
    "language_models": (
        "Real language models",
        """LoRAs of rank 8 on every projection, trained by trl on all samples of a task (so with the end of an answer),
moved between real language models of other families, with other tokenizers, widths and depths. A task is a question
whose answer is one of a few words, or an object in JSON, or a word in a chat, where the target is a base model without
a chat template. Answers are generated greedily (at most 16 tokens, 48 for JSON) to 400 other questions (200 for JSON);
one is right where it is the wanted one and the model ended it. The oracle is such a LoRA trained on the target, with
all samples. *Refined* rows train towards the tuned source without labels (`--refine`), *no move* from scratch. Costs
are CPU-seconds of one thread, beside other work, which makes them up to 1.7 times as many.""",
    ),
    "language_ideas": (
        "What makes right answers move between real language models",
        """On a task that nothing is reported on (emotion). A *limit* is no method: it looks at the oracle's own
change, or at the test questions. *Both maps from the oracle's own change* keeps only the singular values of the
source's change, which is all that two isometries leave of it: the form R_outᵀ τ R_in and the rank hold nothing back. A
better scale gives little, a better map on one side a part. So what limits the move are the maps of both sides, which
frozen models tell from their activations and gradients. Leaving the first third of the target's blocks as they are
moves more right answers here (and 52 % in place of 48 % in a second draw), and fewer on TREC (37 and 31 % in place of
56 and 34 %, two draws), so the default does not. 100 labelled samples, one draw; seconds are beside other work.
The script has more: where the second capture is taken, a third one, which tokens make the maps, scales by role.""",
    ),
    "causal": (
        "Causal language models",
        """LoRA adapters of a small Llama on three domains, moved to a larger one of the same tokenizer and to one with
a tokenizer of its own; all pre-trained here on film reviews. The share is of the loss that a LoRA trained on the target
takes away.""",
    ),
    "experts": (
        "A LoRA of experts",
        """A LoRA of the experts of a Mixtral (four experts, width 48) moved to a Qwen 3 MoE (four, width 64). Each was
trained for 300 steps on its own half of the passages of `taskferry example`; the LoRA learns text in capital letters.
64 samples, loss per token on capitals that nothing was trained on, one draw.""",
    ),
    "generated": (
        "No data at all: generated samples against real ones",
        """The LoRA of `taskferry example` moved to its second base on samples that the tuned source writes itself
(`--calibration generate`), and on real passages of its training text: loss per token of 200 passages of other books,
over three seeds, and in brackets the share of what real samples gain. The package has 128 real passages, which stand
for 400. Below it real language models with a LoRA on scripture, samples of 48 tokens, one draw: generated samples harm
there. The scale that is best on them is too large; at half of it, which `transfer` takes, the same maps help (rows
*at half of its scale*, where they were run). The bound, half of what real samples gain at 100, is missed there.""",
    ),
    "fleet_samples": (
        "Samples that the adapters of a fleet write",
        """Six LoRAs of the first base of `taskferry example`, one for each domain of text, moved to its second base by
BiCo at scale 1, by maps of different samples: loss per token of held-out text over three seeds, and the share of what
LoRAs trained on the second base take away, over all domains. General text is that of the bases' own training. The
texts of all six adapters in one capture are `fit --calibration generate --adapters FOLDER`.""",
    ),
    "anchors": (
        "Maps of general data, corrected by anchors",
        """A fleet without samples for each adapter fits its maps on other tasks. Here one of seven tasks is left out,
the maps are fitted on 100 samples of the other six in all, and K of these are anchors, whose changes are known on both
models: the maps turn towards what carries them over, with weight w (∞: the anchors alone). Scores at scale 1 and the
cosine with the change that the target really learns; planted rotations are found to rounding. One pair of the zoo, one
draw. Six anchors add less than the five points that were asked of them, so that they are no option.""",
    ),
    "pictures": (
        "No pictures of the task: those of another one",
        """Pictures of another task, labelled by the tuned source with the classes of its own task, beside the task's
own pictures with their labels and with the tuned source's. Two pairs of the zoo, four tasks, the default method; ± is
the standard deviation over draws.""",
    ),
    "half_precision": (
        "Weights in half precision",
        """How far maps, moved change and score lie from those of float32 where both models run in half precision. A
full fine-tune on TREC from all-MiniLM-L6-v2 to gte-small, 100 samples, one draw; maps and change by their norm, the
score by a head that is fitted on the same samples, on 500 others. The default in float16 was not measured.""",
    ),
}
