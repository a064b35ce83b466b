"""Random calls of the operators on every backend, judged against fp64 (docs/semantics.md, section
5)."""

import secrets
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import ml_dtypes
import numpy as np

import onchip
from onchip import _kinds
from onchip._text import aligned, nearest
from onchip.cli.progress import progress
from onchip.cli.settings import refuse_wrong_settings
from onchip.cli.signature import Failure
from onchip.errors import InvalidArgument, Unsupported
from onchip.oracle import cases, compare, decode_cases, linear_cases, linear_compare

Case = Any  # of onchip.oracle.cases
Result = Any  # what the operator returned, in NumPy arrays
Put = Callable[[Any], Any]

DTYPES: dict[str, Any] = {
    "fp64": np.float64,
    "fp32": np.float32,
    "fp16": np.float16,
    "bf16": ml_dtypes.bfloat16,
}
_SEEDS = 2**32
_DEFAULT_COUNT = 200


# ---- operators ----------------------------------------------------------------------------------


@dataclass(frozen=True)
class Subject:
    """How an operator's calls are drawn, made and judged."""

    # Of these dtypes, with sequences at most so long (None: as the case likes).
    draw: Callable[[cases.Integer, Sequence[Any], int | None], Case]
    # On a backend, with what turns NumPy arrays into its own.
    call: Callable[[Case, str, Put], Any]
    judge: Callable[[Result, Case], list[compare.Deviation]]


def _draw_attention(integer: cases.Integer, dtypes: Sequence[Any], longest: int | None) -> Case:
    # Options are refused by the fastest kernels, and ragged head dims by some: each case in three
    # has few of them.
    if integer(0, 2) > 0:
        return cases.attention_case(integer, dtypes, longest)
    few = ("softcap", "window", *cases.PER_PAIR, "alibi_slopes", "segments", "sink", "dropout")
    head_dims = (8, 16, 64, 96, 128)
    return cases.attention_case(integer, dtypes, longest, without=few, head_dims=head_dims)


def _forward(case: Case, backend: str, put: Put) -> Any:
    case = case.map_arrays(put)
    return onchip.ops.attention_forward(*case.tensors, **case.options, backend=backend)


def _backward(case: Case, backend: str, put: Put) -> Any:
    o, lse = _forward(case, backend, put)
    case = case.map_arrays(put)
    return onchip.ops.attention_backward(
        *(case.d_o, *case.tensors, o, lse), d_lse=case.d_lse, **case.options, backend=backend
    )


def _decode(case: Case, backend: str, put: Put) -> Any:
    """The results, and the caches as the call leaves them."""
    k_cache = put(case.k_cache.copy())
    dim_v = case.v_cache.shape[-1]
    v_cache = k_cache[..., :dim_v] if case.values_in_keys else put(case.v_cache.copy())
    arguments = {
        name: put(value) if isinstance(value, np.ndarray) else value
        for name, value in case.arguments.items()
    }
    results = onchip.ops.attention_decode(
        put(case.q), k_cache, v_cache, **arguments, backend=backend
    )
    return *results, k_cache, v_cache


def _judge_decode(result: Result, case: Case) -> list[compare.Deviation]:
    return compare.judge_decode(
        *(result[:2], result[2:], case.q, case.k_cache, case.v_cache), **case.arguments
    )


def _merge(case: Case, backend: str, put: Put) -> Any:
    case = case.map_arrays(put)
    return onchip.ops.merge(case.o1, case.lse1, case.o2, case.lse2, backend=backend)


def _linear(op: str, back: bool) -> Subject:
    """Forward against the plain loop over tokens; backward against the reference in fp64."""

    def call(case: Case, backend: str, put: Put) -> Any:
        case = case.map_arrays(put)
        tensors = {name: case.tensors.get(name) for name in linear_cases.TENSORS[op]}
        if back:
            return getattr(onchip.ops, f"{op}_backward")(
                case.d_o,
                **tensors,
                initial_state=case.initial_state,
                d_final_state=case.d_final_state,
                **case.options,
                backend=backend,
            )
        return getattr(onchip.ops, f"{op}_forward")(
            **tensors,
            initial_state=case.initial_state,
            output_final_state=True,
            **case.options,
            backend=backend,
        )

    def judge(result: Result, case: Case) -> list[compare.Deviation]:
        if not back:
            plain = {name: x for name, x in case.options.items() if name != "chunk_len"}
            return linear_compare.judge_forward(
                op, result, case.tensors, initial_state=case.initial_state, **plain
            )
        exact = call(case, "reference", _in_fp64)
        return linear_compare.judge_gradients(result, exact, case.tensors, case.dtype)

    return Subject(partial(linear_cases.linear_case, op), call, judge)


def _linear_step(op: str) -> Subject:
    """One token from a pool, against the plain loop; the pool as the call leaves it as well."""

    def call(case: Case, backend: str, put: Put) -> Any:
        case = case.map_arrays(lambda array: put(array.copy()))
        tensors = {name: case.tensors.get(name) for name in linear_cases.TENSORS[op]}
        o = getattr(onchip.ops, f"{op}_step")(
            **tensors,
            state=case.state,
            state_indices=case.state_indices,
            **case.options,
            backend=backend,
        )
        return o, *linear_compare.parts_of(case.state)

    def judge(result: Result, case: Case) -> list[compare.Deviation]:
        return linear_compare.judge_step(
            *(op, result, case.tensors),
            state=case.state,
            state_indices=case.state_indices,
            **case.options,
        )

    return Subject(partial(linear_cases.linear_step_case, op), call, judge)


def _in_fp64(array: Any) -> Any:
    return array if array.dtype.kind == "i" else array.astype(np.float64)


SUBJECTS = {
    "attention_forward": Subject(
        _draw_attention,
        _forward,
        lambda result, case: compare.judge_forward(result, *case.tensors, **case.options),
    ),
    "attention_backward": Subject(
        _draw_attention,
        _backward,
        lambda result, case: compare.judge_backward(
            result, case.d_o, *case.tensors, d_lse=case.d_lse, **case.options
        ),
    ),
    "attention_decode": Subject(decode_cases.decode_case, _decode, _judge_decode),
    **{
        f"{op}_{phase}": subject
        for op in linear_cases.TENSORS
        for phase, subject in (
            ("forward", _linear(op, False)),
            ("backward", _linear(op, True)),
            ("step", _linear_step(op)),
        )
    },
    "merge": Subject(
        cases.merge_case,
        _merge,
        lambda result, case: compare.judge_merge(result, case.o1, case.lse1, case.o2, case.lse2),
    ),
}


# ---- arrays -------------------------------------------------------------------------------------


class _Poisoned(np.ndarray[Any, Any]):
    """A call whose first array is one of these gets results and workspace that start as NaN: what
    a kernel fails to write shows."""


class _PoisoningNumPy(_kinds._NumPy):
    def empty(self, shape: Sequence[int], dtype: str, example: Any) -> Any:
        array = super().empty(shape, dtype, example)
        array.reshape(-1).view(np.uint8)[...] = 0xFF  # NaN in every float dtype
        return array


_kinds._known[_Poisoned] = _PoisoningNumPy()


def _to_torch(array: Any) -> Any:
    """On the GPU."""
    import torch

    array = np.ascontiguousarray(array)
    if array.dtype == ml_dtypes.bfloat16:
        return torch.from_numpy(array.view(np.int16)).view(torch.bfloat16).cuda()
    return torch.from_numpy(array).cuda()


def _to_numpy(array: Any) -> Any:
    if isinstance(array, tuple):
        return tuple(map(_to_numpy, array))
    if array is None or isinstance(array, np.ndarray):
        return array
    import torch

    if array.dtype == torch.bfloat16:
        return array.cpu().view(torch.int16).numpy().view(ml_dtypes.bfloat16)
    return array.cpu().numpy()


def _computed(subject: Subject, case: Case, backend: str) -> Result:
    if backend.startswith("cuda."):
        import torch

        torch.use_deterministic_algorithms(True)  # fills new tensors with NaN
        result = subject.call(case, backend, _to_torch)
    else:
        result = subject.call(case, backend, lambda array: array.view(_Poisoned))
    made = [_to_numpy(array) for array in result]
    return type(result)(*made) if hasattr(result, "_fields") else tuple(made)


# ---- backends -----------------------------------------------------------------------------------


def _problem(row: dict[str, Any]) -> str | None:
    """Why calls cannot be made here on the backend of this row of `onchip.describe`."""
    if not row["available"]:
        return str(row["detail"])
    if not row["name"].startswith("cuda."):
        return None
    try:
        import torch
    except ImportError:
        return "torch, whose arrays on the GPU the calls take, is not installed"
    return None if torch.cuda.is_available() else "this torch does not see the GPU"


def _chosen_backends(backend: str | None) -> tuple[list[str], dict[str, str]]:
    """The backends to call, and of those that nobody asked for by name why they are left out."""
    problems = {row["name"]: _problem(row) for row in onchip.describe()["backends"]}
    if backend is None:
        refuse_wrong_settings("verify")
        left_out = {name: problem for name, problem in problems.items() if problem is not None}
        return [name for name in problems if name not in left_out], left_out
    if backend not in problems:
        raise InvalidArgument(
            f"verify: backend: got {backend!r}, wanted one of {', '.join(problems)}"
        )
    problem = problems[backend]
    if problem is not None:
        raise Unsupported(f"verify: backend: {backend}: {problem}")
    return [backend], {}


# ---- the run ------------------------------------------------------------------------------------


@dataclass
class Row:
    """What is known of an operator on a backend."""

    compared: int = 0
    refusals: list[str] = field(default_factory=list)
    worst: compare.Deviation | None = None
    failures: list[str] = field(default_factory=list)

    def note(self, deviations: Sequence[compare.Deviation]) -> None:
        self.compared += 1
        for deviation in deviations:
            if self.worst is None or deviation.share > self.worst.share:
                self.worst = deviation


@dataclass(frozen=True)
class Run:
    operators: Sequence[str]
    backends: Sequence[str]
    dtype: str | None
    seed: int
    count: int | None
    seconds: float | None
    longest: int | None
    left_out: dict[str, str]

    def seeds(self) -> Iterator[tuple[int, float]]:
        """The seed of each case, and how much of the run lies before it, in [0, 1]."""
        began = time.monotonic()
        number = 0
        while True:
            done = 0.0
            if self.count is not None:
                done = number / self.count
            if self.seconds is not None:
                done = max(done, (time.monotonic() - began) / self.seconds)
            if done >= 1:
                return
            yield (self.seed + number) % _SEEDS, done
            number += 1

    def again(self, operator: str, backend: str, seed: int) -> str:
        given = "" if self.dtype is None else f" --dtype {self.dtype}"
        given += "" if self.longest is None else f" --longest {self.longest}"
        return f"onchip verify {operator} --backend {backend}{given} --seed {seed} --count 1"

    def one(self, operator: str, seed: int, rows: dict[tuple[str, str], Row]) -> None:
        subject = SUBJECTS[operator]
        rng = np.random.default_rng(seed)
        dtypes = tuple(DTYPES.values()) if self.dtype is None else (DTYPES[self.dtype],)
        case = subject.draw(
            lambda smallest, largest: int(rng.integers(smallest, largest, endpoint=True)),
            dtypes,
            self.longest,
        )
        for backend in self.backends:
            row = rows[operator, backend]
            try:
                result = _computed(subject, case, backend)
                row.note(subject.judge(result, case))
            except Unsupported as refusal:
                row.refusals.append(str(refusal).partition(f"{backend}: ")[2] or str(refusal))
            except compare.Disagreement as wrong:
                row.compared += 1
                row.failures.append(self._failure(operator, backend, seed, case, str(wrong)))
            except Exception as error:  # whatever it is, the report says of which call
                text = f"{type(error).__name__}: {error}"
                row.failures.append(self._failure(operator, backend, seed, case, text))

    def _failure(self, operator: str, backend: str, seed: int, case: Case, text: str) -> str:
        return (
            f"FAILED: {operator} on {backend}: {case!r}\n  {text}\n"
            f"  again: {self.again(operator, backend, seed)}\n"
        )

    def all(self) -> dict[tuple[str, str], Row]:
        rows = {(op, backend): Row() for op in self.operators for backend in self.backends}
        with progress(f"verify, seed {self.seed}", 1.0) as show:
            for seed, done in self.seeds():
                failed = sum(len(row.failures) for row in rows.values())
                show(done, f"case seed {seed}" + (f", {failed} FAILED" if failed else ""))
                for operator in self.operators:
                    self.one(operator, seed, rows)
        return rows


def _report(run: Run, rows: dict[tuple[str, str], Row]) -> str:
    table = [["operator", "backend", "compared", "refused", "failed", "worst error / bound"]]
    for (operator, backend), row in rows.items():
        worst = row.worst
        where = "" if worst is None else f"{worst.share:.3f} at {worst.tensor}{list(worst.at)}"
        counts = (row.compared, len(row.refusals), len(row.failures))
        table.append([operator, backend, *(str(count) for count in counts), where])
    text = "\n".join(aligned(table)) + "\n"
    alike: dict[tuple[str, str], list[str]] = {}
    for (operator, backend), row in rows.items():
        if row.refusals and not row.compared:
            alike.setdefault((backend, row.refusals[0]), []).append(operator)
    for (backend, refusal), names in alike.items():
        text += f"{', '.join(names)} on {backend}: nothing compared: {refusal}\n"
    for row in rows.values():
        text += "".join(row.failures[:1])
        if len(row.failures) > 1:
            text += f"  and {len(row.failures) - 1} more\n"
    for backend, problem in run.left_out.items():
        text += f"not verified: {backend}: {problem}\n"
    return text + f"seed {run.seed}\n"


def run_verify(
    operator: str,
    backend: str | None,
    dtype: str | None,
    seed: int | None,
    count: int | None,
    seconds: float | None,
    longest: int | None,
) -> str:
    if operator != "all" and operator not in SUBJECTS:
        raise InvalidArgument(
            f"verify: operator: got {operator!r}, wanted all, {', '.join(SUBJECTS)}"
            + nearest(operator, SUBJECTS)
        )
    if dtype is not None and dtype not in DTYPES:
        raise InvalidArgument(f"verify: dtype: got {dtype!r}, wanted {', '.join(DTYPES)}")
    if seed is not None and not 0 <= seed < _SEEDS:
        raise InvalidArgument(f"verify: seed: got {seed}, wanted 0 to {_SEEDS - 1}")
    for name, value in (("count", count), ("seconds", seconds), ("longest", longest)):
        if value is not None and not value > 0:
            raise InvalidArgument(f"verify: {name}: got {value}, wanted more than 0")
    if count is None and seconds is None:
        count = _DEFAULT_COUNT
    backends, left_out = _chosen_backends(backend)
    run = Run(
        operators=list(SUBJECTS) if operator == "all" else [operator],
        backends=backends,
        dtype=dtype,
        seed=secrets.randbelow(_SEEDS) if seed is None else seed,
        count=count,
        seconds=seconds,
        longest=longest,
        left_out=left_out,
    )
    rows = run.all()
    text = _report(run, rows)
    if any(row.failures for row in rows.values()):
        raise Failure(text)
    if not any(row.compared for row in rows.values()):
        raise Failure(text + "nothing was compared\n")
    return text
