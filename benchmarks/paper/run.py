"""The paper's tables, from recipes: fine-tune, draw calibration samples, move by every row, score.

    python benchmarks/paper/run.py paper/table1 --device cuda [--json FILE]
    python benchmarks/paper/run.py zoo/table1 … [--json benchmarks/results/paper.json]

`paper/*` name the OpenCLIP and T5 checkpoints and the data sets of the paper: they want a GPU and their downloads.
`zoo/*` are the same tables on the zoo, `real/*` on published small encoders (the shared folder). A run goes on where
an earlier one stopped, and several processes may share a JSON file. `--quick` is one cell of short fine-tunes.
"""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))

from benchmarks.shared import cells, common, tables


def main() -> None:
    parser = common.parser(__doc__)
    parser.add_argument("recipes", nargs="+", help="tables in benchmarks/paper/recipes")
    cells.add_options(parser)
    options = parser.parse_args()
    for name in options.recipes:
        recipe, done = cells.run_named(name, options)
        print(f"\n{recipe.title}\n\n{tables.scores(done)}\n\n{tables.summary(done)}\n", flush=True)
    if options.json is not None:
        options.json.with_suffix(".md").write_text(tables.scores(common.keep(options.json, {})) + "\n")


if __name__ == "__main__":
    main()
