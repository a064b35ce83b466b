"""Tables and messages for a terminal."""

import difflib
from collections.abc import Iterable, Sequence


def nearest(word: object, words: Iterable[str], most: int = 1) -> str:
    """The end of a message that refuses `word`: the words that may have been meant, if any is like
    it; those that go on where it ends come first."""
    known = list(words)
    found = [other for other in known if word and other.startswith(str(word))]
    found += difflib.get_close_matches(str(word), known, n=most)
    return f"; nearest legal: {', '.join(list(dict.fromkeys(found))[:most])}" if found else ""


def aligned(rows: Sequence[Sequence[str]], numbers_from: int | None = None) -> list[str]:
    """A line a row, columns padded to the widest cell; to the right from column `numbers_from`."""
    if not rows:
        return []
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    lines = []
    for row in rows:
        cells = [
            cell.ljust(width) if numbers_from is None or i < numbers_from else cell.rjust(width)
            for i, (cell, width) in enumerate(zip(row, widths, strict=True))
        ]
        lines.append("  ".join(cells).rstrip())
    return lines
