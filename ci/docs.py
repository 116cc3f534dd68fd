"""Make the tables of docs/ from the result files, and check every link of the written pages.

    python ci/docs.py            write docs/benchmarks.md
    python ci/docs.py --check    write nothing; a line for each stale page and broken link, exit status 1

A result file is docs/benchmarks/<topic>-<gpu or cpu>.json, as `multigemm bench --json` writes it; where
there is one, the front has to be installed, since its own `bench --table` prints the table.
"""

from __future__ import annotations

import argparse
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs" / "benchmarks.md"
INTRODUCTION = """# Benchmarks

<!-- Generated from docs/benchmarks/*.json by ci/docs.py; do not edit. -->

Times are medians in milliseconds. The floor of a case is the larger of its FLOPs over the rate of a dense
product, and its bytes over the rate of a copy; both rates are measured in the same run. Every timed result
is checked against a reference in higher precision in the same run; the error is relative.
"""
EMPTY = "\nNo result file has been committed yet. `nox -s bench` measures this machine.\n"


def section(result: Path) -> str:
    """Return the section of one result file: its tables come from the command that wrote it."""
    command = [sys.executable, "-m", "multigemm", "bench", "--table", str(result)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"{' '.join(command)} failed:\n{done.stdout}{done.stderr}")
    return f"\n## {result.stem}\n\n{done.stdout.strip()}\n"


def page() -> str:
    """Return the whole of docs/benchmarks.md."""
    sections = [section(result) for result in sorted((ROOT / "docs" / "benchmarks").glob("*.json"))]
    return INTRODUCTION + ("".join(sections) or EMPTY)


def broken_links() -> Iterator[str]:
    """Yield a line for each link within the repository that leads nowhere."""
    pages = [*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md"), *(ROOT / "packages").glob("*/README.md")]
    for file in sorted(pages):
        text = re.sub(r"```.*?```", "", file.read_text(encoding="utf-8"), flags=re.DOTALL)
        for target in re.findall(r"\]\(([^)\s]+)\)", text):
            path, _, anchor = target.partition("#")
            if ":" in path:
                continue
            aim = (file.parent / path).resolve() if path else file
            if not aim.exists():
                yield f"{file.relative_to(ROOT)}: {target} does not exist"
            elif anchor and aim.suffix == ".md" and anchor not in anchors(aim):
                yield f"{file.relative_to(ROOT)}: {target} has no such heading"


def anchors(file: Path) -> set[str]:
    """Return the anchors of a page's headings, as hosts of Markdown make them."""
    headings = re.findall(r"^#+ (.+)$", file.read_text(encoding="utf-8"), flags=re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", h.lower()).strip().replace(" ", "-") for h in headings}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--check", action="store_true", help="write nothing, fail when the page is stale")
    check, text, found = parser.parse_args().check, page(), []
    if not PAGE.exists() or PAGE.read_text(encoding="utf-8") != text:
        if check:
            found.append(f"{PAGE.relative_to(ROOT)} is stale: run `nox -s docs`")
        else:
            PAGE.write_text(text, encoding="utf-8")
            print(f"wrote {PAGE.relative_to(ROOT)}")
    found += broken_links()
    print("\n".join(found) if found else "docs: tables are fresh, links lead somewhere")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
