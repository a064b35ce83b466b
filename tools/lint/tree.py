"""Which files of a checkout belong to the project."""

import subprocess
from collections.abc import Iterator
from pathlib import Path

_NOT_OURS = {".git", ".venv", "build", "dist", "out", "__pycache__"}


def files(root: Path, *patterns: str) -> Iterator[Path]:
    """Tracked and not yet added files that match one of the glob patterns, sorted.

    A tree that is not a git checkout (a test's, an unpacked archive) is walked instead.
    """
    if (root / ".git").exists():
        command = ["git", "-C", str(root), "ls-files", "-co", "--exclude-standard", "-z"]
        names = subprocess.run(command, check=True, capture_output=True, text=True).stdout
        found = {root / name for name in names.split("\0") if name}
    else:
        found = {
            path
            for path in root.rglob("*")
            if not _NOT_OURS.intersection(path.relative_to(root).parts)
        }
    for path in sorted(found):
        if path.is_file() and any(path.match(pattern) for pattern in patterns):
            yield path
