"""Includes point one way (docs/architecture.md, section 2).

A file names what it includes relative to `src/`, or as `<onchip/...>`; it may include its own layer
and the layers below it that `_MAY_INCLUDE` lists.
"""

import re
from pathlib import Path

import tree

_MAY_INCLUDE = {
    "api": {"api", "ops", "core"},
    "ops": {"ops", "reference", "cpu", "gpu/kernels", "core"},
    "reference": {"reference", "core"},
    "cpu": {"cpu", "core"},
    "gpu/kernels": {"gpu/kernels", "gpu/runtime", "core"},
    "gpu/runtime": {"gpu/runtime", "core"},
    "gpu/tile": {"gpu/tile"},
    "core": {"core"},
}
_INCLUDE = re.compile(r'^\s*#\s*include\s*([<"])([^>"]+)[>"]', re.MULTILINE)
# What onchip.h may include: the freestanding part of C plus the NAN and INFINITY of <math.h>.
_C_HEADERS = {"math.h", "stddef.h", "stdint.h"}


def _layer(name: str) -> str | None:
    """The layer of a path relative to `src/`: its folder, with gpu split in three."""
    parts = name.split("/")
    layer = "/".join(parts[:2]) if parts[0] == "gpu" else parts[0]
    return layer if layer in _MAY_INCLUDE else None


def _check_public(name: str, included: str) -> str | None:
    if name == "onchip.h":
        if included not in _C_HEADERS:
            return f"onchip.h may include {', '.join(sorted(_C_HEADERS))} only"
    elif included.startswith("onchip/") and included != "onchip/onchip.h":
        return "a public C++ header may include <onchip/onchip.h> only"
    return None


def _kernel(path: Path) -> str | None:
    """The kernel X that X.cuh, or X_part.cuh, is text of: the longest name that has a plan."""
    words = path.stem.split("_")
    names = ("_".join(words[:count]) for count in range(len(words), 0, -1))
    return next((x for x in names if (path.parent / f"{x}_plan.hpp").is_file()), None)


def _check_device(root: Path, path: Path, quoted: bool, included: str) -> str | None:
    """A kernel's device text, or a tile primitive."""
    if not quoted:
        return "device text includes no system header"
    if included.startswith("gpu/tile/"):
        return None
    kernel, target = _kernel(path), root / "src" / included
    if kernel is not None and target.parent == path.parent:
        if target.name == f"{kernel}_plan.hpp":
            return None
        if target.suffix == ".cuh" and target.stem != kernel and _kernel(target) == kernel:
            return None
    return "device text may include gpu/tile/, its own _plan.hpp and its kernel's parts only"


def _check_source(root: Path, path: Path, quoted: bool, included: str) -> str | None:
    name = path.relative_to(root / "src").as_posix()
    layer = _layer(name)
    if layer is None:
        return f"{name} lies outside the layers {', '.join(_MAY_INCLUDE)}"
    if path.suffix == ".cuh":
        return _check_device(root, path, quoted, included)
    if not quoted:
        if included.startswith("onchip/") and included != "onchip/onchip.h":
            return "inside the library only <onchip/onchip.h> may be included"
        return None
    if not (root / "src" / included).is_file():
        return "not a file relative to src/"
    if included.endswith(".cuh"):
        return "device text is never included by host code"
    target = _layer(included)
    if path.name.endswith("_plan.hpp") and layer == "gpu/kernels":
        if target != "gpu/tile":
            return "a _plan.hpp is read by device code: it may include gpu/tile/ only"
        return None
    if target not in _MAY_INCLUDE[layer]:
        return f"{layer} may include {', '.join(sorted(_MAY_INCLUDE[layer]))} only"
    return None


def _check_user(path: Path, quoted: bool, included: str) -> str | None:
    """The binding, benchmarks and examples stand where any user stands."""
    if quoted and not (path.parent / included).is_file():
        return "only the public headers <onchip/...> and files beside it may be included"
    return None


def check(root: Path) -> list[str]:
    findings = []
    for path in tree.files(root, "*.c", "*.cpp", "*.h", "*.hpp", "*.cuh"):
        relative = path.relative_to(root)
        text = path.read_text(encoding="utf-8")
        for match in _INCLUDE.finditer(text):
            quoted, included = match[1] == '"', match[2]
            reason: str | None = None
            if relative.parts[0] == "include":
                reason = _check_public(path.name, included)
            elif relative.parts[0] == "src":
                reason = _check_source(root, path, quoted, included)
            elif relative.parts[0] in ("python", "bench", "examples"):
                reason = _check_user(path, quoted, included)
            if reason is not None:
                line = text.count("\n", 0, match.start(1)) + 1
                findings.append(f"{relative}:{line}: includes {included}: {reason}")
    return findings
