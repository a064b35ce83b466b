"""Benchmarks: a case's name and cost, the memory and error that are measured, the record's form."""

import json
import subprocess
import sys

import numpy as np
import pytest

import onchip
from onchip import _native
from onchip.bench import cases, linear, measure, memory, record
from onchip.bench.cases import AttentionCase, StepCase
from onchip.bench.errors import error_against_fp64
from onchip.bench.implementations import IMPLEMENTATIONS, Implementation, plain_attention
from onchip.bench.inputs import draw_inputs, paged
from onchip.bench.prepared import chosen
from onchip.oracle import attention as oracle

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
        "attention/fwd/fp32/h4k3d64/causal/s8",
        "attention/step/fp32/d64/causal/s8",
        "attention/step/fp32/d64/paged0/s8",
        "attention/fwdbwd/fp32/d64/contiguous/s8",
        "linear/fwd/fp32/d64/causal/s8",
        "linear/step/fp32/d64/simple_gla/s8",
    ],
)
def test_other_names_are_refused(name):
    with pytest.raises(ValueError, match="wanted a"):
        cases.parse(name)


@pytest.mark.parametrize(
    ("name", "flops", "tensor_bytes"),
    [
        # 10 D a pair backward; q, o, d_o, dq of 4 heads, k, v, dk, dv of 2.
        ("attention/bwd/bf16/h4k2d8/full/b3s32", 10 * 8 * 32**2 * 4 * 3, 2 * 4 * 6 * 8 * 32 * 3),
        ("attention/fwdbwd/fp32/h2d8/causal/b1s32", 14 * 8 * 512 * 2, 4 * 6 * 4 * 8 * 32),
        # Four keys a query, fewer in the first rows.
        ("attention/fwd/fp16/h1d8/window3/b1s32", 4 * 8 * (4 * 28 + 10), 2 * 2 * 2 * 8 * 32),
        ("attention/fwd/fp16/h1d8/window99/b1s32", 4 * 8 * 512, 2 * 2 * 2 * 8 * 32),
        ("attention/step/bf16/h8k2d8/paged16/b3s100", 4 * 8 * 100 * 8 * 3, 2 * 2 * 2 * 8 * 100 * 3),
        ("attention/step/fp32/h2d8/contiguous/b1s7", 4 * 8 * 7 * 2, 2 * 4 * 2 * 8 * 7),
        # 98 and 246 kFLOP a token and head; q, k, v, o and a gate.
        (
            "linear/fwd/bf16/h2k1d128/simple_gla/b3s64",
            (4 * 128**2 + 2 * 64 * 256) * 2 * 64 * 3,
            3 * 64 * (2 * (2 * 128 + 4 * 128) + 4 * 2),
        ),
        (
            "linear/bwd/fp32/h2d128v64/gated_delta_rule/b1s64",
            (16 * 128 * 64 + 128 * (6 * 128 + 5 * 64) + 2 * 64**2 / 3) * 2 * 64,
            64 * (4 * (4 * 2 * 128 + 3 * 2 * 64) + 4 * 2 * 2 * 2),
        ),
        # A decay each channel.
        (
            "linear/fwd/bf16/h2d128/kda/b1s64",
            (6 * 128**2 + 4 * 64 * 256 + 2 * 64**2 / 3) * 2 * 64,
            64 * (2 * 4 * 2 * 128 + 4 * 2 * (128 + 1)),
        ),
    ],
)
def test_what_a_case_costs(name, flops, tensor_bytes):
    case = cases.parse(name)
    assert cases.parse(case.name) == case
    assert (case.flops, case.tensor_bytes) == (flops, tensor_bytes)


def test_peak_is_seen_and_results_are_not_counted():
    size = 64 << 20
    if memory.peak_extra_bytes(lambda: None, 0) is None:
        pytest.skip("this kernel does not let a process reset its memory peak")
    taken = memory.peak_extra_bytes(lambda: np.ones(size, np.uint8).sum(), 0)
    assert abs(taken - size) < size // 16
    returned = memory.peak_extra_bytes(lambda: np.ones(size, np.uint8), size)
    assert returned < size // 16


def test_the_error_is_that_of_the_output():
    inputs = draw_inputs(CASE, seed=1)
    o = plain_attention(inputs.q, inputs.k, inputs.v, causal=True)
    error = error_against_fp64(CASE, inputs, {"o": o}, seed=2)
    assert 0 < error["rms"] <= error["max"] < 2e-6
    assert error["max_ref"] > 1

    # The last row is always among the sampled ones.
    o[1, -1, 1, 3] += 0.5
    spoiled = error_against_fp64(CASE, inputs, {"o": o}, seed=2)
    assert spoiled["max"] == pytest.approx(0.5, abs=1e-5)
    o[0, 0, 0, 0] = np.nan
    assert np.isnan(error_against_fp64(CASE, inputs, {"o": o}, seed=2)["max"])

    full = AttentionCase.parse("attention/fwd/fp32/h2d16/full/b2s96")
    o = plain_attention(inputs.q, inputs.k, inputs.v, causal=True)
    assert error_against_fp64(full, inputs, {"o": o}, seed=2)["max"] > 0.1
    o = plain_attention(inputs.q, inputs.k, inputs.v, causal=False)
    assert error_against_fp64(full, inputs, {"o": o}, seed=2)["max"] < 2e-6


@pytest.mark.parametrize("mask", ["full", "causal", "window5"])
def test_the_error_is_that_of_the_gradients(mask):
    """More rows than one block, so that dk and dv are sums over blocks."""
    case = cases.parse(f"attention/bwd/fp64/h2k1d4/{mask}/b1s1100")
    inputs = draw_inputs(case, seed=1)
    options = {"causal": case.causal, "window": (case.window_left, -1)}
    exact = oracle.attention_backward(inputs.d_o, inputs.q, inputs.k, inputs.v, **options)
    made = {name: getattr(exact, name) for name in ("dq", "dk", "dv")}
    assert error_against_fp64(case, inputs, made, seed=3)["max"] < 1e-12
    for name in made:
        spoiled = {**made, name: made[name].copy()}
        spoiled[name][0, -1, 0, 2] += 0.5
        error = error_against_fp64(case, inputs, spoiled, seed=3)
        assert error["max"] == pytest.approx(0.5, abs=1e-9)


def test_the_error_of_long_gradients_is_of_the_last_keys(monkeypatch):
    monkeypatch.setattr("onchip.bench.errors._LONG", 1099)
    case = cases.parse("attention/bwd/fp64/h1d4/causal/b1s1100")
    inputs = draw_inputs(case, seed=1)
    exact = oracle.attention_backward(inputs.d_o, inputs.q, inputs.k, inputs.v, causal=True)
    made = {name: getattr(exact, name).copy() for name in ("dq", "dk", "dv")}
    made["dv"][0, : 1100 - 1024] = np.nan
    assert error_against_fp64(case, inputs, made, seed=3)["max"] < 1e-12
    made["dk"][0, -1, 0, 1] += 0.5
    assert error_against_fp64(case, inputs, made, seed=3)["max"] == pytest.approx(0.5)
    made["dq"][0, 0, 0, 1] += 0.75
    assert error_against_fp64(case, inputs, made, seed=3)["max"] == pytest.approx(0.75)


def test_inputs_lie_as_pytorch_wants_them():
    inputs = draw_inputs(cases.parse("attention/bwd/bf16/h4k2d8/full/b2s6"), seed=0)
    assert inputs.q.shape == inputs.d_o.shape == (2, 6, 4, 8)
    assert inputs.k.shape == inputs.v.shape == (2, 6, 2, 8)
    assert inputs.q.dtype.name == "bfloat16"
    assert all(x.transpose(0, 2, 1, 3).flags.c_contiguous for x in (inputs.q, inputs.k, inputs.v))


def test_pages_hold_the_rows():
    case = StepCase.parse("attention/step/fp32/h2d4/paged8/b3s21")
    inputs = draw_inputs(case, seed=0)
    table = inputs.more["page_table"]
    assert table.shape == (3, 3) and sorted(table.reshape(-1)) == list(range(9))
    cache = paged(inputs.k, table, 8)
    assert cache.shape == (9, 8, 2, 4)
    for sequence in range(3):
        rows = cache[table[sequence]].reshape(24, 2, 4)
        assert (rows[:21] == inputs.k[sequence]).all() and np.isnan(rows[21:]).all()


def test_peaks():
    peaks = _native.measure_peaks(1)
    assert {"fma_fp32_portable_tflops", "read_tbps", "copy_tbps"} <= set(peaks)
    assert all(value > 0 for value in peaks.values())
    # A multiply-add loop that the compiler had thinned out would beat any machine's clock.
    assert peaks["fma_fp32_portable_tflops"] < 16 * 2 * 8e9 / 1e12
    assert measure.peak_tflops("fp32", peaks) == max(
        value for name, value in peaks.items() if name.startswith("fma_fp32")
    )
    with pytest.raises(onchip.InvalidArgument, match=r"num_threads: got 0, wanted 1 to 1024"):
        _native.measure_peaks(0)


def test_peaks_by_dtype():
    peaks = {"fma_fp32_avx2_tflops": 2.0, "fma_fp32_avx512_tflops": 3.0, "dot_bf16_x_tflops": 9.0}
    found = {dtype: measure.peak_tflops(dtype, peaks) for dtype in cases.DTYPES}
    assert found == {"fp64": 1.5, "fp32": 3.0, "fp16": 3.0, "bf16": 9.0}
    assert measure.peak_tflops("bf16", {"fma_fp32_avx2_tflops": 2.0}) == 2.0
    assert measure.peak_tflops("fp64", {}) is None


def test_measured_together(monkeypatch):
    """Interleaved, each as often; what cannot be measured says why."""
    ran = []
    sample = measure._Job.sample

    def noted(job):
        ran.append((job.case.name, job.name))
        sample(job)

    monkeypatch.setattr(measure._Job, "sample", noted)
    back = cases.parse("attention/bwd/fp32/h2k1d16/window9/b1s80")
    shown = []
    results, skipped = measure.measure_together(
        [(CASE, ["onchip:cpu", "onchip:reference", "numpy:plain"]), (back, ["onchip:reference"])],
        rounds=7,
        show=lambda done, note: shown.append(done),
    )
    assert skipped == []
    assert [(r["case"], r["impl"]) for r in results] == [
        (CASE.name, "onchip:cpu"),
        (CASE.name, "onchip:reference"),
        (CASE.name, "numpy:plain"),
        (back.name, "onchip:reference"),
    ]
    rounds = [ran[i : i + 4] for i in range(0, 28, 4)]
    assert len(rounds) == 7 and len({tuple(r) for r in rounds}) > 1
    assert all(sorted(r) == sorted(rounds[0]) for r in rounds)
    assert shown == sorted(shown) and 0 <= shown[0] < shown[-1] < 1
    for result in results:
        assert len(result["samples_ms"]) == 7
        assert 0 < result["error"]["max"] < 1e-5
        share = measure.shares(result, {"fma_fp32_x_tflops": 0.5})
        if result["backend"] == "reference":
            assert share == {}
        else:
            best_s = min(result["samples_ms"]) / 1e3
            assert share == {"pipe_use": pytest.approx(CASE.flops / best_s / 0.5e12)}
    with pytest.raises(ValueError, match="rounds: got 4, wanted 5"):
        measure.measure_together([], rounds=4)


@pytest.mark.parametrize("cache", ["contiguous", "paged16"])
@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_a_decoding_step(cache, dtype, monkeypatch):
    case = cases.parse(f"attention/step/{dtype}/h4k2d16/{cache}/b3s100")
    results, skipped = measure.measure_together([(case, ["onchip:reference", "numpy:plain"])])
    assert len(skipped) == 1 and "forward pass only" in skipped[0]["reason"]
    [result] = results
    assert result["case"] == case.name
    assert 0 < result["error"]["max"] < {"fp32": 1e-6, "bf16": 4e-3}[dtype]
    cpu = result | {"backend": "cpu"}
    # Every sample has a reading of as many bytes before it.
    assert len(result["reading_ms"]) == len(result["samples_ms"]) == 4 * measure.MIN_ROUNDS
    assert measure.shares(cpu, {"fma_fp32_x_tflops": 1.0}) == {}  # so little lies in caches
    monkeypatch.setattr(measure, "_SMALLEST_READING", case.tensor_bytes)
    share = measure.shares(cpu, {"fma_fp32_x_tflops": 1.0})
    turns = zip(result["reading_ms"], result["samples_ms"], strict=True)
    assert share == {"bandwidth_use": pytest.approx(np.median([a / b for a, b in turns]))}


def test_reading_is_timed_as_memory_lies():
    rows = np.zeros((1 << 10, 1 << 12), np.float32)
    assert 1e-6 < _native.time_reading(rows, 1) < 10
    assert 0 < _native.time_reading(rows.view(np.uint8), 2) < 10
    with pytest.raises((BufferError, ValueError)):
        _native.time_reading(rows[:, ::2], 1)
    with pytest.raises(TypeError):
        _native.time_reading(3, 1)
    with pytest.raises(onchip.InvalidArgument, match=r"time_reading: num_threads: got 0"):
        _native.time_reading(rows, 0)


@pytest.mark.parametrize(
    "name",
    [
        "attention/fwd/fp32/h4k2d16/causal/b2s70",
        "attention/fwd/bf16/h2d16/full/b2s70",
        "attention/bwd/fp32/h2d16/causal/b2s70",
        "attention/bwd/bf16/h4k2d16/full/b1s70",
        "attention/fwdbwd/fp64/h2d16/causal/b1s70",
        "attention/step/fp16/h4k2d16/contiguous/b2s70",
    ],
)
def test_pytorch_computes_the_same_case(name):
    pytest.importorskip("torch")
    case = cases.parse(name)
    result = measure.measure(case, "torch:sdpa", budget_s=0.0, seed=0)
    assert (result["case"], result["impl"], result["backend"]) == (name, "torch:sdpa", "cpu")
    # Right inputs in the right order: a wrong one is off by the size of the results.
    bound = {"fp64": 1e-12, "fp32": 1e-5, "fp16": 1e-2, "bf16": 5e-2}[case.dtype]
    assert 0 < result["error"]["max"] < bound * max(1.0, result["error"]["max_ref"])


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("attention/fwd/fp32/h2d16/window4/b1s8", "has no window"),
        ("attention/step/fp32/h2d16/paged4/b1s8", "has no paged cache"),
    ],
)
def test_what_pytorch_has_not(name, reason):
    pytest.importorskip("torch")
    with pytest.raises(measure.Skipped, match=reason):
        measure.measure(cases.parse(name), "torch:sdpa", budget_s=0.0, seed=0)


def recurrence(q, k, v, log_decay=None, beta=None):
    """Token by token, as docs/semantics.md, section 3, has it."""
    batch, tokens, heads, dim = q.shape
    o, state = np.empty(v.shape), np.zeros((batch, heads, dim, v.shape[-1]))
    for t in range(tokens):
        if log_decay is not None:
            decay = np.exp(log_decay[:, t])
            state = state * (decay[..., None] if decay.ndim == 3 else decay[..., None, None])
        row = v[:, t]
        if beta is not None:
            erased = np.einsum("bhd,bhdv->bhv", k[:, t], state)
            row = beta[:, t][..., None] * (row - erased)
        state = state + k[:, t][..., None] * row[:, :, None]
        o[:, t] = dim**-0.5 * np.einsum("bhd,bhdv->bhv", q[:, t], state)
    return o


@pytest.mark.parametrize("operator", cases.LINEAR_GATES)
def test_the_chunked_formulation_is_the_recurrence(operator):
    torch = pytest.importorskip("torch")
    case = cases.parse(f"linear/fwd/fp64/h3d8v5/{operator}/b2s192")
    inputs = draw_inputs(case, seed=0)
    gates = {name: x.astype(np.float64) for name, x in inputs.more.items()}
    assert tuple(gates) == case.gates
    np.testing.assert_allclose(np.linalg.norm(inputs.k, axis=-1), 1, rtol=1e-6)
    tensors = [torch.from_numpy(x) for x in (inputs.q, inputs.k, inputs.v)]
    o = linear.chunked(*tensors, **{name: torch.from_numpy(x) for name, x in gates.items()})
    wanted = recurrence(inputs.q, inputs.k, inputs.v, **gates)
    np.testing.assert_allclose(o.numpy(), wanted, atol=1e-12)


@pytest.mark.parametrize("operator", cases.LINEAR_GATES)
@pytest.mark.parametrize("phase", cases.PHASES)
def test_linear_attention(operator, phase):
    case = cases.parse(f"linear/{phase}/fp32/h4k2d8v16/{operator}/b2s70")
    names = ["onchip:reference", "torch:sdpa", "torch:chunked", "numpy:plain"]
    results, skipped = measure.measure_together([(case, names)])
    reasons = {entry["impl"]: entry["reason"] for entry in skipped}
    assert "plain formula" in reasons["numpy:plain"]
    if IMPLEMENTATIONS["torch:sdpa"].installed:
        assert "is not linear attention" in reasons["torch:sdpa"]
        assert "whole chunks of 64 and no groups" in reasons["torch:chunked"]
    if not hasattr(onchip.ops, f"{operator}_forward"):
        assert reasons["onchip:reference"] == f"this onchip has no {operator}"
        return
    [result] = results
    assert (result["case"], result["backend"]) == (case.name, "reference")
    assert 0 < result["error"]["max"] < 1e-5 * max(1.0, result["error"]["max_ref"])
    # Every row of the first key head, and of its two value heads.
    assert result["error"]["rows"] == 70 * (2 if phase == "fwd" else 2 + 1 + 1)


@pytest.mark.parametrize("phase", cases.PHASES)
def test_the_chunked_formulation_of_a_case(phase):
    pytest.importorskip("torch")
    if not hasattr(onchip.ops, "simple_gla_forward"):
        pytest.skip("this onchip has no simple_gla to compare with")
    case = cases.parse(f"linear/{phase}/fp32/h2d8/simple_gla/b1s128")
    result = measure.measure(case, "torch:chunked", budget_s=0.0, seed=0)
    assert 0 < result["error"]["max"] < 1e-5 * max(1.0, result["error"]["max_ref"])


def test_what_would_take_too_long_is_skipped():
    slow = cases.parse("attention/fwd/fp32/h1d64/full/b1s30000")
    results, skipped = measure.measure_together([(slow, ["onchip:reference"])], limit_s=0.5)
    assert results == []
    assert "more than 0.5 s" in skipped[0]["reason"]


def test_what_is_refused_is_skipped_with_the_reason():
    half = cases.parse("attention/fwd/fp16/h1d16/full/b1s8")
    _, skipped = measure.measure_together([(half, ["numpy:plain"])])
    assert skipped[0]["reason"] == "NumPy multiplies matrices in fp32 and fp64 only"


def test_results_that_are_not_finite_are_an_error(monkeypatch):
    def spoiled(q, k, v, causal):
        return np.full_like(q, np.nan)

    monkeypatch.setattr("onchip.bench.implementations.plain_attention", spoiled)
    with pytest.raises(ArithmeticError, match="numpy:plain: results are not finite"):
        measure.measure(CASE, "numpy:plain", budget_s=0.05, seed=0)


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
    with pytest.raises(RuntimeError, match="invalid choice: 'numpy:quick'"):
        measure.measure_in_own_process(CASE, "numpy:quick", budget_s=0.05)


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
    assert made["machine"]["threads"] == onchip.get_num_threads()
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
