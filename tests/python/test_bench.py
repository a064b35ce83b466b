"""Benchmarks: a case's name and cost, the memory and error that are measured, the record's form."""

import json
import subprocess
import sys

import numpy as np
import pytest

from onchip.bench import measure, memory, record
from onchip.bench.cases import AttentionCase
from onchip.bench.implementations import IMPLEMENTATIONS, Implementation, chosen, plain_attention

CASE = AttentionCase.parse("attention/fwd/fp32/h2d16/causal/b2s96")


def test_a_name_says_everything():
    assert AttentionCase.parse(CASE.name) == CASE
    assert CASE.shape == (2, 96, 2, 16)
    assert CASE.flops == 2 * 96 * 96 * 16 * 2 * 2
    assert CASE.tensor_bytes == 4 * 4 * 2 * 96 * 2 * 16


def test_heads_and_batch_by_convention():
    case = AttentionCase.parse("attention/fwd/bf16/d128/full/s4096")
    assert (case.num_heads, case.batch, case.causal) == (16, 4, False)
    assert case.flops == 4 * 4096**2 * 128 * 16 * 4
    assert case.tensor_bytes == 4 * 2 * 16384 * 2048


@pytest.mark.parametrize(
    "name",
    [
        "attention/fwd/fp32/d64/causal",
        "attention/fwd/fp32/d64/causal/s0",
        "attention/fwd/fp32/d64/diagonal/s8",
        "attention/fwd/fp8/d64/causal/s8",
        "attention/fwd/fp32/d64/causal/s8/more",
    ],
)
def test_other_names_are_refused(name):
    with pytest.raises(ValueError, match="wanted attention/fwd/"):
        AttentionCase.parse(name)


def test_peak_is_seen_and_results_are_not_counted():
    size = 64 << 20
    if memory.peak_extra_bytes(lambda: None, 0) is None:
        pytest.skip("this kernel does not let a process reset its memory peak")
    taken = memory.peak_extra_bytes(lambda: np.ones(size, np.uint8).sum(), 0)
    assert abs(taken - size) < size // 16
    returned = memory.peak_extra_bytes(lambda: np.ones(size, np.uint8), size)
    assert returned < size // 16


def test_the_error_is_that_of_the_output():
    q, k, v = measure.draw_inputs(CASE, seed=1)
    o = plain_attention(q, k, v, causal=True)
    error = measure.error_against_fp64(CASE, q, k, v, o, seed=2)
    assert 0 < error["rms"] <= error["max"] < 2e-6
    assert error["max_ref"] > 1

    # The last row is always among the sampled ones.
    o[1, -1, 1, 3] += 0.5
    spoiled = measure.error_against_fp64(CASE, q, k, v, o, seed=2)
    assert spoiled["max"] == pytest.approx(0.5, abs=1e-5)

    full = AttentionCase.parse("attention/fwd/fp32/h2d16/full/b2s96")
    assert measure.error_against_fp64(full, q, k, v, o, seed=2)["max"] > 0.1
    o = plain_attention(q, k, v, causal=False)
    assert measure.error_against_fp64(full, q, k, v, o, seed=2)["max"] < 2e-6


@pytest.mark.parametrize("name", ["numpy:plain", "onchip:cpu"])
def test_a_measurement_in_its_own_process(name):
    result = measure.measure_in_own_process(CASE, name, budget_s=0.05)
    assert (result["case"], result["impl"]) == (CASE.name, name)
    assert result["backend"] == {"numpy:plain": "numpy", "onchip:cpu": "cpu"}[name]
    assert result["kernel"]
    assert result["error"]["max"] < 2e-6
    assert min(result["samples_ms"]) > 0


def test_what_does_not_fit_is_skipped_with_the_reason():
    huge = AttentionCase.parse("attention/fwd/fp32/h1d64/causal/b1s10000000")
    with pytest.raises(measure.Skipped, match="GiB of memory"):
        measure.measure_in_own_process(huge, "numpy:plain", budget_s=0.05)


def test_running_out_of_memory_is_skipped_with_the_reason():
    limit = 1 << 30
    code = (
        f"import resource; resource.setrlimit(resource.RLIMIT_DATA, ({limit}, {limit}))\n"
        "from onchip.bench import measure; measure.main()"
    )
    # 1.6 GiB of scores: less than is free, more than the limit.
    case = "attention/fwd/fp32/h1d16/causal/b1s20000"
    child = subprocess.run(
        [sys.executable, "-c", code, case, "numpy:plain"],
        capture_output=True,
        text=True,
        check=True,
    )
    assert json.loads(child.stdout)["skipped"].startswith("out of memory: Unable to allocate")


def test_what_is_not_installed_is_skipped(monkeypatch):
    absent = Implementation("absent", "no_such_package", None, None)
    monkeypatch.setitem(IMPLEMENTATIONS, "absent", absent)
    with pytest.raises(measure.Skipped, match="no_such_package is not installed"):
        measure.measure(CASE, "absent", budget_s=0.05, seed=0)


def test_no_chosen_backend_is_an_error():
    text = "op: cpu\n  cpu: chosen: avx2, fp32, workspace 64 bytes\n  reference: possible: x\n"
    assert chosen(text) == ("cpu", "avx2, fp32")
    with pytest.raises(ValueError, match="no backend is chosen"):
        chosen("op: no backend takes this call\n  cpu: rejected: dropout\n")


def test_a_failing_measurement_is_an_error():
    double = AttentionCase.parse("attention/fwd/fp64/h2d16/causal/b2s96")
    with pytest.raises(RuntimeError, match="got fp64, wanted fp32"):
        measure.measure_in_own_process(double, "numpy:plain", budget_s=0.05)


@pytest.fixture(scope="module")
def made():
    result = measure.measure(CASE, "numpy:plain", budget_s=0.05, seed=0)
    skipped = [{"case": CASE.name, "impl": "torch:sdpa", "reason": "torch is not installed"}]
    return record.build([result], skipped)


def test_a_record_is_written_whole(made, tmp_path):
    path = tmp_path / "folder" / "record.json"
    record.write(made, path)
    assert json.loads(path.read_text()) == made
    assert made["machine"]["cores"] > 0
    assert made["versions"]["numpy"] == np.__version__
    assert all(value > 0 for value in made["ceilings"].values())


def test_a_record_without_a_field_is_refused(made, tmp_path):
    result = made["results"][0]
    for broken, message in (
        ({**made, "schema": 2}, "schema"),
        ({name: made[name] for name in made if name != "commit"}, "commit"),
        ({**made, "results": [{**result, "ms": -1.0}]}, "median"),
        ({**made, "results": [{**result, "peak_bytes": "many"}]}, "peak_bytes"),
        ({**made, "results": [{**result, "error": {"vs": "fp64"}}]}, "error.max"),
        ({**made, "skipped": [{"case": CASE.name}]}, "impl"),
    ):
        with pytest.raises(ValueError, match=message):
            record.write(broken, tmp_path / "record.json")
    assert not (tmp_path / "record.json").exists()
