"""Each Python example runs as its own docstring says (attention.cpp runs under CTest), and so do
those of README without PyTorch (test_torch.py runs the others). docs/operators.md has every
operator."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

import onchip

ROOT = Path(__file__).parents[2]
EXAMPLES = ROOT / "examples"


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


def test_readme():
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    blocks = re.findall(r"^```python\n(.*?)^```", text, re.MULTILINE | re.DOTALL)
    plain = [block for block in blocks if "torch" not in block]
    assert plain
    for block in plain:
        names = {}
        exec(block, names)
        assert names["o"].shape == (2, 1, 8, 64) and names["o_next"].shape == (2, 8, 64)


def test_every_operator_has_its_line():
    page = (ROOT / "docs" / "operators.md").read_text(encoding="utf-8")
    lines = set(re.findall(r"^\| (\w+)", page, re.MULTILINE))
    functions = {name for name in onchip.ops.__all__ if name.islower()}
    linear = {re.sub(r"_(forward|backward|step)$", "", name) for name in functions} - {"attention"}
    assert linear | {name for name in functions if name.startswith("attention_")} <= lines
