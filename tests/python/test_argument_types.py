"""Arguments of the wrong type: every function of onchip.ops, every argument, one message."""

import copy
import inspect
from functools import partial

import numpy as np
import pytest
from argument_cases import HUGE, RIGHT, WORD, Odd, calls, kind_of, refusals

import onchip

CALLS = calls()


def test_every_function_is_here():
    assert CALLS.keys() == {name for name in onchip.ops.__all__ if name[0].islower()}


@pytest.mark.parametrize("name", CALLS)
def test_wrong_types_are_refused_by_name(name):
    assert refusals(name, getattr(onchip.ops, name), CALLS[name]) == []


@pytest.mark.parametrize("name", CALLS)
def test_explain_refuses_them_too(name):
    function = partial(onchip.explain, name)
    function.__signature__ = inspect.signature(getattr(onchip.ops, name))
    assert refusals(name, function, CALLS[name]) == []


def outcome(name, change):
    try:
        return getattr(onchip.ops, name)(**(copy.deepcopy(CALLS[name]) | change))
    except (onchip.InvalidArgument, onchip.Unsupported) as error:
        return str(error)


@pytest.mark.parametrize("name", CALLS)
def test_what_stands_for_a_flag_or_a_number(name):
    """NumPy's scalars do, and 0 and 1 for a flag: the same result as of Python's own."""
    for option, parameter in inspect.signature(getattr(onchip.ops, name)).parameters.items():
        kind, _ = kind_of(parameter)
        for value in RIGHT.get(kind, ()):
            plain = {"flag": bool, "number": float, "integer": int}[kind](value)

            got, wanted = (outcome(name, {option: given}) for given in (value, plain))
            np.testing.assert_equal(got, wanted, err_msg=f"{option}={value!r}")


@pytest.mark.parametrize("name", CALLS)
def test_infinite_numbers_are_refused_by_name(name):
    function, call = getattr(onchip.ops, name), CALLS[name]
    for option, parameter in inspect.signature(function).parameters.items():
        if kind_of(parameter)[0] != "number":
            continue
        for value in (float("inf"), -float("inf")):
            with pytest.raises(onchip.InvalidArgument, match=f"^{name}: {option}: got -?inf, want"):
                function(**call, **{option: value})


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (dict(causal=WORD), "causal: got 9223372036854775808, wanted True or False"),
        (dict(max_seqlen_q=-WORD - 1), "max_seqlen_q: got -9223372036854775809, wanted an integer"),
        (dict(window=(WORD, 0)), "window: got 9223372036854775808, wanted an integer of 64 bits"),
        (dict(window=(0, HUGE)), "window: got an integer of too many digits to write, wanted"),
        (dict(window=(1, 2, 3)), r"window: got \(1, 2, 3\), wanted \(left, right\)"),
        (dict(scale=float("nan")), "scale: got nan, wanted a number that is not NaN"),
        (dict(scale=float("-inf")), "scale: got -inf, wanted a finite number"),
        (dict(scale=10**400), "scale: got 1000.*, wanted a finite number"),
        (dict(softcap=float("inf")), "softcap: got inf, wanted 0 .none. or a finite cap above 0"),
        (dict(dropout_p=float("inf")), "dropout_p: got inf, wanted"),
        (dict(dropout_p=None), "dropout_p: got None, wanted a number"),
        (dict(causal=None), "causal: got None, wanted True or False"),
        (dict(scale=np.array(0.5)), "scale: got ndarray, wanted a number"),
        (dict(causal=Odd()), "causal: got Odd, wanted True or False"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_messages(call, message):
    with pytest.raises(onchip.InvalidArgument, match=f"^attention_forward: {message}"):
        onchip.ops.attention_forward(**CALLS["attention_forward"], **call)


@pytest.mark.parametrize("value", ["4", None, 1.0, True, np.array(4), HUGE, WORD, Odd()], ids=type)
def test_number_of_threads(value):
    with pytest.raises(onchip.InvalidArgument, match=r"^set_num_threads: num_threads: got"):
        onchip.set_num_threads(value)


@pytest.mark.parametrize(
    ("spec", "got"),
    [
        (dict(shape=(2, True)), "True"),
        (dict(shape=(2, 1.0)), "1.0"),
        (dict(shape=5), "shape 5"),
        (dict(dtype=np.float32), "dtype float32"),
        (dict(device=Odd()), "device Odd"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_specs(spec, got):
    q = onchip.ArraySpec(**{**dict(shape=(1, 2, 3, 4), dtype="float32", device="cuda"), **spec})
    with pytest.raises(onchip.InvalidArgument, match=f"^merge: o1: got {got}, wanted "):
        onchip.explain("merge", q, q, q, q)


PAIRS = [
    ("attention_decode", "rotary_cos", "rotary_sin"),
    ("attention_decode", "k_new", "v_new"),
    ("attention_forward", "q_segment_ids", "kv_segment_ids"),
    ("rms_norm_gated_forward", "gate", "activation"),
    ("rms_norm_gated_backward", "gate", "activation"),
]


@pytest.mark.parametrize(("name", "first", "second"), PAIRS)
def test_arguments_that_come_together(name, first, second):
    ids = dict(q_segment_ids=np.zeros((2, 5), np.int32), kv_segment_ids=np.zeros((2, 6), np.int32))
    call = CALLS[name] | (ids if first in ids else {})
    getattr(onchip.ops, name)(**copy.deepcopy(call))
    for given, missing in ((first, second), (second, first)):
        words = f"^{name}: {missing}: got {given} without {missing}, wanted both or neither$"
        with pytest.raises(onchip.InvalidArgument, match=words):
            getattr(onchip.ops, name)(**{**copy.deepcopy(call), missing: None})
