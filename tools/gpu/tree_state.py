#!/usr/bin/env python3
"""Which sources a figure was measured with, on a machine that gets the files without their history.

A record says `dirty` where a file that its figures depend on differs from the commit when build/gpu
is made, changes while it is made, or is another one when the campaign runs: what the binaries are
built from, the package, the scripts that measure. Documents, records and tests change no figure;
of these, tests are no reason to say `dirty`, but to run the stages again.

    tree_state.py begin FILE      # before anything is built
    tree_state.py end FILE TO     # when it is: TO also has what has changed since
"""

import hashlib
import json
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
FOLDERS = ("CMakeLists.txt", "cmake", "include", "src", "python", "bench", "tests", "tools/gpu")


def is_source(name: str) -> bool:
    """No cache or other file that git ignores, and no document or record."""
    parts = name.split("/")
    made = any(x.startswith(".") or x == "__pycache__" or x.endswith(".egg-info") for x in parts)
    return not (made or name.endswith((".pyc", ".md")) or name.startswith("bench/records/"))


def makes_figures(name: str) -> bool:
    return is_source(name) and not name.startswith("tests/")


def hashes(root: Path = ROOT) -> dict[str, str]:
    """Of every source below FOLDERS, by its name."""
    found = {}
    for folder in FOLDERS:
        top = root / folder
        for path in sorted(top.rglob("*")) if top.is_dir() else [top]:
            name = path.relative_to(root).as_posix()
            if is_source(name) and path.is_file():
                found[name] = hashlib.sha256(path.read_bytes()).hexdigest()
    return found


def fingerprint(files: dict[str, str]) -> str:
    text = "".join(f"{name}\0{digest}\n" for name, digest in sorted(files.items()))
    return hashlib.sha256(text.encode()).hexdigest()


def git(*arguments: str, root: Path = ROOT) -> str:
    return subprocess.run(
        ["git", "-C", str(root), *arguments], check=True, capture_output=True, text=True
    ).stdout


def describe(root: Path = ROOT) -> dict[str, Any]:
    """`dirty`: the files of that kind that are not the commit's."""
    status = git("status", "--porcelain", "-uall", "--no-renames", "-z", "--", *FOLDERS, root=root)
    names = [entry[3:] for entry in status.split("\0") if entry]
    return {
        "commit": git("rev-parse", "HEAD", root=root).strip(),
        "dirty": sorted(filter(makes_figures, names)),
        "files": hashes(root),
        "source": str(root),
    }


def changed(files: dict[str, str], root: Path = ROOT) -> list[str]:
    """What differs now: other contents, gone, or new."""
    now = hashes(root)
    return sorted(name for name in files.keys() | now.keys() if files.get(name) != now.get(name))


def with_changes(tree: dict[str, Any], names: Iterable[str]) -> dict[str, Any]:
    return tree | {"dirty": sorted({*tree["dirty"], *filter(makes_figures, names)})}


def main(what: str, state: str, to: str = "") -> None:
    if what == "begin":
        Path(state).write_text(json.dumps(describe()))
        return
    tree = json.loads(Path(state).read_text())
    tree = with_changes(tree, changed(tree["files"]))
    Path(to).write_text(json.dumps(tree))
    print("commit", tree["commit"], "dirty:", " ".join(tree["dirty"]) or "no")


if __name__ == "__main__":
    main(*sys.argv[1:])
