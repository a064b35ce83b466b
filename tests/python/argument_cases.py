"""A good call of every function of onchip.ops, and values that are wrong by the type that a
signature says."""

import inspect
import re
import types
import typing

import linear_cases
import numpy as np
from linear_cases import TENSORS, VARIANTS, Sizes

import onchip

F4, I4 = np.float32, np.int32
HUGE = 10**5000  # Python refuses to write it
WORD = 2**63


class Odd:
    """Whoever writes it out for a message has lost."""

    def __repr__(self):
        raise RuntimeError("repr")


WRONG = {
    "flag": [
        *("no", "x", 2, -1, 0.5, 1.0, [], {}, b"1", float("nan"), Odd(), WORD, -WORD - 1, HUGE),
        *(np.ones(2), np.array(True), np.float32(1)),
    ],
    "number": [
        *("x", "1.0", [], [1.0], {}, b"1", True, 1j, float("nan"), Odd(), 2**1100, HUGE),
        *(np.ones(1), np.array(1.0), np.ones(2), np.True_),
    ],
    "integer": [
        *("x", 1.0, 1.5, [], [1], True, float("nan"), Odd(), WORD, -WORD - 1, HUGE),
        *(np.ones(1, int), np.array(1), np.True_, np.float32(1)),
    ],
    "name": [
        *("nonsense", "", "a\0b", "\ud800", 5, 1.0, True, [], b"cpu", Odd()),
        np.array(["kv", "vk"]),
    ],
    "pair": [
        *("ab", 5, 1.0, [], (1,), (1, 2, 3), {1, 2}, {1: 2, 2: 3}, Odd(), np.array([-1, -1])),
        *(("a", 1), (1, "a"), (None, 1), (True, 1), (float("nan"), 1), ("\ud800", 1), (1, HUGE)),
    ],
    "array": [
        *("x", 5, 1.0, True, {}, Odd(), b"ab", float("nan"), WORD, type, {1}, iter([])),
        *([Odd()], ["a"], [1.5], [WORD]),
    ],
}
# What stands for a flag or a number although its type is another.
RIGHT = {
    "flag": [True, False, 0, 1, np.True_, np.False_, np.int64(0)],
    "number": [1, np.float32(0.5), np.float64(0.5), np.int32(1)],
    "integer": [np.int64(16), np.int32(16)],
}


def kind_of(parameter):
    """(kind of value, whether None is one) by a parameter's annotation."""
    annotation = parameter.annotation
    is_union = typing.get_origin(annotation) in (typing.Union, types.UnionType)
    members = typing.get_args(annotation) if is_union else (annotation,)
    takes_none = type(None) in members
    for one, kind in ((bool, "flag"), (float, "number"), (int, "integer"), (str, "name")):
        if one in members:
            return kind, takes_none
    if any(typing.get_origin(member) is tuple for member in members) and len(members) == 1:
        return "pair", False
    return "array", takes_none or parameter.default is None


def wrong_values(parameter):
    kind, takes_none = kind_of(parameter)
    return WRONG[kind] if takes_none else [*WRONG[kind], None]


def refusals(op, function, good, leave_out=()):
    """What is wrong with how the function refuses wrong values, by argument: [] if nothing."""
    function(**good)
    found = []
    for name, parameter in inspect.signature(function).parameters.items():
        if name in leave_out:
            continue
        for index, value in enumerate(wrong_values(parameter)):
            what = f"{name} = wrong value {index} ({type(value).__name__})"
            try:
                function(**{**good, name: value})
            except onchip.InvalidArgument as error:
                form = rf"{op}: {name}(\[[^]]*\])?: got .+, wanted .+"
                if not re.fullmatch(form, str(error), re.DOTALL):
                    found.append(f"{what}: {error}")
            except Exception as error:
                found.append(f"{what}: {type(error).__name__}: {error}")
            else:
                found.append(f"{what}: accepted")
    return found


def calls():
    """A good call of every function of onchip.ops, with as many arrays as it takes at once."""
    rng = np.random.default_rng(0)

    def draw(*shape):
        return rng.standard_normal(shape).astype(F4)

    q, k, v = draw(2, 5, 4, 8), draw(2, 6, 2, 8), draw(2, 6, 2, 4)
    o, lse = onchip.ops.attention_forward(q, k, v)
    made = {
        "attention_forward": dict(q=q, k=k, v=v),
        "attention_backward": dict(d_o=o, q=q, k=k, v=v, o=o, lse=lse),
        "attention_decode": dict(
            q=q,
            k_cache=draw(2, 9, 2, 8),
            v_cache=draw(2, 9, 2, 4),
            cache_seqlens=np.array([5, 6], I4),
            k_new=draw(2, 1, 2, 8),
            v_new=draw(2, 1, 2, 4),
            rotary_cos=draw(20, 2),
            rotary_sin=draw(20, 2),
        ),
        "merge": dict(o1=o, lse1=lse, o2=o, lse2=lse),
    }
    sizes = Sizes()
    for op in TENSORS:
        variant = max((v for v in VARIANTS if v.op == op), key=lambda v: len(v.tensors()))
        options = dict(variant.options)
        tensors = linear_cases.draw(rng, variant, sizes, F4)
        made[f"{op}_forward"] = tensors | options
        d_o = onchip.ops.__dict__[f"{op}_forward"](**tensors, **options)[0]
        made[f"{op}_backward"] = dict(d_o=d_o) | tensors | options
        token = linear_cases.draw(rng, variant, sizes, F4, lead=(2,), is_step=True)
        state = linear_cases.draw_state(rng, variant, sizes, 2, F4, variant.layout({}))
        made[f"{op}_step"] = token | options | dict(state=state)
    x, weight = draw(2, 5, 6), draw(6, 3)
    gated = dict(x=x, gate=x, activation="silu")
    return made | {
        "causal_conv1d_forward": dict(x=x, weight=weight),
        "causal_conv1d_backward": dict(d_y=x, x=x, weight=weight),
        "causal_conv1d_step": dict(x=draw(2, 6), weight=weight, state=draw(2, 6, 3)),
        "l2norm_forward": dict(x=x),
        "l2norm_backward": dict(d_y=x, x=x),
        "rms_norm_gated_forward": gated,
        "rms_norm_gated_backward": dict(d_y=x) | gated,
    }
