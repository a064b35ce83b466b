#!/usr/bin/env python3
"""The project's own checks: prints every finding, exits 1 if there is one."""

import sys
from collections.abc import Callable
from pathlib import Path

import include_direction
import settings_page
import sizes
import stale_paths

CHECKS: dict[str, Callable[[Path], list[str]]] = {
    "include direction": include_direction.check,
    "paths named in documents": stale_paths.check,
    "sizes": sizes.check,
    "settings page": settings_page.check,
}


def main() -> int:
    root = Path(__file__).resolve().parents[2]
    failed = False
    for name, check in CHECKS.items():
        findings = check(root)
        for finding in findings:
            print(f"{finding}  [{name}]")
        failed |= bool(findings)
    if not failed:
        print(f"{len(CHECKS)} project checks: nothing found")
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
