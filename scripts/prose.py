"""Check the prose of the repository: docstrings, comments and docs in plain English.

    python scripts/prose.py                       # a table; status 1 when a limit is exceeded
    python scripts/prose.py --list weft/kv        # where the worst places are

What is counted:

- pronouns (it, they, this, that, these, those, who, whose and the like) per 1,000 words of docstrings and of
  comments, because a repeated noun reads faster than a reference;
- words per sentence in Markdown pages, as the 90th percentile;
- functions with eight or more branches and a comment inside;
- docstrings starting with a subordinate clause (What, Whether, Of, That, Those, Likewise, All that).
"""

from __future__ import annotations

import argparse
import ast
import io
import re
import sys
import tokenize
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
CODE = ("weft", "testing", "tests", "bench", "training", "scripts")
PRODUCT = "weft"
MOST_PRONOUNS = 35
"""Pronouns per 1,000 words."""
MOST_OPENERS = 30
MOST_WORDS = 26
"""Words of a sentence, 90th percentile."""
LEAST_COMMENTED = 0.7
"""Share of the hard functions of the product."""
HARD = 8
"""Branches of a hard function."""

_PRONOUN = re.compile(
    r"\b(?:it|its|they|them|theirs?|this|that|these|those|who|whom|whose|itself|themselves)\b", re.IGNORECASE
)
_WORD = re.compile(r"[A-Za-z][A-Za-z'-]*")
_OPENER = re.compile(r"(?:What|Whether|Of|That|Those|Likewise|All that)\b")
_DIRECTIVE = re.compile(r"#\s*(?:type:|noqa|!)")
_SENTENCE = re.compile(r"(?<=[.!?])\s+|\n[*-] ")
_BRANCHES = (
    *(ast.If, ast.For, ast.AsyncFor, ast.While, ast.Try, ast.ExceptHandler, ast.With),
    *(ast.IfExp, ast.BoolOp, ast.comprehension, ast.Match),
)


@dataclass
class Counts:
    """Hold the counts of a tree of Python files, and the places that raise the counts."""

    docstring_words: int = 0
    docstring_pronouns: int = 0
    comment_words: int = 0
    comment_pronouns: int = 0
    openers: int = 0
    hard: int = 0
    commented: int = 0
    places: list[str] = field(default_factory=list)

    @property
    def docstrings(self) -> float:
        """Pronouns per 1,000 words of docstrings."""
        return 1000 * self.docstring_pronouns / max(1, self.docstring_words)

    @property
    def comments(self) -> float:
        """Pronouns per 1,000 words of comments."""
        return 1000 * self.comment_pronouns / max(1, self.comment_words)

    @property
    def share(self) -> float:
        """Share of the hard functions with a comment."""
        return self.commented / max(1, self.hard)

    def add(self, path: Path) -> None:
        """Count one file."""
        text = path.read_text(encoding="utf-8")
        tree = ast.parse(text)
        commented = self._add_comments(text)
        for node in ast.walk(tree):
            if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
                self._add_docstring(path, node)
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                self._add_function(path, node, commented)

    def _add_comments(self, text: str) -> set[int]:
        """Count all comments. Return the lines with a comment; directives for tools do not count."""
        lines = set()
        for token in tokenize.generate_tokens(io.StringIO(text).readline):
            if token.type == tokenize.COMMENT and not _DIRECTIVE.match(token.string):
                lines.add(token.start[0])
                self.comment_words += len(_WORD.findall(token.string))
                self.comment_pronouns += len(_PRONOUN.findall(token.string))
        return lines

    def _add_docstring(
        self, path: Path, node: ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef
    ) -> None:
        docstring = ast.get_docstring(node)
        if not docstring:
            return
        words, pronouns = len(_WORD.findall(docstring)), len(_PRONOUN.findall(docstring))
        self.docstring_words += words
        self.docstring_pronouns += pronouns
        place = f"{path}:{node.body[0].lineno}"
        if _OPENER.match(docstring):
            self.openers += 1
            self.places.append(f"{place} starts with {docstring.split()[0]}")
        if pronouns > 1 and 1000 * pronouns > 2 * MOST_PRONOUNS * words:
            self.places.append(f"{place} has {pronouns} pronouns in {words} words")

    def _add_function(
        self, path: Path, node: ast.FunctionDef | ast.AsyncFunctionDef, commented: set[int]
    ) -> None:
        if sum(isinstance(each, _BRANCHES) for each in ast.walk(node)) < HARD:
            return
        self.hard += 1
        if any(node.lineno <= line <= (node.end_lineno or node.lineno) for line in commented):
            self.commented += 1
        else:
            self.places.append(f"{path}:{node.lineno} {node.name} has many branches and no comment")


def count(root: Path) -> Counts:
    """Return the counts of all Python files below ``root``."""
    counts = Counts()
    for path in sorted(root.rglob("*.py")):
        counts.add(path)
    return counts


def sentences(pages: list[Path]) -> Iterator[tuple[int, Path, str]]:
    """Yield (words, page, sentence) for the running text of Markdown pages: no code, tables or headings."""
    for page in pages:
        text = re.sub(r"```.*?```", "", page.read_text(encoding="utf-8"), flags=re.DOTALL)
        for paragraph in text.split("\n\n"):
            if paragraph.lstrip().startswith(("|", "#")):
                continue
            for sentence in _SENTENCE.split(paragraph):
                words = len(_WORD.findall(sentence))
                if words > 2:
                    yield words, page, " ".join(sentence.split())


def failures(counts: dict[str, Counts], p90: int) -> Iterator[str]:
    """Yield one line for each exceeded limit."""
    for name, one in counts.items():
        for density, of in ((one.docstrings, "docstrings"), (one.comments, "comments")):
            if density > MOST_PRONOUNS:
                yield f"{name}: {density:.0f} pronouns per 1,000 words of {of} (limit {MOST_PRONOUNS})"
        if one.openers > MOST_OPENERS:
            yield f"{name}: {one.openers} docstrings start with What, Whether, Of, .. (limit {MOST_OPENERS})"
    if (share := counts[PRODUCT].share) < LEAST_COMMENTED:
        yield f"{PRODUCT}: {share:.0%} of hard functions have a comment (limit {LEAST_COMMENTED:.0%})"
    if p90 > MOST_WORDS:
        yield f"docs: the 90th percentile of sentences has {p90} words (limit {MOST_WORDS})"


def main() -> int:
    """Print the table and the failures. Return the exit status."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--list", metavar="FOLDER", type=Path, help="print the worst places of a folder instead"
    )
    folder = parser.parse_args().list
    if folder is not None:
        print(*count(folder).places, sep="\n")
        return 0
    counts = {name: count(ROOT / name) for name in CODE if (ROOT / name).is_dir()}
    pages = [ROOT / "README.md", *(p for p in sorted((ROOT / "docs").rglob("*.md")) if "adr" not in p.parts)]
    lengths = sorted(words for words, _, _ in sentences(pages))
    p90 = lengths[9 * len(lengths) // 10] if lengths else 0
    print("            pronouns per 1,000 words             hard functions")
    print("            docstrings  comments  openers        with a comment")
    for name, one in counts.items():
        share = f"{one.commented} of {one.hard}"
        print(f"{name:12}{one.docstrings:10.0f}{one.comments:10.0f}{one.openers:9}{share:>22}")
    print(f"docs: 90th percentile of words per sentence {p90}")
    found = list(failures(counts, p90))
    print(*found, sep="\n")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
