"""How PyTorch's operators become calls of onchip: the rows of the table of linear operators, and
what stands beside them, convolution and norms.

A state of several parts is as many tensors in a schema: initial_state_0, initial_state_1, ...
"""

from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor

from onchip import _calls, ops
from onchip._linear import calls, helpers
from onchip.torch._registered import (
    LENGTHS,
    Arguments,
    RegisteredOperator,
    Signature,
    options_of,
)


def parts_of(name: str, count: int) -> tuple[str, ...]:
    """A state's names in a schema."""
    if count == 1:
        return (name,)
    return tuple(f"{name}_{part}" for part in range(count))


class LinearOperator(RegisteredOperator):
    """A row of the table."""

    def __init__(
        self, row: calls.Row, backward: Callable[..., Any], step: Callable[..., Any]
    ) -> None:
        """Options are those of onchip.ops' functions; mlstm's forward alone lacks one."""
        self.row = row
        # As many parts as a state has at most; the third, a stabiliser, has no gradient.
        self.parts = row.state_parts({"gate": "exp", "normalize": True})
        self.d_parts = min(self.parts, 2)
        tensors, states = tuple(row.tensors), parts_of("state", self.parts)
        super().__init__(
            Signature(
                name=row.name,
                required=frozenset(set(row.tensors) - set(row.optional)),
                differentiable=(*tensors, *parts_of("initial_state", self.parts)),
                integers=LENGTHS,
                options=options_of(backward, tensors),
                forward_options=("output_final_state",),
                cotangents=("d_o", *parts_of("d_final_state", self.d_parts)),
                results=("o", *calls.part_names("final_state")[: self.parts]),
                gradients=(
                    *("d" + name for name in tensors),
                    *calls.part_names("dinitial_state")[: self.parts],
                ),
                step_tensors=(*tensors, *states, "state_indices"),
                states=states,
                step_options=options_of(step, tensors),
                operands=tuple(x for x, role in row.tensors.items() if role in ("q", "k", "v")),
            )
        )

    def prepared(self, phase: str, given: Arguments) -> tuple[_calls.Operator, Arguments]:
        """The table's calls take states as tuples."""
        states = {
            "forward": ("initial_state",),
            "backward": ("initial_state", "d_final_state"),
            "step": ("state",),
        }
        for state in states[phase]:
            parts = [given.pop(name) for name in parts_of(state, self.parts) if name in given]
            while parts and parts[-1] is None:
                parts.pop()
            given[state] = tuple(parts) or None
        return calls.prepared(self.row, phase, given)

    def with_gradient(self, options: Arguments) -> int:
        if not options["output_final_state"]:
            return 0
        return min(self.row.state_parts(options), self.d_parts)

    def zero_cotangent(self, tensors: Mapping[str, Tensor]) -> Tensor:
        first, v = tensors[self.row.first], tensors[self.row.named("v")]
        return first.new_zeros(v.shape[-1:]).expand(self.row.output_shape(first.shape, v.shape))


class HelperOperator(RegisteredOperator):
    """Short convolution and norms: operators that make their calls as they are."""

    def __init__(self, name: str, tensors: tuple[str, ...], *, is_recurrence: bool) -> None:
        self.calls = {op.name.removeprefix(f"{name}_"): op for op in helpers.OPERATORS}
        self.final = is_recurrence
        state = ("initial_state",) if is_recurrence else ()
        differentiable = tensors + state
        own = self.calls["forward"]
        super().__init__(
            Signature(
                name=name,
                required=frozenset(own.arrays),
                differentiable=differentiable,
                integers=own.integer_arrays,
                options=options_of(getattr(ops, f"{name}_forward"), tensors),
                forward_options=("output_final_state",) if is_recurrence else (),
                cotangents=("d_y", "d_final_state") if is_recurrence else ("d_y",),
                results=("y", "final_state") if is_recurrence else ("y",),
                gradients=tuple("d" + x for x in differentiable),
                step_tensors=(*tensors, "state", "state_indices") if is_recurrence else (),
                states=("state",) if is_recurrence else (),
                step_options=options_of(ops.causal_conv1d_step, tensors) if is_recurrence else (),
            )
        )

    def prepared(self, phase: str, given: Arguments) -> tuple[_calls.Operator, Arguments]:
        op = self.calls[phase]
        if given.pop("output_final_state", True):
            return op, given

        def without_final(views: _calls.Views) -> list[_calls.Output]:
            return [output for output in op.outputs(views) if output.name != "final_state"]

        return op._replace(outputs=without_final), given

    def with_gradient(self, options: Arguments) -> int:
        return int(self.final and options["output_final_state"])

    def zero_cotangent(self, tensors: Mapping[str, Tensor]) -> Tensor:
        x = tensors["x"]
        return x.new_zeros(x.shape[-1:]).expand(x.shape)
