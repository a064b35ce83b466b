"""Which commit a copy of the sources is, for a machine that gets the files without the history."""

import hashlib
import subprocess
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
# What figures and tests depend on.
FOLDERS = ("CMakeLists.txt", "cmake", "include", "src", "python", "bench", "tests", "tools/gpu")
_SKIPPED = {"__pycache__", "records"}


def fingerprint() -> str:
    """Of every source file below FOLDERS, by name and contents."""
    h = hashlib.sha256()
    for folder in FOLDERS:
        top = ROOT / folder
        for path in sorted(top.rglob("*")) if top.is_dir() else [top]:
            if path.is_file() and not _SKIPPED & set(path.parts) and path.suffix != ".pyc":
                h.update(f"{path.relative_to(ROOT)}\0".encode())
                h.update(hashlib.sha256(path.read_bytes()).digest())
    return h.hexdigest()


def git(*arguments: str) -> str:
    return subprocess.run(
        ["git", "-C", str(ROOT), *arguments], check=True, capture_output=True, text=True
    ).stdout.strip()


def describe() -> dict[str, object]:
    return {
        "commit": git("rev-parse", "HEAD"),
        "dirty": bool(git("status", "--porcelain", "--", *FOLDERS)),
        "fingerprint": fingerprint(),
        "source": str(ROOT),
    }
