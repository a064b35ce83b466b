"""The operators, on arrays of any library.

Arrays come from NumPy (with ml_dtypes for bfloat16), PyTorch, JAX, CuPy, or any library that
follows the Python array API; results are arrays of the first argument's library, on its device,
made by its own allocator. Arrays on a GPU are used on their library's current stream; JAX has none,
and a call with its arrays waits for the results.
Inputs are never written, caches that `attention_decode` appends to excepted; results never share
memory with them, and nothing here is differentiated automatically.

Every function raises `onchip.InvalidArgument` for a call that breaks the contract and
`onchip.Unsupported`, with each backend's reason, for a legal one that no backend takes. Flags are
True, False, NumPy's bool, 0 or 1; numbers are Python's or NumPy's, never flags or arrays; None
stands only where the signature has it. docs/semantics.md is the contract.

The linear operators X come as X_forward, X_backward and X_step. "float" is any of float64, float32,
float16, bfloat16. Their rows are [batch, T, ..]; with cu_seqlens packed, [total, ..]; of a step,
which takes one token a sequence, [batch, ..]. Value head h reads the query and key head
h // (Hv // Hk). alpha is exp(log_decay); a log_decay below -104, -inf included, is exactly a reset.
The scans hgrn, mamba1 and rwkv4 have D channels in place of heads, and each says what its state is.
Their options:

    scale: multiplies what a query reads. None: the operator's default.
    initial_state: [N, Hv, dk, dv] with state_layout "kv", [N, Hv, dv, dk] with "vk"; float32
        (float64 with float64 inputs); N is batch, or the number of packed sequences. None: zeros.
        Where the state has several parts, a tuple of them.
    output_final_state: also return the state after each sequence's last token; an empty sequence's
        is its initial one.
    cu_seqlens: [num_seqs + 1], int32, int64 or a sequence of integers: where each packed sequence
        begins; makes the tensors packed.
    seqlens: [num_seqs], likewise: used tokens of each sequence, dense or packed. Rows beyond them
        are not read, and are 0 in results.
    chunk_len: backward keeps a state every so many tokens, a multiple of 16: memory against
        recomputation. None picks; it changes no result.
    check: refuse values that nothing is promised for: log_decay above 0.
    backend: force one by name: "reference", "cpu", "cuda.sm80", "cuda.sm90".
    d_final_state: gradient of the final state, in its shape. None: zero.
    state: of a step, the pool [slots, Hv, ..], read and written in place; float32, bfloat16 or
        float16 (float64 with float64 inputs).
    state_indices: int32 [batch]: the slot of each row, no slot twice; -1 skips the row: its output
        is 0 and no state changes. None: row n has slot n.
"""

from collections.abc import Sequence
from typing import Generic, NamedTuple, TypeVar

from onchip import _calls
from onchip._linear import (
    channel,
    delta,
    delta_more,
    dplr,
    helpers,
    scalar,
    scalar_gated,
    scan,
    slots,
)
from onchip._linear.channel import *  # noqa: F403
from onchip._linear.delta import *  # noqa: F403
from onchip._linear.delta_more import *  # noqa: F403
from onchip._linear.dplr import *  # noqa: F403
from onchip._linear.helpers import *  # noqa: F403
from onchip._linear.scalar import *  # noqa: F403
from onchip._linear.scalar_gated import *  # noqa: F403
from onchip._linear.scan import *  # noqa: F403
from onchip._linear.slots import *  # noqa: F403

ArrayT = TypeVar("ArrayT")

__all__ = [
    "AttentionGradients",
    "attention_backward",
    "attention_decode",
    "attention_forward",
    "merge",
]
__all__ += channel.__all__
__all__ += delta.__all__
__all__ += delta_more.__all__
__all__ += dplr.__all__
__all__ += helpers.__all__
__all__ += scalar.__all__
__all__ += scalar_gated.__all__
__all__ += scan.__all__
__all__ += slots.__all__


class AttentionGradients(NamedTuple, Generic[ArrayT]):
    """dbias and dsink are None where the call had no bias or sink."""

    dq: ArrayT
    dk: ArrayT
    dv: ArrayT
    dbias: ArrayT | None
    dsink: ArrayT | None


def attention_forward(
    q: ArrayT,
    k: object,
    v: object,
    *,
    scale: float | None = None,
    causal: bool = False,
    alignment: str = "bottom_right",
    window: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    bias: object | None = None,
    mask: object | None = None,
    alibi_slopes: object | None = None,
    q_segment_ids: object | None = None,
    kv_segment_ids: object | None = None,
    sink: object | None = None,
    dropout_p: float = 0.0,
    dropout_rng: object | tuple[int, int] | None = None,
    cu_seqlens_q: object | Sequence[int] | None = None,
    cu_seqlens_kv: object | Sequence[int] | None = None,
    seqlens_q: object | Sequence[int] | None = None,
    seqlens_kv: object | Sequence[int] | None = None,
    max_seqlen_q: int | None = None,
    max_seqlen_kv: int | None = None,
    precision: str | None = None,
    deterministic: bool = False,
    batch_invariant: bool = False,
    check: bool = False,
    backend: str | None = None,
) -> tuple[ArrayT, ArrayT]:
    """Exact attention: O = softmax(mask(softcap(scale Q K^T) + bias - alibi)) V, and its
    log-sum-exp.

    Tiled, with an online softmax (Milakov and Gimelshein 2018; Dao et al. 2022, Algorithm 1):
    memory beyond inputs and results does not grow with seqlen_q x seqlen_kv.

    "float" is any of float64, float32, float16, bfloat16. num_seqs is batch, or the number of
    packed sequences.

    Args:
        q: [batch, seqlen_q, num_heads_q, head_dim_qk], float; head dims 1 to 256.
        k: [batch, seqlen_kv, num_heads_kv, head_dim_qk], q's dtype; num_heads_q is a multiple of
            num_heads_kv, and query head h reads head h // (num_heads_q // num_heads_kv).
        v: [batch, seqlen_kv, num_heads_kv, head_dim_v], q's dtype.
            Packed (with cu_seqlens_q): q, k, v are [total, heads, head_dim].
        scale: multiplies q.k. None: head_dim_qk ** -0.5.
        causal: query i sees keys j <= i + off.
        alignment: off is seqlen_kv - seqlen_q ("bottom_right") or 0 ("top_left"), per sequence.
        window: (left, right): query i sees keys i + off - left <= j <= i + off + right; -1 is no
            bound.
        softcap: c > 0 turns each score S into c tanh(S / c); 0 does not.
        bias: [num_seqs|1, num_heads_q|1, seqlen_q|1, seqlen_kv|1], float, added after the softcap;
            packed: by position in the sequence. -inf excludes.
        mask: bool, same shapes; True is visible.
        alibi_slopes: [num_heads_q] or [num_seqs, num_heads_q], float: subtracts
            slope |i + off - j|.
        q_segment_ids, kv_segment_ids: int32 [batch, seqlen_q] and [batch, seqlen_kv], packed
            [total_q] and [total_kv]; both or none. A pair is visible iff they are equal.
        sink: [num_heads_q], float: one more logit without a value, in natural-log units,
            not scaled.
        dropout_p: probability in [0, 1) of dropping an entry of the softmax.
        dropout_rng: (seed, offset), or int64 [2] on any device; 0 <= offset < 2**32. The mask is a
            function of these, the head and the positions alone. Required if dropout_p > 0.
        cu_seqlens_q, cu_seqlens_kv: [num_seqs + 1], int32, int64 or a sequence of integers: where
            each packed sequence begins. cu_seqlens_kv None: as cu_seqlens_q.
        seqlens_q, seqlens_kv: [num_seqs], likewise: used rows of each sequence, dense or packed.
            seqlens_kv None, with cu_seqlens_kv None too: as seqlens_q.
        max_seqlen_q, max_seqlen_kv: hints for packed tensors; a wrong one changes no result.
        precision: "tf32" allows TF32 products of float32 inputs on a GPU; None keeps float32
            accuracy.
        deterministic: the backward pass is bitwise repeatable (the forward pass always is).
        batch_invariant: a sequence's bits do not depend on what else is in the call.
        check: also validate values that lie on a GPU, which synchronises.
        backend: force one by name: "reference", "cpu", "cuda.sm80", "cuda.sm90".

    Returns:
        (o, lse). o: [batch, seqlen_q, num_heads_q, head_dim_v], packed [total_q, num_heads_q,
        head_dim_v], q's dtype. lse: [batch, num_heads_q, seqlen_q], packed [num_heads_q, total_q],
        float32 (float64 for float64): natural log of the softmax denominator, sink included, before
        dropout. A row that sees no key has o = 0 and lse = -inf, or the sink.
    """
    results = _calls.run(_calls.ATTENTION_FORWARD, locals())
    return results["o"], results["lse"]


def attention_backward(
    d_o: object,
    q: ArrayT,
    k: object,
    v: object,
    o: object,
    lse: object,
    *,
    d_lse: object | None = None,
    scale: float | None = None,
    causal: bool = False,
    alignment: str = "bottom_right",
    window: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    bias: object | None = None,
    mask: object | None = None,
    alibi_slopes: object | None = None,
    q_segment_ids: object | None = None,
    kv_segment_ids: object | None = None,
    sink: object | None = None,
    dropout_p: float = 0.0,
    dropout_rng: object | tuple[int, int] | None = None,
    cu_seqlens_q: object | Sequence[int] | None = None,
    cu_seqlens_kv: object | Sequence[int] | None = None,
    seqlens_q: object | Sequence[int] | None = None,
    seqlens_kv: object | Sequence[int] | None = None,
    max_seqlen_q: int | None = None,
    max_seqlen_kv: int | None = None,
    precision: str | None = None,
    deterministic: bool = False,
    batch_invariant: bool = False,
    check: bool = False,
    backend: str | None = None,
) -> AttentionGradients[ArrayT]:
    """Gradients of `attention_forward` by recomputation (Dao et al. 2022, Algorithm 4), with
    dS_ij = P_ij (dP_ij - rowsum(d_o o)_i + d_lse_i).

    Args:
        d_o: gradient of o; o's shape and dtype.
        q, k, v: as given to attention_forward.
        o, lse: what attention_forward returned.
        d_lse: gradient of lse; lse's shape and dtype. None: zero.
        The options: as given to attention_forward.

    Returns:
        (dq, dk, dv, dbias, dsink), each with the shape and dtype of what it is the gradient of, in
        q's library; dbias and dsink are None where bias or sink was. dbias is summed over broadcast
        axes. alibi_slopes have no gradient.
    """
    results = _calls.run(_calls.ATTENTION_BACKWARD, locals())
    return AttentionGradients(
        results["dq"], results["dk"], results["dv"], results.get("dbias"), results.get("dsink")
    )


def attention_decode(
    q: ArrayT,
    k_cache: object,
    v_cache: object,
    *,
    cache_seqlens: object | Sequence[int],
    k_new: object | None = None,
    v_new: object | None = None,
    page_table: object | None = None,
    cache_slot: object | Sequence[int] | None = None,
    rotary_cos: object | None = None,
    rotary_sin: object | None = None,
    rotary_interleaved: bool = False,
    q_positions: object | Sequence[int] | None = None,
    scale: float | None = None,
    causal: bool = False,
    alignment: str = "bottom_right",
    window: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    bias: object | None = None,
    mask: object | None = None,
    alibi_slopes: object | None = None,
    q_segment_ids: object | None = None,
    kv_segment_ids: object | None = None,
    sink: object | None = None,
    cu_seqlens_q: object | Sequence[int] | None = None,
    cu_seqlens_kv: object | Sequence[int] | None = None,
    seqlens_q: object | Sequence[int] | None = None,
    seqlens_kv: object | Sequence[int] | None = None,
    max_seqlen_q: int | None = None,
    max_seqlen_kv: int | None = None,
    precision: str | None = None,
    deterministic: bool = False,
    batch_invariant: bool = False,
    check: bool = False,
    backend: str | None = None,
) -> tuple[ArrayT, ArrayT]:
    """Exact attention of new queries over keys and values in a cache, to which the call may append.

    In this order: q and k_new are rotated (if tables are given), k_new and v_new are written behind
    the rows in the cache, every query attends to all rows then there. A prompt, a chunk of one and
    a single token are the same call with different seqlen_q.

    Args:
        q: [batch, seqlen_q, num_heads_q, head_dim_qk], float, or packed (with cu_seqlens_q) [total,
            num_heads_q, head_dim_qk].
        k_cache, v_cache: [slots, capacity, num_heads_kv, head_dim_qk] and [.., head_dim_v], q's
            dtype; with page_table [pages, page_size, num_heads_kv, ..]. Written in place where
            k_new is given, and only then: rows at or past a sequence's length are not read.
            v_cache may be k_cache[..., :head_dim_v] (MLA keeps its values within its keys).
        cache_seqlens: [batch], int32 or a sequence of integers: rows in the cache before the call.
        k_new, v_new: [batch, seqlen_new, num_heads_kv, ..], packed [total_new, num_heads_kv, ..]:
            row t goes to row cache_seqlens + t. No v_new where v_cache lies in k_cache: the first
            channels of k_new are the values. seqlen_kv below is the length with them.
        page_table: [batch, max_pages], int32: entry e is the page of keys e * page_size and on.
            Entries past the sequence's length are not read.
        cache_slot: [batch], int32 or a sequence of integers: where each row's keys lie. None: row n
            has slot n. -1 skips a row: o = 0, lse = -inf, nothing of it is read or written. With a
            page table only -1 has a meaning.
        rotary_cos, rotary_sin: [max_pos, rotary_dim / 2], q's dtype or float32; both or none. New
            key t stands at cache_seqlens + t, query i at seqlen_kv - seqlen_q + i. Channels past
            rotary_dim pass through; a rotated key is rounded to the cache's dtype.
        rotary_interleaved: channels 2c and 2c + 1 are a pair, else c and c + rotary_dim / 2.
        q_positions: [batch, seqlen_q], packed [total], int32 or int64: where the queries stand
            instead (for the rotation; masks go by seqlen_kv - seqlen_q + i).
        The options: as those of attention_forward, without dropout. causal needs seqlen_q > 1 to
            matter. bias and mask, [batch|1, num_heads_q|1, seqlen_q|1, columns|1], and
            kv_segment_ids, [batch, columns], go by position in the sequence and cover the longest
            one. cu_seqlens_kv and seqlens_kv count rows of k_new (absent: as q's).

    Returns:
        (o, lse), as attention_forward's.

    Raises InvalidArgument, with nothing written, also where a length leaves the capacity, a slot or
    page does not exist, or two rows would append to one place or read what the other appends.
    """
    results = _calls.run(_calls.ATTENTION_DECODE, locals())
    return results["o"], results["lse"]


def merge(
    o1: ArrayT, lse1: object, o2: object, lse2: object, *, backend: str | None = None
) -> tuple[ArrayT, ArrayT]:
    """Two partial attentions of the same queries over disjoint sets of keys into the one over all:
    lse = log(e^lse1 + e^lse2), o = e^(lse1 - lse) o1 + e^(lse2 - lse) o2. In C and C++ it is called
    attention_merge.

    Args:
        o1, o2: [batch, seqlen, heads, head_dim] or packed [total, heads, head_dim]; one float
            dtype.
        lse1, lse2: [batch, heads, seqlen] or packed [heads, total]; float32 (float64 with float64).
            At most one of the parts had the sink.
        backend: force one by name.

    Returns:
        (o, lse), shaped and typed as (o1, lse1). Where both parts saw no key: o = 0, lse = -inf.
    """
    results = _calls.run(_calls.MERGE, locals())
    return results["o"], results["lse"]
