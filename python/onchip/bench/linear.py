"""Linear attention's implementations: onchip's operators, and the chunked formulation that a user
of PyTorch would write (Yang et al. 2024, "Parallelizing Linear Transformers with the Delta Rule
over Sequence Length", and its gated forms)."""

import math
from collections.abc import Callable
from typing import Any

import numpy as np

from onchip.bench.cases import Case, LinearCase
from onchip.bench.inputs import Array, Inputs
from onchip.bench.prepared import Prepared, Skipped, from_torch, planned, sync_cuda, to_torch

_CHUNK = 64
_GRADIENTS = ("dq", "dk", "dv")


def _result_bytes(case: LinearCase) -> int:
    o_bytes = case.element_bytes * math.prod(case.shape_v)
    gradient_bytes = 2 * case.element_bytes * math.prod(case.shape) + o_bytes
    gradient_bytes += case.gate_bytes
    return {"bwd": gradient_bytes, "fwdbwd": o_bytes + gradient_bytes}.get(case.phase, o_bytes)


def prepare_onchip(case: LinearCase, inputs: Inputs, backend: str) -> Prepared:
    import onchip

    ops: Any = onchip.ops
    forward = getattr(ops, f"{case.operator}_forward", None)
    if forward is None:
        raise Skipped(f"this onchip has no {case.operator}")
    on_gpu = backend.startswith("cuda.")

    def given(array: Array) -> Any:
        return to_torch(array, "cuda") if on_gpu else array

    arrays = [given(x) for x in (inputs.q, inputs.k, inputs.v, *inputs.more.values())]
    options = {"backend": backend}
    plan = planned(f"{case.operator}_forward", *arrays, **options)
    call: Callable[[], Any]
    names: tuple[str, ...]

    def run_forward() -> Any:
        return forward(*arrays, **options)

    call, names = run_forward, ("o",)
    if case.phase != "fwd":
        backward, d_o = getattr(ops, f"{case.operator}_backward"), given(inputs.d_o)
        back_plan = planned(f"{case.operator}_backward", d_o, *arrays, **options)
        names = _GRADIENTS

        def run_backward() -> Any:
            return backward(d_o, *arrays, **options)

        def run_both() -> Any:
            run_forward()
            return run_backward()

        call = run_backward if case.phase == "bwd" else run_both
        kernels = back_plan[1] if case.phase == "bwd" else f"{plan[1]} + {back_plan[1]}"
        plan = (back_plan[0], kernels)
    return Prepared(
        call=call,
        outputs=lambda made: {
            name: from_torch(array) if on_gpu else array
            for name, array in zip(names, made, strict=False)
        },
        result_bytes=_result_bytes(case),
        backend=plan[0],
        kernel=plan[1],
        finish=sync_cuda if on_gpu else lambda: None,
        in_host_memory=not on_gpu,
    )


def chunked(q: Any, k: Any, v: Any, log_decay: Any = None, beta: Any = None) -> Any:
    """o of an operator of LINEAR_GATES, tensors [batch, T, heads, ..] of PyTorch, T a multiple of
    _CHUNK: within a chunk everything is a product of matrices, from chunk to chunk a state is
    handed on. Where channels decay, keys are divided by their decay since the chunk's begin, which
    takes decays as moderate as those of a case."""
    import torch

    batch, tokens, heads, dim = q.shape

    def chunks(x: Any) -> Any:
        """[batch, heads, chunk, row, ..]"""
        return x.transpose(1, 2).reshape(batch, heads, tokens // _CHUNK, _CHUNK, *x.shape[3:])

    q, k, v = chunks(q) * dim**-0.5, chunks(k), chunks(v)
    later = torch.ones(_CHUNK, _CHUNK, dtype=torch.bool, device=q.device).triu(1)
    if log_decay is not None and log_decay.ndim == 4:
        sums = chunks(log_decay).cumsum(-2)
        decayed, k_back = sums.exp(), k * (-sums).exp()
        scores = (q * decayed @ k_back.mT).masked_fill(later, 0.0)
        pairs = k * decayed @ k_back.mT
    else:
        rows = q.new_zeros(q.shape[:-1]) if log_decay is None else chunks(log_decay).cumsum(-1)
        decay = (rows[..., :, None] - rows[..., None, :]).masked_fill(later, -torch.inf).exp()
        sums = rows[..., None]
        decayed = sums.exp()
        scores = q @ k.mT * decay
        pairs = k @ k.mT * decay if beta is not None else None
    q_in = q * decayed
    k_out = k * (sums[..., -1:, :] - sums).exp()
    kept = decayed[..., -1, :, None]
    erased = None
    if beta is not None:
        weight = chunks(beta)[..., None]
        system = (weight * pairs).tril(-1)
        right = torch.cat([weight * v, weight * decayed * k], -1)
        solved = torch.linalg.solve_triangular(system, right, upper=False, unitriangular=True)
        v, erased = solved.split([v.shape[-1], dim], -1)
    state = q.new_zeros(batch, heads, dim, v.shape[-1])
    parts = []
    # Unbound at once: the gradient of a chunk that is indexed would be a tensor of all chunks.
    erased_of = [None] * q.shape[2] if erased is None else erased.unbind(2)
    of_chunk = (x.unbind(2) for x in (q_in, k_out, v, scores, kept))
    for q_n, k_n, written, scores_n, kept_n, erased_n in zip(*of_chunk, erased_of, strict=True):
        if erased_n is not None:
            written = written - erased_n @ state
        parts.append(q_n @ state + scores_n @ written)
        state = kept_n * state + k_n.mT @ written
    return torch.cat(parts, 2).transpose(1, 2)


def prepare_torch(case: Case, inputs: Inputs) -> Prepared:
    """On the CPU."""
    import torch

    if not isinstance(case, LinearCase):
        raise Skipped("the chunked formulation is of linear attention")
    if case.dtype not in ("fp32", "fp64"):
        raise Skipped("the chunked formulation is here in fp32 and fp64 only")
    if case.seqlen % _CHUNK or case.num_heads != case.num_heads_kv:
        raise Skipped(f"the chunked formulation is here for whole chunks of {_CHUNK} and no groups")
    leaves = [to_torch(x, "cpu") for x in (inputs.q, inputs.k, inputs.v)]
    gates = {name: to_torch(x.astype(inputs.q.dtype), "cpu") for name, x in inputs.more.items()}

    def prepared(call: Callable[[], Any], outputs: Any, what: str) -> Prepared:
        return Prepared(call, outputs, _result_bytes(case), "cpu", f"chunks of {_CHUNK}{what}")

    def inference() -> Any:
        with torch.inference_mode():
            return chunked(*leaves, **gates)

    if case.phase == "fwd":
        return prepared(inference, lambda o: {"o": from_torch(o)}, "")
    every = [x.requires_grad_() for x in (*leaves, *gates.values())]
    assert inputs.d_o is not None
    d_o = to_torch(inputs.d_o, "cpu")

    def gradients(made: Any) -> dict[str, Array]:
        return dict(zip(_GRADIENTS, map(from_torch, made), strict=False))

    if case.phase == "fwdbwd":
        return prepared(
            lambda: torch.autograd.grad(chunked(*leaves, **gates), every, d_o),
            gradients,
            ", forward and backward",
        )
    o = chunked(*leaves, **gates)
    return prepared(
        lambda: torch.autograd.grad(o, every, d_o, retain_graph=True), gradients, ", backward"
    )


def needed_bytes(case: Case) -> int:
    """The formulation's own tensors: several of each chunk's square, and of the inputs."""
    squares = case.batch * case.num_heads * case.seqlen * _CHUNK * case.element_bytes
    return 16 * squares + 8 * case.tensor_bytes


def exact(case: LinearCase, inputs: Inputs) -> dict[str, Array]:
    """Results in fp64, by onchip's reference, of the first sequence's first key head and its value
    heads."""
    import onchip

    group = case.num_heads // case.num_heads_kv

    def part(x: Array, heads: int) -> Array:
        return np.ascontiguousarray(x[:1, :, :heads]).astype(np.float64)

    arrays = [part(inputs.q, 1), part(inputs.k, 1), part(inputs.v, group)]
    arrays += [part(x, group) for x in inputs.more.values()]
    ops: Any = onchip.ops
    if not hasattr(ops, f"{case.operator}_forward"):
        raise Skipped(f"this onchip has no {case.operator} to compare with")
    if case.phase == "fwd":
        made = getattr(ops, f"{case.operator}_forward")(*arrays, backend="reference")
        return {"o": made[0]}
    backward = getattr(ops, f"{case.operator}_backward")
    made = backward(part(inputs.d_o, group), *arrays, backend="reference")
    return {name: getattr(made, name) for name in _GRADIENTS}
