"""Real encoders, scored by a probe on the calibration samples: what each row recovers, and what it takes.

    python benchmarks/encoders/run.py [--quick] [--json benchmarks/results/encoders.json] [--recipes NAME …]
        [--pairs A:B …] [--tasks NAME …] [--counts N …] [--seeds N] [--rows ROW …]

`real/text`: MiniLM-L6, MiniLM-L3 and gte-small on sentence tasks; `real/vision`: deit-tiny to vit-tiny. Published
models and data of the shared folder. Sources and oracles learn from thousands of samples; every row of the target has a
probe that is fitted on the same hundred.
"""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))

from benchmarks.shared import cells, common, tables


def main() -> None:
    parser = common.parser(__doc__)
    parser.add_argument("--recipes", nargs="+", default=["real/text", "real/vision"])
    cells.add_options(parser)
    options, texts = parser.parse_args(), []
    for name in options.recipes[:1] if options.quick else options.recipes:
        recipe, done = cells.run_named(name, options)
        texts.append(f"{recipe.title}\n\n{tables.summary(done)}")
        print(f"{texts[-1]}\n\n{tables.scores(done)}", flush=True)
    if options.json is not None:
        options.json.with_suffix(".md").write_text("\n\n".join(texts) + "\n")


if __name__ == "__main__":
    main()
