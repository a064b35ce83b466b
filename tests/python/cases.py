"""Random attention calls for property tests: any shapes, any options together, any dtype."""

import numpy as np
from harness import DTYPES, on_gpu
from hypothesis import strategies as st

import gpu
from onchip.oracle.cases import attention_case

SEGMENTS = ("q_segment_ids", "kv_segment_ids")
LENGTHS = ("cu_seqlens_q", "cu_seqlens_kv", "seqlens_q", "seqlens_kv")


@st.composite
def cases(draw_from, dtypes=tuple(DTYPES), longest=None, packed=None, without=(), widest=40):
    """An AttentionCase; on a GPU's backend, what its kernel takes."""
    head_dims = range(1, widest + 1)
    if on_gpu():
        without = (*without, *gpu.WITHOUT)
        head_dims = gpu.HEAD_DIMS
        dtypes = [gpu.DTYPES.get(np.dtype(dtype), dtype) for dtype in dtypes]

    def integer(smallest, largest):
        return draw_from(st.integers(smallest, largest))

    return attention_case(integer, dtypes, longest, packed, without, head_dims)
