"""A path that a document names exists.

Looked at: link targets, and text in back quotes that starts with a folder of this repository. A
`*` or `{a,b}` must match something; text with a `<placeholder>` is left alone. A path yet to
come is written `path` (planned), and the mark has to go once the path is there.
"""

import itertools
import re
from pathlib import Path

import tree

_LINK = re.compile(r"\[[^\]\n]*\]\(([^)\s]+)\)")
_QUOTED = re.compile(r"`([^`\n]+)`( \(planned\))?")
_FENCE = re.compile(r"^(```|~~~).*?^\1", re.MULTILINE | re.DOTALL)
_FOLDERS = {
    ".ci", "bench", "cmake", "docs", "examples", "include", "python", "src", "tests", "tools",
}  # fmt: skip


def _expand_braces(text: str) -> list[str]:
    parts = re.split(r"\{([^{}]*)\}", text)
    choices = [part.split(",") if index % 2 else [part] for index, part in enumerate(parts)]
    return ["".join(choice) for choice in itertools.product(*choices)]


def _exists(root: Path, name: str) -> bool:
    return all(
        any(root.glob(choice)) if "*" in choice else (root / choice).exists()
        for choice in _expand_braces(name)
    )


def _repository_path(text: str) -> str | None:
    """The path in a quoted text such as `src/core/settings.cpp:12` or `tools/setup --help`."""
    word = text.split()[0] if text.split() else ""
    word = re.sub(r"(:\d+)?[.,;:]?$", "", word).removeprefix("./")
    if "/" not in word or word.split("/")[0] not in _FOLDERS or re.search(r"[<>$|]", word):
        return None
    return word.rstrip("/")


def check(root: Path) -> list[str]:
    findings = []
    for path in tree.files(root, "*.md"):
        relative = path.relative_to(root)
        text = path.read_text(encoding="utf-8")
        # Fenced blocks hold commands and sample output: blanked, with lines kept for the numbers.
        text = _FENCE.sub(lambda fence: re.sub(r"[^\n]", " ", fence[0]), text)
        for match in _QUOTED.finditer(text):
            name = _repository_path(match[1])
            if name is None:
                continue
            line = text.count("\n", 0, match.start()) + 1
            planned = match[2] is not None
            if planned and _exists(root, name):
                findings.append(f"{relative}:{line}: {name} is there: remove '(planned)'")
            elif not planned and not _exists(root, name):
                findings.append(f"{relative}:{line}: {name} does not exist")
        for match in _LINK.finditer(text):
            target = match[1].split("#")[0]
            if not target or re.match(r"[a-z]+:", target):
                continue
            if not (path.parent / target).exists():
                line = text.count("\n", 0, match.start()) + 1
                findings.append(f"{relative}:{line}: link to {target}, which does not exist")
    return findings
