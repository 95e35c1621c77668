"""Words of the documentation: `python .ci/count_docs.py [--pages]`.

Counted apart: pages in docs/benchmarks, and on the others the tables that are written from results.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path

DOCS = Path(__file__).parents[1] / "docs"
GENERATED = re.compile(r"<!-- benchmarks:.*?<!-- /benchmarks -->", re.DOTALL)


def main(pages: bool) -> None:
    """Print the sums, and on request a line for each page."""
    written = tables = generated = 0
    for page in sorted(DOCS.rglob("*.md")):
        text = page.read_text(encoding="utf-8")
        mine = "" if page.parent.name == "benchmarks" else GENERATED.sub("", text)
        rows = [line for line in mine.splitlines() if line.lstrip().startswith("|")]
        in_tables = len(" ".join(rows).split())
        written += len(mine.split())
        tables += in_tables
        generated += len(text.split()) - len(mine.split())
        if pages:
            print(f"{len(mine.split()):6} ({in_tables} in tables)  {page.relative_to(DOCS)}")
    print(f"{written} words, {tables} of them in tables; benchmark pages and tables: {generated}")


if __name__ == "__main__":
    main("--pages" in sys.argv[1:])
