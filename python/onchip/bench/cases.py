"""Cases: a name says everything that is measured, and is the same for every implementation.

`<op>/<pass>/<dtype>/<dims>/<mask>/<lengths>`: `attention/fwd/fp32/h4d64/causal/b1s16384`. Without
`h<heads>` there are 2048 / head_dim heads, without `b<batch>` 16,384 / seqlen sequences: the
convention of published attention figures.
"""

import re
from dataclasses import dataclass

_TOTAL_DIM = 2048
_TOTAL_TOKENS = 16384
_BYTES = {"fp64": 8, "fp32": 4, "fp16": 2, "bf16": 2}

_NAME = re.compile(
    r"attention/(?P<phase>fwd)/(?P<dtype>fp64|fp32|fp16|bf16)/(h(?P<heads>[1-9]\d*))?d(?P<dim>[1-9]\d*)"
    r"/(?P<mask>full|causal)/(b(?P<batch>[1-9]\d*))?s(?P<seqlen>[1-9]\d*)"
)


@dataclass(frozen=True)
class AttentionCase:
    """Self-attention: as many keys as queries, as many key heads as query heads."""

    phase: str
    dtype: str
    num_heads: int
    head_dim: int
    mask: str
    batch: int
    seqlen: int

    @classmethod
    def parse(cls, name: str) -> "AttentionCase":
        match = _NAME.fullmatch(name)
        if match is None:
            raise ValueError(
                f"case: got {name!r}, wanted attention/fwd/<dtype>/[h<heads>]d<head_dim>/"
                "<full|causal>/[b<batch>]s<seqlen>"
            )
        dim, seqlen = int(match["dim"]), int(match["seqlen"])
        return cls(
            phase=match["phase"],
            dtype=match["dtype"],
            num_heads=int(match["heads"] or max(1, _TOTAL_DIM // dim)),
            head_dim=dim,
            mask=match["mask"],
            batch=int(match["batch"] or max(1, _TOTAL_TOKENS // seqlen)),
            seqlen=seqlen,
        )

    @property
    def name(self) -> str:
        return (
            f"attention/{self.phase}/{self.dtype}/h{self.num_heads}d{self.head_dim}/{self.mask}"
            f"/b{self.batch}s{self.seqlen}"
        )

    @property
    def causal(self) -> bool:
        return self.mask == "causal"

    @property
    def shape(self) -> tuple[int, int, int, int]:
        return (self.batch, self.seqlen, self.num_heads, self.head_dim)

    @property
    def flops(self) -> float:
        """4 S^2 D a head and sequence, halved where half of the scores are masked."""
        every_pair = 4.0 * self.seqlen**2 * self.head_dim * self.num_heads * self.batch
        return every_pair / 2 if self.causal else every_pair

    @property
    def tensor_bytes(self) -> int:
        """q, k, v read and o written, once each."""
        return 4 * self.batch * self.seqlen * self.num_heads * self.head_dim * _BYTES[self.dtype]
