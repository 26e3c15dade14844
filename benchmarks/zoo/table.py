"""The table of the zoo: what each row recovers of the oracle's gain, and the CPU-seconds that it takes.

    python benchmarks/zoo/table.py [--quick] [--json benchmarks/results/zoo.json] [--pairs A:B …] [--tasks NAME …]
        [--counts N …] [--seeds N] [--rows ROW …]

Four small image-text models, seven pairs, four tasks that no setting was chosen on; each row alone, in one thread.

Bound: no row at its best scale, and no natural one, is below the target by more than a point on a pair with a task, in
the mean over its draws.
"""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))

from benchmarks.shared import cells, common, tables
from benchmarks.shared.rows import ROWS

WORST = -1.0  # points


def main() -> None:
    parser = common.parser(__doc__)
    cells.add_options(parser)
    options = parser.parse_args()
    _, done = cells.run_named("zoo/frontier", options)
    text = tables.summary(done)
    print(f"{text}\n\n{tables.scores(done)}")
    if options.json is not None:
        options.json.with_suffix(".md").write_text(text + "\n")
    failures = []
    for count in sorted({key.count for key in tables.keyed(done)}, key=int):
        some = {key: cell for key, cell in tables.keyed(done).items() if key.count == count}
        for name in (name for name, row in ROWS.items() if row.scale == "auto"):
            found = tables.summed(some, name)
            if found is not None and found.least < WORST:
                failures.append(f"{name}, {count} samples: {found.least:+.1f} points on {found.worst}")
    for failure in failures:
        print("missed:", failure)
    sys.exit(1 if failures and not options.quick else 0)


if __name__ == "__main__":
    main()
