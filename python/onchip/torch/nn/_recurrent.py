"""What recurrent layers share: rows that belong to sequences, the state that a layer carries from
call to call, and the short convolution before a recurrence."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
from torch import Tensor

from onchip._values import refuse
from onchip.errors import InvalidArgument
from onchip.torch._arguments import integers, require_tensor
from onchip.torch._linear import causal_conv1d, causal_conv1d_step

Lengths: TypeAlias = Tensor | Sequence[int]


@dataclass
class RecurrentState:
    """What a layer carries from one call to the next: row n is sequence n's.

    Made by a layer's `new_state`; the layer's forward reads it and leaves in it what the next call
    has to know. Under `torch.no_grad()` its tensors are written in place, so that a step may be
    captured in a CUDA graph; with gradients they are replaced by new ones, through which a loss of
    the next call reaches the parameters of this one (`detach` ends that).

    Attributes:
        recurrent: the operator's state, a tuple where it has several parts; float32 (float64 of
            float64 layers).
        convolution: for each short convolution its last inputs, [num_seqs, channels, width].
        seen: tokens so far, int64 [num_seqs].
    """

    recurrent: Tensor | tuple[Tensor, ...]
    convolution: tuple[Tensor, ...]
    seen: Tensor

    def _changed(self, change: Callable[[Tensor], Tensor]) -> "RecurrentState":
        recurrent = self.recurrent
        return RecurrentState(
            tuple(map(change, recurrent)) if isinstance(recurrent, tuple) else change(recurrent),
            tuple(map(change, self.convolution)),
            change(self.seen),
        )

    def select(self, rows: Lengths) -> "RecurrentState":
        """A state of these sequences in this order, in memory of its own: for batches that change,
        and for beams."""
        indices = integers("RecurrentState", "rows", rows).to(self.seen.device)
        return self._changed(lambda x: x.index_select(0, indices))

    def detach(self) -> "RecurrentState":
        """The same tensors without their history."""
        return self._changed(lambda x: x.detach())

    def keep(
        self, recurrent: Tensor | tuple[Tensor, ...], convolution: Sequence[Tensor], seen: Tensor
    ) -> None:
        """Takes over what a call ended with."""
        made = RecurrentState(recurrent, tuple(convolution), seen)
        if torch.is_grad_enabled():
            self.recurrent, self.convolution, self.seen = made.recurrent, made.convolution, seen
            return
        for own, new in zip(self.tensors(), made.tensors(), strict=True):
            if own is not new:
                own.copy_(new)

    def tensors(self) -> tuple[Tensor, ...]:
        recurrent = self.recurrent
        parts = recurrent if isinstance(recurrent, tuple) else (recurrent,)
        return (*parts, *self.convolution, self.seen)


class Rows:
    """Which sequence each row of x belongs to: [batch, T, dim], or packed [total, dim] with
    cu_seqlens; seqlens are used lengths."""

    def __init__(
        self,
        layer: str,
        x: Tensor,
        state: RecurrentState | None,
        cu_seqlens: Lengths | None,
        seqlens: Lengths | None,
    ) -> None:
        require_tensor(layer, "x", x)
        if state is not None and not isinstance(state, RecurrentState):
            refuse(layer, "state", state, "what the layer's new_state made, or None")
        self.packed = cu_seqlens is not None
        self.cu_seqlens = self.seqlens = None
        if cu_seqlens is not None:
            self.cu_seqlens = integers(layer, "cu_seqlens", cu_seqlens).to(x.device)
        if seqlens is not None:
            self.seqlens = integers(layer, "seqlens", seqlens).to(x.device)
        if x.dim() != (2 if self.packed else 3):
            wanted = "[total, embed_dim] (cu_seqlens given)" if self.packed else "[batch, T, ..]"
            raise InvalidArgument(f"{layer}: x: got shape {tuple(x.shape)}, wanted {wanted}")
        self.num_seqs = x.shape[0] if self.cu_seqlens is None else self.cu_seqlens.shape[0] - 1
        if state is not None and state.seen.shape[0] != self.num_seqs:
            raise InvalidArgument(
                f"{layer}: state: got one of {state.seen.shape[0]} sequences, wanted "
                f"{self.num_seqs}, as many as x holds"
            )
        self._place(x)

    def _place(self, x: Tensor) -> None:
        """Of each row its sequence (packed), its position there, and whether it is used; of each
        sequence its length."""
        slots = torch.arange(x.shape[-2], device=x.device)
        self.used: Tensor | None = None
        self.sequence = slots
        if self.cu_seqlens is None:
            self.position = slots.expand(x.shape[:-1])
            self.length = slots.new_full((self.num_seqs,), x.shape[1])
            if self.seqlens is not None:
                self.length = self.seqlens.to(torch.int64)
                self.used = slots < self.length[:, None]
            return
        begin = self.cu_seqlens.to(torch.int64)
        self.length = begin.diff() if self.seqlens is None else self.seqlens.to(torch.int64)
        # Rows behind the last sequence belong to none: they are taken for the last one's tail.
        self.sequence = torch.searchsorted(begin[1:], slots, right=True)
        self.sequence = self.sequence.clamp(max=max(self.num_seqs - 1, 0))
        if self.num_seqs == 0:
            self.position, self.used = slots, torch.zeros_like(slots, dtype=torch.bool)
            return
        self.position = slots - begin[self.sequence]
        self.used = self.position < self.length[self.sequence]

    def cleared(self, x: Tensor) -> Tensor:
        """Rows that are not used as zeros: whatever they hold reaches no result and no gradient."""
        if self.used is None:
            return x
        return torch.where(self.used[..., None], x, x.new_zeros(()))

    def absolute_position(self, state: RecurrentState | None) -> Tensor:
        """Of each row, tokens seen before included."""
        if state is None or self.num_seqs == 0:
            return self.position
        seen = state.seen[:, None] if not self.packed else state.seen[self.sequence]
        return self.position + seen

    def is_step(self) -> bool:
        """Whether this is one token of each sequence and nothing is differentiated."""
        return (
            not self.packed
            and self.seqlens is None
            and self.position.shape[1] == 1
            and not torch.is_grad_enabled()
        )


class ShortConvolution(torch.nn.Module):  # type: ignore[misc, unused-ignore]
    """Causal convolution of each channel by itself over few tokens, then SiLU.

    Parameters are those of a depthwise `torch.nn.Conv1d`: weight [channels, 1, width], and bias.
    """

    def __init__(
        self,
        channels: int,
        width: int,
        bias: bool,
        device: Any = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        if width < 1:
            raise InvalidArgument(f"ShortConvolution: width: got {width}, wanted at least 1")
        self.width = width
        self.weight = torch.nn.Parameter(
            torch.empty((channels, 1, width), device=device, dtype=dtype)
        )
        self.bias = (
            torch.nn.Parameter(torch.empty(channels, device=device, dtype=dtype)) if bias else None
        )
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """As `torch.nn.Conv1d`."""
        bound = 1 / math.sqrt(self.width)
        torch.nn.init.uniform_(self.weight, -bound, bound)
        if self.bias is not None:
            torch.nn.init.uniform_(self.bias, -bound, bound)

    def new_state(self, num_seqs: int) -> Tensor:
        """That of sequences that have not begun: their last inputs, [num_seqs, channels, width]."""
        return self.weight.new_zeros((num_seqs, self.weight.shape[0], self.width))

    def forward(self, x: Tensor, rows: Rows, before: Tensor | None) -> tuple[Tensor, Any]:
        """The result in x's shape, and the state after `before`: None without one. A step writes
        it in place."""
        taps: dict[str, Any] = dict(weight=self.weight.squeeze(1), bias=self.bias)
        if before is not None and rows.is_step() and before.dtype == x.dtype:
            y = causal_conv1d_step(x.squeeze(1), **taps, activation="silu", state=before)
            return y.unsqueeze(1), before
        result: tuple[Tensor, Any] = causal_conv1d(
            x,
            **taps,
            activation="silu",
            initial_state=None if before is None else before.to(x.dtype),
            output_final_state=before is not None,
            cu_seqlens=rows.cu_seqlens,
            seqlens=rows.seqlens,
        )
        return result


def recur(
    function: Callable[..., Any],
    step: Callable[..., Any],
    rows: Rows,
    state: RecurrentState | None,
    tokens: Mapping[str, Tensor],
    constants: Mapping[str, Tensor],
    *,
    chunk_len: int | None,
    **options: Any,
) -> tuple[Tensor, Any]:
    """The recurrence over the tokens, by its step where one is enough, which writes the state in
    place; o and the state after it."""
    if state is not None and rows.is_step():
        one = {name: x.squeeze(1) for name, x in tokens.items()}
        o = step(**one, **constants, state=state.recurrent, **options)
        return o.unsqueeze(1), state.recurrent
    result: tuple[Tensor, Any] = function(
        **tokens,
        **constants,
        initial_state=None if state is None else state.recurrent,
        output_final_state=state is not None,
        cu_seqlens=rows.cu_seqlens,
        seqlens=rows.seqlens,
        chunk_len=chunk_len,
        **options,
    )
    return result


def wide_dtype(dtype: torch.dtype) -> torch.dtype:
    """Of states, and of parameters that decide how long a layer remembers."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def time_step_bias(
    count: int, lowest: float, highest: float, device: Any, dtype: torch.dtype
) -> Tensor:
    """softplus of it is spread evenly in logarithm over [lowest, highest]."""
    spread = torch.rand(count, device=device, dtype=dtype)
    steps = (math.log(lowest) + spread * math.log(highest / lowest)).exp().clamp(min=1e-4)
    return steps + torch.log(-torch.expm1(-steps))


def remembers(x: Tensor) -> torch.nn.Parameter:
    """A parameter that no optimiser should pull towards 0: published training code looks for the
    mark."""
    parameter = torch.nn.Parameter(x)
    parameter._no_weight_decay = True
    return parameter
