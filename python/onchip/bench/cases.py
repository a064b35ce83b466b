"""Cases: a name says everything that is measured, and is the same for every implementation.

`<op>/<pass>/<dtype>/<dims>/<mask or variant>/<lengths>`:

    attention/fwd/fp32/h4d64/causal/b1s16384        forward; bwd: backward; fwdbwd: both
    attention/fwd/bf16/h32k8d128/window256/s4096    32 query heads, 8 key heads; 256 keys back
    attention/step/bf16/h64k8d128/paged16/b16s32768 decoding: one query, 32,768 keys in the cache

    linear/fwd/fp32/h16d128/simple_gla/b1s4096      linear attention by its operator's name;
                                                    16 heads, keys of 128 channels, values too

Without `h<heads>` there are 2048 / head_dim heads, without `b<batch>` 16,384 / seqlen sequences:
the convention of published attention figures. Without `k<heads>` there are as many key heads.
"""

import math
import re
from dataclasses import dataclass, replace
from typing import Any

_TOTAL_DIM = 2048
_TOTAL_TOKENS = 16384
_BYTES = {"fp64": 8, "fp32": 4, "fp16": 2, "bf16": 2}

DTYPES = tuple(_BYTES)
PHASES = ("fwd", "bwd", "fwdbwd")

_DIMS = r"(h(?P<heads>[1-9]\d*)(k(?P<heads_kv>[1-9]\d*))?)?d(?P<dim>[1-9]\d*)"
_LENGTHS = r"(b(?P<batch>[1-9]\d*))?s(?P<seqlen>[1-9]\d*)"
_DTYPE = rf"(?P<dtype>{'|'.join(DTYPES)})"
_ATTENTION = re.compile(
    rf"attention/(?P<phase>{'|'.join(PHASES)})/{_DTYPE}/{_DIMS}"
    rf"/(?P<mask>full|causal|window\d+)/{_LENGTHS}"
)
_STEP = re.compile(
    rf"attention/step/{_DTYPE}/{_DIMS}/(contiguous|paged(?P<page_size>[1-9]\d*))/{_LENGTHS}"
)
# The tensors that each operator takes beside q, k and v.
LINEAR_GATES = {
    "simple_gla": ("log_decay",),
    "delta_rule": ("beta",),
    "gated_delta_rule": ("log_decay", "beta"),
    "gla": ("log_decay",),
    "kda": ("log_decay", "beta"),
}
_CHANNEL_DECAYS = ("gla", "kda")
_LINEAR = re.compile(
    rf"linear/(?P<phase>{'|'.join(PHASES)})/{_DTYPE}/{_DIMS}(v(?P<dim_v>[1-9]\d*))?"
    rf"/(?P<operator>{'|'.join(LINEAR_GATES)})/{_LENGTHS}"
)
_WANTED = (
    "attention/<fwd|bwd|fwdbwd>/<dtype>/[h<heads>[k<key heads>]]d<head_dim>/"
    "<full|causal|window<left>>/[b<batch>]s<seqlen>, or "
    "attention/step/<dtype>/<dims>/<contiguous|paged<page size>>/[b<batch>]s<keys>, or "
    "linear/<fwd|bwd|fwdbwd>/<dtype>/<dims>[v<head_dim_v>]/<operator>/[b<batch>]s<tokens>"
)


def _sizes(match: re.Match[str]) -> dict[str, Any]:
    dim, seqlen = int(match["dim"]), int(match["seqlen"])
    heads = int(match["heads"] or max(1, _TOTAL_DIM // dim))
    heads_kv = int(match["heads_kv"] or heads)
    if heads % heads_kv:
        raise ValueError(f"case: got {heads} heads, wanted a multiple of {heads_kv}")
    return {
        "dtype": match["dtype"],
        "num_heads": heads,
        "num_heads_kv": heads_kv,
        "head_dim": dim,
        "batch": int(match["batch"] or max(1, _TOTAL_TOKENS // seqlen)),
        "seqlen": seqlen,
    }


@dataclass(frozen=True, kw_only=True)
class _Case:
    phase: str
    dtype: str
    num_heads: int
    num_heads_kv: int
    head_dim: int
    batch: int
    seqlen: int

    @property
    def _dims(self) -> str:
        grouped = "" if self.num_heads_kv == self.num_heads else f"k{self.num_heads_kv}"
        return f"h{self.num_heads}{grouped}d{self.head_dim}"

    @property
    def shape_kv(self) -> tuple[int, int, int, int]:
        return (self.batch, self.seqlen, self.num_heads_kv, self.head_dim)

    @property
    def element_bytes(self) -> int:
        return _BYTES[self.dtype]


@dataclass(frozen=True, kw_only=True)
class AttentionCase(_Case):
    """Self-attention: as many keys as queries."""

    mask: str

    @classmethod
    def parse(cls, name: str) -> "AttentionCase":
        match = _ATTENTION.fullmatch(name)
        if match is None:
            raise ValueError(f"case: got {name!r}, wanted {_WANTED}")
        return cls(phase=match["phase"], mask=match["mask"], **_sizes(match))

    @property
    def name(self) -> str:
        return (
            f"attention/{self.phase}/{self.dtype}/{self._dims}/{self.mask}"
            f"/b{self.batch}s{self.seqlen}"
        )

    @property
    def causal(self) -> bool:
        return self.mask != "full"

    @property
    def window_left(self) -> int:
        """Keys before its own that a query sees; -1: all."""
        return int(self.mask.removeprefix("window")) if self.mask.startswith("window") else -1

    @property
    def shape(self) -> tuple[int, int, int, int]:
        return (self.batch, self.seqlen, self.num_heads, self.head_dim)

    @property
    def pairs(self) -> float:
        """Of a head and sequence: half of S^2 where half of the scores are masked."""
        if 0 <= self.window_left < self.seqlen:
            seen = self.window_left + 1
            return seen * (self.seqlen - seen) + seen * (seen + 1) / 2
        return self.seqlen**2 / 2 if self.causal else float(self.seqlen**2)

    @property
    def flops(self) -> float:
        """4 D a pair forward, 10 D backward, whatever an implementation computes."""
        times = {"fwd": 1.0, "bwd": 2.5, "fwdbwd": 3.5}[self.phase]
        return times * 4.0 * self.pairs * self.head_dim * self.num_heads * self.batch

    @property
    def tensor_bytes(self) -> int:
        """Inputs read and results written, once each."""
        # Forward q, o and k, v; backward q, o, d_o, dq and k, v, dk, dv.
        tensors = {"fwd": 2, "bwd": 4, "fwdbwd": 6}[self.phase]
        rows = self.batch * self.seqlen * (self.num_heads + self.num_heads_kv)
        return tensors * rows * self.head_dim * self.element_bytes

    def small(self, seqlen: int) -> "AttentionCase":
        """The same on so few rows that it costs next to nothing."""
        return replace(self, seqlen=min(self.seqlen, seqlen), batch=1)


@dataclass(frozen=True, kw_only=True)
class StepCase(_Case):
    """Decoding: each sequence has one query, and `seqlen` keys in its cache."""

    page_size: int | None  # None: a contiguous cache

    @classmethod
    def parse(cls, name: str) -> "StepCase":
        match = _STEP.fullmatch(name)
        if match is None:
            raise ValueError(f"case: got {name!r}, wanted {_WANTED}")
        page_size = None if match["page_size"] is None else int(match["page_size"])
        return cls(phase="step", page_size=page_size, **_sizes(match))

    @property
    def variant(self) -> str:
        return "contiguous" if self.page_size is None else f"paged{self.page_size}"

    @property
    def name(self) -> str:
        return (
            f"attention/step/{self.dtype}/{self._dims}/{self.variant}/b{self.batch}s{self.seqlen}"
        )

    @property
    def shape(self) -> tuple[int, int, int, int]:
        """Of the queries."""
        return (self.batch, 1, self.num_heads, self.head_dim)

    @property
    def flops(self) -> float:
        return 4.0 * self.seqlen * self.head_dim * self.num_heads * self.batch

    @property
    def tensor_bytes(self) -> int:
        """Keys and values, read once."""
        return 2 * self.batch * self.seqlen * self.num_heads_kv * self.head_dim * self.element_bytes

    def small(self, seqlen: int) -> "StepCase":
        return replace(self, seqlen=min(self.seqlen, seqlen), batch=1)


@dataclass(frozen=True, kw_only=True)
class LinearCase(_Case):
    """Linear attention; num_heads are the heads of the values, num_heads_kv of queries and keys."""

    operator: str
    head_dim_v: int

    @classmethod
    def parse(cls, name: str) -> "LinearCase":
        match = _LINEAR.fullmatch(name)
        if match is None:
            raise ValueError(f"case: got {name!r}, wanted {_WANTED}")
        return cls(
            phase=match["phase"],
            operator=match["operator"],
            head_dim_v=int(match["dim_v"] or match["dim"]),
            **_sizes(match),
        )

    @property
    def name(self) -> str:
        values = "" if self.head_dim_v == self.head_dim else f"v{self.head_dim_v}"
        return (
            f"linear/{self.phase}/{self.dtype}/{self._dims}{values}/{self.operator}"
            f"/b{self.batch}s{self.seqlen}"
        )

    @property
    def gates(self) -> tuple[str, ...]:
        return LINEAR_GATES[self.operator]

    def gate_shape(self, gate: str) -> tuple[int, ...]:
        rows = (self.batch, self.seqlen, self.num_heads)
        by_channel = gate == "log_decay" and self.operator in _CHANNEL_DECAYS
        return (*rows, self.head_dim) if by_channel else rows

    @property
    def gate_bytes(self) -> int:
        """Of all gates; they are fp32."""
        return 4 * sum(math.prod(self.gate_shape(gate)) for gate in self.gates)

    @property
    def shape(self) -> tuple[int, int, int, int]:
        """Of queries and keys."""
        return self.shape_kv

    @property
    def shape_v(self) -> tuple[int, int, int, int]:
        return (self.batch, self.seqlen, self.num_heads, self.head_dim_v)

    @property
    def flops(self) -> float:
        """Of the chunked form with chunks of 64, whatever an implementation computes: products with
        the state, and within a chunk its whole square."""
        dk, dv, chunk = self.head_dim, self.head_dim_v, 64
        if "beta" in self.gates:
            forward = 6 * dk * dv + 4 * chunk * (dk + dv) + 2 * chunk**2 / 3
            backward = 16 * dk * dv + 2 * chunk * (6 * dk + 5 * dv) + 2 * chunk**2 / 3
        else:
            forward = 4 * dk * dv + 2 * chunk * (dk + dv)
            backward = 10 * dk * dv + 2 * chunk * (3 * dk + 2 * dv)
        each = {"fwd": forward, "bwd": backward, "fwdbwd": forward + backward}[self.phase]
        return each * self.num_heads * self.seqlen * self.batch

    @property
    def tensor_bytes(self) -> int:
        """Inputs read and results written, once each."""
        # Forward q, k and v, o; backward q, k, dq, dk and v, d_o, dv.
        keys, values, gates = {"fwd": (2, 2, 1), "bwd": (4, 3, 2), "fwdbwd": (6, 5, 3)}[self.phase]
        row = keys * self.num_heads_kv * self.head_dim + values * self.num_heads * self.head_dim_v
        return self.batch * self.seqlen * row * self.element_bytes + gates * self.gate_bytes

    def small(self, seqlen: int) -> "LinearCase":
        return replace(self, seqlen=min(self.seqlen, seqlen), batch=1)


Case = AttentionCase | StepCase | LinearCase


def parse(name: str) -> Case:
    """Raises ValueError for what is no name of a case."""
    if name.startswith("attention/step/"):
        return StepCase.parse(name)
    return LinearCase.parse(name) if name.startswith("linear/") else AttentionCase.parse(name)
