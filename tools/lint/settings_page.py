"""docs/settings.md lists exactly the environment variables that src/core/settings.cpp reads, and no
other file of the library reads the environment."""

import re
from pathlib import Path

import tree

_PAGE = "docs/settings.md"
_PARSER = "src/core/settings.cpp"
_LITERAL = re.compile(r'"(ONCHIP_[A-Z0-9_]+)"|(?:getenv|_variable)\(\s*"([A-Za-z0-9_]+)"')
_ROW = re.compile(r"^\|\s*`([A-Za-z0-9_]+)`\s*\|", re.MULTILINE)
_READS = re.compile(r"\b(?:secure_)?getenv\s*\(|\benviron\b")


def check(root: Path) -> list[str]:
    findings = []
    read = {a or b for a, b in _LITERAL.findall((root / _PARSER).read_text(encoding="utf-8"))}
    listed = set(_ROW.findall((root / _PAGE).read_text(encoding="utf-8")))
    for name in sorted(read - listed):
        findings.append(f"{_PAGE}: {name}, which {_PARSER} reads, has no row")
    for name in sorted(listed - read):
        findings.append(f"{_PAGE}: {name} has a row, but {_PARSER} does not read it")
    for path in tree.files(root, "*.cpp", "*.hpp", "*.h"):
        relative = path.relative_to(root)
        if relative.parts[0] not in ("src", "include") or relative.as_posix() == _PARSER:
            continue
        text = path.read_text(encoding="utf-8")
        for match in _READS.finditer(re.sub(r"//[^\n]*", "", text)):
            findings.append(
                f"{relative}: {match[0].strip('(')}: only {_PARSER} reads the environment"
            )
    return findings
