"""What the library says about itself and about a call."""

import inspect
import json
from functools import partial
from typing import Any

from onchip import _calls, _native, ops
from onchip._linear import calls as _linear
from onchip._linear import helpers
from onchip._text import nearest
from onchip._values import described
from onchip.errors import InvalidArgument

_OPERATORS = (
    {
        op.name: (getattr(ops, op.name), partial(_calls.explain, op))
        for op in (
            _calls.ATTENTION_FORWARD,
            _calls.ATTENTION_BACKWARD,
            _calls.ATTENTION_DECODE,
            _calls.MERGE,
        )
    }
    | {op.name: (getattr(ops, op.name), partial(helpers.explain, op)) for op in helpers.OPERATORS}
    | {
        f"{row.name}_{phase}": (
            getattr(ops, f"{row.name}_{phase}"),
            partial(_linear.explain, row, phase),
        )
        for row in _linear.ROWS
        for phase in ("forward", "backward", "step")
    }
)


def explain(operator: str, /, *args: Any, **kwargs: Any) -> str:
    """Which backend and kernel would take a call, why each other one would not, how much workspace
    it needs, and which arrays Python would copy first.

    operator: a function of onchip.ops, "attention_forward" say. The other arguments are the
    operator's own, with an `ArraySpec` in place of any array whose values do not exist yet. Values
    of large arrays are not looked at; those of lengths, tables and dropout_rng in host
    memory are.

    A call that breaks the contract raises InvalidArgument, as the operator would. One that no
    backend takes does not raise: the text has the reasons.
    """
    if not isinstance(operator, str) or operator not in _OPERATORS:
        raise InvalidArgument(
            f"explain: operator: got {described(operator)}, wanted a function of onchip.ops"
            + (nearest(operator, _OPERATORS, most=3) if isinstance(operator, str) else "")
            + "; all of them: onchip.ops.__all__, docs/operators.md"
        )
    function, explained = _OPERATORS[operator]
    bound = inspect.signature(function).bind(*args, **kwargs)
    bound.apply_defaults()
    return explained(bound.arguments)


def describe() -> dict[str, Any]:
    """The library: version, compiler, backends with availability and reason, threads, settings with
    their values and origin."""
    described: dict[str, Any] = json.loads(_native.describe())
    return described


def set_num_threads(num_threads: int) -> None:
    """Threads that CPU backends use at most, the caller's included; results never depend on it.

    0 restores the start value: ONCHIP_NUM_THREADS, else the number of CPUs this process may use.
    Raises InvalidArgument if negative or above 1024.
    """
    _native.set_num_threads(num_threads)


def get_num_threads() -> int:
    """Threads that CPU backends use at most, the caller's included."""
    return _native.get_num_threads()
