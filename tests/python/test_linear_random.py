"""Properties of the linear operators on random calls: any shapes, lengths, states and options."""

from dataclasses import replace

import numpy as np
import pytest
from harness import BFLOAT16, poisoned, restrided
from hypothesis import assume, given
from hypothesis import strategies as st
from linear_cases import BACKENDS, exact, parts_of

import onchip
from onchip.oracle import compare, linear_compare
from onchip.oracle.linear_cases import SCANS, TENSORS, linear_case

WITH_KEYS = tuple(op for op in TENSORS if op not in SCANS)
OPS = {on: WITH_KEYS if taken is None else taken for on, taken in BACKENDS.items()}
every_backend = pytest.mark.parametrize("on", OPS)
seeds = st.integers(0, 2**32 - 1)


def drawn(on, data, **limits):
    op = data.draw(st.sampled_from(OPS[on]))
    return linear_case(op, lambda low, high: data.draw(st.integers(low, high)), **limits)


def arguments(case):
    return {name: case.tensors.get(name) for name in TENSORS[case.op]}


def forward(on, case):
    return getattr(onchip.ops, f"{case.op}_forward")(
        **arguments(case),
        initial_state=case.initial_state,
        output_final_state=True,
        **case.options,
        backend=on,
    )


def backward(on, case):
    return getattr(onchip.ops, f"{case.op}_backward")(
        case.d_o,
        **arguments(case),
        initial_state=case.initial_state,
        d_final_state=case.d_final_state,
        **case.options,
        backend=on,
    )


def results(on, case):
    """Every array that forward and backward return."""
    o, final = forward(on, case)
    return [o, *parts_of(final), *(part for x in backward(on, case) for part in parts_of(x))]


def assert_same_results(got, wanted):
    for number, (one, other) in enumerate(zip(got, wanted, strict=True)):
        assert (one is None) == (other is None)
        if one is not None:
            compare.assert_bitwise(f"result {number}", one, other)


def in_fp64(case):
    return case.map_arrays(lambda x: x if x.dtype.kind == "i" else exact(x))


@every_backend
@given(data=st.data())
def test_random_calls_equal_the_oracle(on, data):
    # All of a tensor of few numbers may nearly cancel, and fp32 has few digits for that.
    case = drawn(on, data, dtypes=(np.float64, np.float16, BFLOAT16))
    key = next(case.tensors[name] for name in ("q", "r", "C") if name in case.tensors)
    assume(min(case.d_o.shape[-1], key.shape[-1]) > 3)
    # A quotient of one token's sums depends on neither q nor k.
    divides = case.op == "mlstm" or case.options.get("normalize")
    assume(case.initial_state is not None or not divides)
    plain = {name: x for name, x in case.options.items() if name != "chunk_len"}
    linear_compare.judge_forward(
        case.op, forward(on, case), case.tensors, initial_state=case.initial_state, **plain
    )
    want = backward("reference", in_fp64(case))
    linear_compare.judge_gradients(backward(on, case), want, case.tensors, case.dtype)


@every_backend
@given(data=st.data(), seed=seeds)
def test_what_lies_around_and_strides_have_no_influence(on, data, seed):
    rng = np.random.default_rng(seed)
    case = drawn(on, data)
    wanted = results(on, case)
    assert_same_results(results(on, case.map_arrays(lambda x: poisoned(x, rng))), wanted)
    assert_same_results(results(on, case.map_arrays(lambda x: restrided(x, rng))), wanted)


@every_backend
@given(data=st.data())
def test_bits_do_not_depend_on_threads_and_inputs_are_left_alone(on, data):
    case = drawn(on, data)
    copies = case.map_arrays(np.copy)
    threads = onchip.get_num_threads()
    try:
        onchip.set_num_threads(1)
        wanted = results(on, case)
        onchip.set_num_threads(3)
        assert_same_results(results(on, case), wanted)
    finally:
        onchip.set_num_threads(threads)
    assert_same_results(results(on, copies), wanted)
    inputs = [*case.tensors.values(), case.d_o, *parts_of(case.initial_state)]
    saved = [*copies.tensors.values(), copies.d_o, *parts_of(copies.initial_state)]
    for now, then in zip(inputs, saved, strict=True):
        compare.assert_bitwise("input", now, then)
    outputs = [x for x in wanted if x is not None]
    for index, x in enumerate(outputs):
        assert not any(np.shares_memory(x, other) for other in [*inputs, *outputs[:index]])


# What the outputs are linear in, with the states that they carry.
LINEAR_IN = {op: "x" if op == "mamba2" else "v" for op in WITH_KEYS}


@every_backend
@given(data=st.data(), factor=st.sampled_from([2.0, 0.5]))
def test_linear_in_the_values(on, data, factor):
    """The state's matrix with them, which a stabiliser or normaliser does not depend on."""
    case = drawn(on, data, dtypes=(np.float64, np.float32))
    name = LINEAR_IN[case.op]

    def scaled(x):
        return x * x.dtype.type(factor)

    initial = parts_of(case.initial_state)
    # gsa's first part and what normalises are of keys alone.
    of_values = (1,) if case.op == "gsa" else (0,)
    moved = tuple(scaled(x) if n in of_values else x for n, x in enumerate(initial))
    state = None if not moved else moved if isinstance(case.initial_state, tuple) else moved[0]
    changed = replace(
        case, tensors={**case.tensors, name: scaled(case.tensors[name])}, initial_state=state
    )
    o, final = forward(on, case)
    got, got_final = forward(on, changed)
    compare.assert_bitwise("o", got, scaled(o))
    for n, (part, want) in enumerate(zip(parts_of(got_final), parts_of(final), strict=True)):
        compare.assert_bitwise("final", part, scaled(want) if n in of_values else want)
