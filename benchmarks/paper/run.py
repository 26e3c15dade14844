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
from benchmarks.zoo import zoo_data, zoo_tasks


def main() -> None:
    parser = common.parser(__doc__)
    parser.add_argument("recipes", nargs="+", help="tables in benchmarks/paper/recipes")
    parser.add_argument("--models", type=Path, help="the folder of models; the zoo's or the shared one by default")
    parser.add_argument("--data", type=Path, help="the folder of data sets")
    parser.add_argument("--device", default="cpu")
    cells.add_options(parser)
    options = parser.parse_args()
    for name in options.recipes:
        recipe = cells.narrowed(cells.load_recipe(name), options)
        if name.startswith("zoo/"):
            for task in recipe.tasks:
                zoo_tasks.write(task, common.DATA / "tasks")
            places = cells.Places(zoo_data.ZOO, common.DATA / "tasks")
        else:
            shared = common.SHARED
            places = cells.Places(options.models or shared / "models", options.data or shared / "data",
                                  device=options.device)  # fmt: skip
        done = cells.run_recipe(recipe, places, options)
        print(f"\n{recipe.title}\n\n{tables.scores(done)}\n\n{tables.summary(done)}\n", flush=True)
    if options.json is not None:
        options.json.with_suffix(".md").write_text(tables.scores(common.keep(options.json, {})) + "\n")


if __name__ == "__main__":
    main()
