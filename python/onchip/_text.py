"""Tables for a terminal."""

from collections.abc import Sequence


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
