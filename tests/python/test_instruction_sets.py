"""The CPU backend on every instruction set that this machine has, not only on the best one.

The setting is read once in a process, so each set runs the other files in a process of its own.
"""

import os
import subprocess
import sys
from pathlib import Path

import pytest

FILES = [
    "test_additive_masks.py",
    "test_alignment.py",
    "test_dropout.py",
    "test_heads.py",
    "test_helpers.py",
    "test_helpers_cpu.py",
    "test_hot_inputs.py",
    "test_linear.py",
    "test_linear_cpu.py",
    "test_linear_cpu_delta.py",
    "test_linear_gates.py",
    "test_masking_empty_rows.py",
    "test_merge.py",
    "test_non_finite.py",
    "test_properties.py",
    "test_sink.py",
    "test_softcap.py",
    "test_window.py",
]


def run_with(isa, *arguments):
    return subprocess.run(
        [sys.executable, *arguments],
        env={**os.environ, "ONCHIP_CPU_ISA": isa},
        cwd=Path(__file__).parent.parent.parent,
        capture_output=True,
        text=True,
        check=False,
    )


@pytest.mark.parametrize("isa", ["portable", "avx2", "avx512"])
def test_an_instruction_set_that_is_not_the_best(isa, request):
    probe = run_with(
        isa,
        "-c",
        "import numpy, onchip; x = numpy.ones((1, 2, 1, 8), 'f4');"
        "print(onchip.explain('attention_forward', x, x, x, backend='cpu'))",
    )
    if probe.returncode != 0:
        pytest.skip(f"the machine or this build has no {isa}: {probe.stderr.splitlines()[-1]}")
    assert isa in probe.stdout, "the setting must reach the kernel that runs"
    files = [str(Path(__file__).parent / name) for name in FILES]
    long_option = ["--long"] if request.config.getoption("--long") else []
    result = run_with(
        isa, "-m", "pytest", *files, "-k", "cpu", "-q", "-x", "-p", "no:cacheprovider", *long_option
    )
    assert result.returncode == 0, result.stdout[-4000:]
