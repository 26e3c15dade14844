"""Put the tables of benchmarks/results into README and docs, between `<!-- NAME -->` and `<!-- end NAME -->`.

    python benchmarks/shared/pages.py [--check]

NAME is a Markdown file of the results. Nothing is measured here. `--check` writes nothing and exits with 1 where a page
is not what the results say.
"""

from __future__ import annotations

import argparse
import re
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))

from benchmarks.shared import common

PAGES = [common.ROOT / "README.md", *sorted((common.ROOT / "docs").rglob("*.md"))]


def with_tables(text: str) -> str:
    def put(found: re.Match[str]) -> str:
        path = common.RESULTS / f"{found[1]}.md"
        return (
            f"<!-- {found[1]} -->\n{path.read_text().strip()}\n<!-- end {found[1]} -->" if path.exists() else found[0]
        )

    return re.sub(r"<!-- ([\w-]+) -->\n.*?<!-- end \1 -->", put, text, flags=re.S)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="write nothing, fail where a page is old")
    old = {page: text for page in PAGES if (text := with_tables(page.read_text())) != page.read_text()}
    if parser.parse_args().check:
        sys.exit(f"old tables in {', '.join(page.name for page in old)}: run {sys.argv[0]}" if old else 0)
    for page, text in old.items():
        page.write_text(text)


if __name__ == "__main__":
    main()
