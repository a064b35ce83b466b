"""Each Python example runs as its own docstring says (attention.cpp runs under CTest)."""

import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parents[2] / "examples"


@pytest.mark.parametrize("path", sorted(EXAMPLES.glob("[a-z]*.py")), ids=lambda path: path.stem)
def test_example(path, tmp_path):
    done = subprocess.run(
        [sys.executable, path], cwd=tmp_path, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout and not done.stderr
    assert f"python examples/{path.name}" in path.read_text()


def test_there_are_examples():
    assert {path.name for path in EXAMPLES.glob("[a-z]*.py")} >= {
        "attention_numpy.py",
        "decode_paged.py",
        "ring_attention_merge.py",
    }
