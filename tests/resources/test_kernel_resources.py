"""Registers, spills and main loops of every registered kernel, from the compiler alone."""

import json
import subprocess
import sys

import kernels
import pytest

SPECS = kernels.attention_plan.registered()


@pytest.fixture(scope="module")
def facts():
    return kernels.inspect_all()


@pytest.fixture(params=SPECS, ids=lambda spec: spec.name)
def spec(request):
    return request.param


def test_compiles_without_warnings(facts, spec):
    assert "error" not in facts[spec.name]
    assert facts[spec.name]["warnings"] == []


def test_multiplying_warps_use_no_local_memory(facts, spec):
    fact = facts[spec.name]
    assert fact["products_outside_mma_role"] == 0
    assert fact["mma_role_local_accesses"] == 0


def test_main_loops(facts, spec):
    """One loop without a mask, and one with where the mask is causal: each multiplies Q K^T and P V
    of a block, with its descriptors in uniform registers throughout."""
    loops = facts[spec.name]["main_loops"]
    assert len(loops) == (2 if spec.causal else 1)
    for loop in loops:
        assert loop["HGMMA"] == spec.head_dim_qk // 16 + spec.tile_n // 16
        assert loop["R2UR"] <= 1
        assert loop["LDL"] == loop["STL"] == 0


def test_fits_the_multiprocessor(spec):
    _, threads, shared_bytes, _ = spec.block
    assert shared_bytes <= 227 * 1024
    assert threads <= 1024


def test_snapshot(facts):
    path = kernels.snapshot_path()
    if not path.exists():
        pytest.skip(f"no snapshot for this NVRTC: {path.name}")
    assert facts == json.loads(path.read_text())


def test_generated_products_are_current():
    script = kernels.nvrtc.ROOT / "tools/gen_wgmma"
    subprocess.run([sys.executable, str(script), "--check"], check=True)
