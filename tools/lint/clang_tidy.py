#!/usr/bin/env python3
"""Runs clang-tidy over the library and its tests: clang_tidy.py <build folder with
compile_commands.json>.

A file is looked at once, whatever the number of instruction sets it is compiled for. What was
found clean is remembered beside the build, keyed on everything the result depends on, so only
changed files cost time.
"""

import concurrent.futures
import hashlib
import json
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
CLANG_TIDY = Path(sys.executable).parent / "clang-tidy"
_FOLDERS = [
    ROOT / name for name in ("src", "tests/core", "tests/headers", "tests/ops", "tests/support")
]
_INCLUDE = re.compile(r'^\s*#\s*include\s*[<"]([^>"]+)[>"]', re.MULTILINE)


def commands(build: Path) -> dict[Path, dict[str, str]]:
    """The compile command of each file to look at."""
    chosen: dict[Path, dict[str, str]] = {}
    for entry in json.loads((build / "compile_commands.json").read_text()):
        path = (Path(entry["directory"]) / entry["file"]).resolve()
        if path.suffix != ".cpp" or not any(folder in path.parents for folder in _FOLDERS):
            continue
        # The widest instruction set shows the most intrinsics.
        if path not in chosen or "ONCHIP_CPU_ISA=avx512" in entry["command"]:
            chosen[path] = entry
    return chosen


def with_includes(path: Path, seen: set[Path]) -> set[Path]:
    """The file and the project's headers that it reaches."""
    if path in seen or not path.is_file():
        return seen
    seen.add(path)
    for name in _INCLUDE.findall(path.read_text(encoding="utf-8")):
        for folder in (ROOT / "src", ROOT / "include", ROOT / "tests", path.parent):
            with_includes(folder / name, seen)
    return seen


def key_of(path: Path, command: str, version: str) -> str:
    digest = hashlib.sha256(f"{version}\n{command}\n".encode())
    rules = [folder / ".clang-tidy" for folder in path.parents if (folder / ".clang-tidy").exists()]
    for dependency in [*rules, *sorted(with_includes(path, set()))]:
        digest.update(dependency.read_bytes())
    return digest.hexdigest()


def main() -> int:
    build = Path(sys.argv[1]).resolve()
    version = subprocess.run(
        [CLANG_TIDY, "--version"], check=True, capture_output=True, text=True
    ).stdout
    clean_file = build / "clang_tidy_clean.json"
    clean = set(json.loads(clean_file.read_text())) if clean_file.exists() else set()
    entries = commands(build)
    keys = {path: key_of(path, entry["command"], version) for path, entry in entries.items()}
    todo = [path for path in entries if keys[path] not in clean]

    failed = []
    with tempfile.TemporaryDirectory() as database:
        Path(database, "compile_commands.json").write_text(json.dumps(list(entries.values())))

        def run(path: Path) -> tuple[Path, int, str]:
            # Warning options in the commands are for the compiler that builds, mostly gcc.
            command = [str(CLANG_TIDY), "--quiet", "--extra-arg=-Wno-unknown-warning-option"]
            done = subprocess.run([*command, "-p", database, path], capture_output=True, text=True)
            # stderr counts suppressed warnings; it matters only where there is nothing else.
            return path, done.returncode, done.stdout or done.stderr

        with concurrent.futures.ThreadPoolExecutor(os.cpu_count()) as pool:
            for path, code, output in pool.map(run, todo):
                if code:
                    failed.append(path)
                    print(output)
                else:
                    clean.add(keys[path])
    clean_file.write_text(json.dumps(sorted(clean & set(keys.values()))))
    print(f"clang-tidy: {len(entries)} files, {len(todo)} looked at, {len(failed)} with findings")
    return int(bool(failed))


if __name__ == "__main__":
    sys.exit(main())
