"""What can compute a case: each takes the inputs as it likes them and gives a call to time."""

import importlib.util
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from onchip.bench import linear
from onchip.bench.cases import AttentionCase, Case, LinearCase, StepCase
from onchip.bench.inputs import Array, Inputs, paged
from onchip.bench.prepared import Prepared, Skipped, from_torch, planned, sync_cuda, to_torch


@dataclass(frozen=True)
class Implementation:
    name: str
    # Import name of the package that has it.
    package: str
    # Raises Skipped for what it has not.
    prepare: Callable[[Case, Inputs], Prepared]
    # Memory below which the call would only exhaust the machine.
    needed_bytes: Callable[[Case], int]

    @property
    def installed(self) -> bool:
        return importlib.util.find_spec(self.package) is not None


_GRADIENTS = ("dq", "dk", "dv")


def _result_bytes(case: Case) -> int:
    """o and lse, or dq, dk, dv, or all of them."""
    size = case.element_bytes
    o_bytes = size * math.prod(case.shape) + 4 * math.prod(case.shape[:-1])
    gradient_bytes = size * (math.prod(case.shape) + 2 * math.prod(case.shape_kv))
    return {"bwd": gradient_bytes, "fwdbwd": o_bytes + gradient_bytes}.get(case.phase, o_bytes)


def _twice_the_tensors(case: Case) -> int:
    return 2 * case.tensor_bytes


# ---- the formula in NumPy -----------------------------------------------------------------------


def plain_attention(q: Array, k: Array, v: Array, causal: bool) -> Array:
    """softmax(q k^T / sqrt(head_dim)) v, one head at a time and in place.

    One score matrix and one mask are alive at a time: the least that the formula takes when it is
    written with matrix products. The sums divide the rows of o, not the scores.
    """
    o = np.empty(q.shape, q.dtype)
    scale = q.dtype.type(q.shape[-1] ** -0.5)
    rows, columns = np.arange(q.shape[1]), np.arange(k.shape[1])
    hidden = np.less.outer(rows, columns) if causal else None
    scores = np.empty((q.shape[1], k.shape[1]), q.dtype)
    for sequence in range(q.shape[0]):
        for head in range(q.shape[2]):
            at = (sequence, slice(None), head)
            np.matmul(q[at] * scale, k[at].T, out=scores)
            if hidden is not None:
                np.copyto(scores, -np.inf, where=hidden)
            scores -= scores.max(axis=1, keepdims=True)
            np.exp(scores, out=scores)
            o[at] = (scores @ v[at]) / scores.sum(axis=1, keepdims=True)
    return o


def _prepare_plain(case: Case, inputs: Inputs) -> Prepared:
    q, k, v = inputs.q, inputs.k, inputs.v
    if not isinstance(case, AttentionCase) or case.phase != "fwd":
        raise Skipped("the plain formula is here for the forward pass only")
    if case.dtype not in ("fp32", "fp64"):
        raise Skipped("NumPy multiplies matrices in fp32 and fp64 only")
    if case.num_heads != case.num_heads_kv or case.window_left >= 0:
        raise Skipped("the plain formula is here without shared key heads and windows")
    return Prepared(
        call=lambda: plain_attention(q, k, v, case.causal),
        outputs=lambda o: {"o": o},
        result_bytes=q.nbytes,
        backend="numpy",
        kernel="plain formula, head by head",
    )


def _plain_bytes(case: Case) -> int:
    scores = case.element_bytes * case.seqlen**2
    mask = case.seqlen**2 if isinstance(case, AttentionCase) and case.causal else 0
    return scores + mask + 3 * case.tensor_bytes


# ---- onchip -------------------------------------------------------------------------------------


def _prepare_onchip(backend: str) -> Callable[[Case, Inputs], Prepared]:
    on_gpu = backend.startswith("cuda.")

    def given(array: Array) -> Any:
        return to_torch(array, "cuda") if on_gpu else array

    def taken(array: Any) -> Array:
        return from_torch(array) if on_gpu else array

    def named(call: Callable[[], Any], names: tuple[str, ...], case: Case, plan: Any) -> Prepared:
        return Prepared(
            call=call,
            outputs=lambda made: {
                name: taken(array) for name, array in zip(names, made, strict=False)
            },
            result_bytes=_result_bytes(case),
            backend=plan[0],
            kernel=plan[1],
            finish=sync_cuda if on_gpu else lambda: None,
            in_host_memory=not on_gpu,
        )

    def prepare(case: Case, inputs: Inputs) -> Prepared:
        import onchip

        if isinstance(case, LinearCase):
            return linear.prepare_onchip(case, inputs, backend)
        ops: Any = onchip.ops
        # Forced: a figure of one backend must not come from another.
        options: dict[str, Any] = {"backend": backend}
        q = given(inputs.q)
        if isinstance(case, StepCase):
            if not hasattr(ops, "attention_decode"):
                raise Skipped("this onchip has no attention_decode")
            k, v = inputs.k, inputs.v
            if case.page_size is not None:
                table = inputs.more["page_table"]
                k, v = (paged(x, table, case.page_size) for x in (k, v))
                options["page_table"] = given(table)
            lengths = np.full(case.batch, case.seqlen, np.int32)
            arrays, options["cache_seqlens"] = (q, given(k), given(v)), given(lengths)
            plan = planned("attention_decode", *arrays, **options)
            return named(lambda: ops.attention_decode(*arrays, **options), ("o",), case, plan)

        arrays = (q, given(inputs.k), given(inputs.v))
        options["causal"] = case.causal
        if case.window_left >= 0:
            options["window"] = (case.window_left, -1)
        forward_plan = planned("attention_forward", *arrays, **options)
        if case.phase == "fwd":
            return named(
                lambda: ops.attention_forward(*arrays, **options), ("o",), case, forward_plan
            )
        d_o = given(inputs.d_o)
        o, lse = ops.attention_forward(*arrays, **options)
        plan = planned("attention_backward", d_o, *arrays, o, lse, **options)
        if case.phase == "bwd":
            return named(
                lambda: ops.attention_backward(d_o, *arrays, o, lse, **options),
                _GRADIENTS,
                case,
                plan,
            )

        def both() -> Any:
            made = ops.attention_forward(*arrays, **options)
            return ops.attention_backward(d_o, *arrays, *made, **options)

        return named(both, _GRADIENTS, case, (plan[0], f"{forward_plan[1]} + {plan[1]}"))

    return prepare


# ---- PyTorch ------------------------------------------------------------------------------------


def _prepare_torch(device: str) -> Callable[[Case, Inputs], Prepared]:
    def prepare(case: Case, inputs: Inputs) -> Prepared:
        import torch

        if isinstance(case, LinearCase):
            raise Skipped("scaled_dot_product_attention is not linear attention")
        if isinstance(case, AttentionCase) and case.window_left >= 0:
            raise Skipped("scaled_dot_product_attention has no window")
        if isinstance(case, StepCase) and case.page_size is not None:
            raise Skipped("scaled_dot_product_attention has no paged cache")
        # Its own layout, [batch, heads, seqlen, head_dim], contiguous: that of the inputs' memory.
        q, k, v = (
            to_torch(np.ascontiguousarray(x.transpose(0, 2, 1, 3)), device)
            for x in (inputs.q, inputs.k, inputs.v)
        )
        options: dict[str, Any] = {"is_causal": isinstance(case, AttentionCase) and case.causal}
        if case.num_heads != case.num_heads_kv:
            options["enable_gqa"] = True
        attention = torch.nn.functional.scaled_dot_product_attention

        def back(tensor: Any) -> Array:
            return from_torch(tensor).transpose(0, 2, 1, 3)

        def prepared(call: Callable[[], Any], outputs: Any, what: str) -> Prepared:
            return Prepared(
                call=call,
                outputs=outputs,
                result_bytes=_result_bytes(case),
                backend=device,
                kernel=f"scaled_dot_product_attention{what}",
                finish=sync_cuda if device == "cuda" else lambda: None,
                in_host_memory=device != "cuda",
            )

        def inference() -> Any:
            with torch.inference_mode():
                return attention(q, k, v, **options)

        if case.phase in ("fwd", "step"):
            return prepared(inference, lambda o: {"o": back(o)}, "")

        leaves = [x.requires_grad_() for x in (q, k, v)]
        assert inputs.d_o is not None
        d_o = to_torch(np.ascontiguousarray(inputs.d_o.transpose(0, 2, 1, 3)), device)

        def gradients(made: Any) -> dict[str, Array]:
            return dict(zip(_GRADIENTS, map(back, made), strict=True))

        if case.phase == "fwdbwd":
            return prepared(
                lambda: torch.autograd.grad(attention(*leaves, **options), leaves, d_o),
                gradients,
                ", forward and backward",
            )
        o = attention(*leaves, **options)
        return prepared(
            lambda: torch.autograd.grad(o, leaves, d_o, retain_graph=True), gradients, ", backward"
        )

    return prepare


IMPLEMENTATIONS = {
    implementation.name: implementation
    for implementation in (
        Implementation("numpy:plain", "numpy", _prepare_plain, _plain_bytes),
        *(
            Implementation(f"onchip:{name}", "onchip", _prepare_onchip(name), _twice_the_tensors)
            for name in ("cuda.sm90", "cuda.sm80", "cpu", "reference")
        ),
        Implementation("torch:chunked", "torch", linear.prepare_torch, linear.needed_bytes),
        Implementation("torch:sdpa", "torch", _prepare_torch("cpu"), _twice_the_tensors),
        Implementation("torch:sdpa_cuda", "torch", _prepare_torch("cuda"), _twice_the_tensors),
    )
}


def absent(name: str) -> str | None:
    """Why the implementation cannot run here at all; None if it can."""
    import onchip

    implementation = IMPLEMENTATIONS[name]
    if not implementation.installed:
        return f"{implementation.package} is not installed"
    if implementation.package == "onchip":
        rows = {f"onchip:{row['name']}": row for row in onchip.describe()["backends"]}
        if name not in rows:
            return "not in the onchip that is installed"
        if not rows[name]["available"]:
            return str(rows[name]["detail"])
    if "cuda" in name:
        if importlib.util.find_spec("torch") is None:
            return "torch, whose arrays on the GPU the calls take, is not installed"
        import torch

        if not torch.cuda.is_available():
            return "this torch does not see a GPU"
    return None
