"""Refuse words that docs/glossary.md refuses, in the code and its pages.

`python scripts/check_words.py` prints `file:line: word; say: term` for each and exits with 1.
`--summary` prints counts by word. The lists are the glossary's own tables: the column
"do not say" (words in code marks), and the table under "Allowed in".
"""

from __future__ import annotations

import argparse
import re
import sys
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator

ROOT = Path(__file__).resolve().parents[1]
GLOSSARY = Path("docs/glossary.md")
_CODE = re.compile(r"`([^`]+)`")
_TEST = re.compile(r"tests/[^\s`]*")  # pages name tests as they are called
_WORD = re.compile(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+")


@dataclass(frozen=True, slots=True)
class Glossary:
    """`terms` maps each refused word, lower case, to what to say; `allowed` are phrases."""

    terms: dict[str, str]
    allowed: tuple[str, ...]

    @classmethod
    def read(cls, text: str) -> Glossary:
        """Read the tables of the glossary's text."""
        terms: dict[str, str] = {}
        allowed: list[str] = []
        header: list[str] = []
        for line in text.splitlines():
            if not line.startswith("|"):
                header = []
                continue
            cells = [cell.strip() for cell in line.strip().strip("|").split("|")]
            if not header:
                header = cells
            elif header[-1] == "do not say":
                terms |= {split_words(word): cells[0] for word in _CODE.findall(cells[-1])}
            elif header[0] == "phrase":
                allowed += [split_words(word) for word in _CODE.findall(cells[0])]
        return cls(terms, tuple(allowed))

    def find(self, text: str) -> Iterator[tuple[int, str]]:
        """Line numbers, from 1, and the refused words on them."""
        longest_first = sorted(self.terms, key=len, reverse=True)
        refused = re.compile(rf"\b({'|'.join(longest_first)})\b")
        for number, line in enumerate(text.splitlines(), start=1):
            words = split_words(_TEST.sub("", line))
            for phrase in self.allowed:
                words = re.sub(rf"\b{phrase}\b", "", words)
            for match in refused.finditer(words):
                yield number, match[0]


def split_words(text: str) -> str:
    """Lower-case words with one space between; `snake_case` and `CamelCase` are taken apart."""
    return " ".join(_WORD.findall(text)).lower()


def list_files(root: Path) -> list[Path]:
    """What is checked: the code, its pages and the README, but no decisions and no glossary."""
    pages = [
        page for page in (root / "docs").rglob("*.md") if root / "docs/adr" not in page.parents
    ]
    files = {root / "README.md", *(root / "src").rglob("*.py"), *pages} - {root / GLOSSARY}
    return sorted(files)


def main() -> int:
    """Check the tree; 1 if a word is refused."""
    parser = argparse.ArgumentParser(description="Refuse the words that docs/glossary.md refuses.")
    parser.add_argument("--summary", action="store_true", help="counts by word, not each place")
    parser.add_argument("files", nargs="*", type=Path, help="only these; by default all")
    arguments = parser.parse_args()
    glossary = Glossary.read((ROOT / GLOSSARY).read_text())
    counts: Counter[str] = Counter()
    for file in arguments.files or list_files(ROOT):
        for number, word in glossary.find(file.read_text()):
            counts[word] += 1
            if not arguments.summary:
                path = file.resolve().relative_to(ROOT)
                print(f"{path}:{number}: {word}; say: {glossary.terms[word]}")
    if arguments.summary:
        for word, count in counts.most_common():
            print(f"{count:6} {word}; say: {glossary.terms[word]}")
    if counts:
        print(f"{counts.total()} refused words; {GLOSSARY} lists what to write.", file=sys.stderr)
    return int(bool(counts))


if __name__ == "__main__":
    sys.exit(main())
