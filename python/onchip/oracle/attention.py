"""Exact attention, forward and backward, as the formulas of section 2 of docs/semantics.md.

Sources: Vaswani et al., "Attention Is All You Need" (2017) for the forward; its gradient by the
chain rule through the softmax. Everything is written with the whole score matrix in memory and
nothing is tiled or rescaled, so that each line can be held against the page. The functions take the
tensors and options of onchip.ops.attention_forward / attention_backward by the same names.

The same lines serve twice: with EXACT (or EXTENDED) arithmetic they are the judge; with arithmetic
that rounds every named intermediate they are the plain formula whose error is the yardstick.
"""

from dataclasses import dataclass, fields
from typing import NamedTuple

import numpy as np

from .philox import dropout_keep, dropout_threshold


@dataclass(frozen=True)
class Arithmetic:
    """Products and sums run in `products`; each named intermediate is stored as `stored`.

    `lse` is the dtype in which lse travels from forward to backward, which has P = exp(S - lse)
    from it, and is rounded the worst way there; None: the backward knows P itself.
    """

    products: np.dtype
    stored: np.dtype
    lse: np.dtype | None = None

    def load(self, x):
        return np.asarray(x).astype(self.products)

    def round(self, x):
        with np.errstate(over="ignore"):
            return x.astype(self.stored).astype(self.products)


EXACT = Arithmetic(np.dtype(np.float64), np.dtype(np.float64))
EXTENDED = Arithmetic(np.dtype(np.longdouble), np.dtype(np.longdouble))


@dataclass(frozen=True)
class Options:
    scale: float | None = None
    causal: bool = False
    alignment: str = "bottom_right"
    window: tuple = (-1, -1)
    softcap: float = 0.0
    bias: np.ndarray | None = None
    mask: np.ndarray | None = None
    alibi_slopes: np.ndarray | None = None
    q_segment_ids: np.ndarray | None = None
    kv_segment_ids: np.ndarray | None = None
    sink: np.ndarray | None = None
    dropout_p: float = 0.0
    dropout_rng: np.ndarray | None = None
    cu_seqlens_q: np.ndarray | None = None
    cu_seqlens_kv: np.ndarray | None = None
    seqlens_q: np.ndarray | None = None
    seqlens_kv: np.ndarray | None = None


OPTION_NAMES = tuple(option.name for option in fields(Options))


class Gradients(NamedTuple):
    dq: np.ndarray
    dk: np.ndarray
    dv: np.ndarray
    dbias: np.ndarray | None
    dsink: np.ndarray | None


@dataclass(frozen=True)
class Sequence:
    """Where one sequence lies.

    `q[q_rows]` is [seqlen_q, heads, dim], `lse[lse_rows]` is [heads, seqlen_q].
    """

    index: int
    seqlen_q: int
    seqlen_kv: int
    q_rows: tuple
    kv_rows: tuple
    lse_rows: tuple


def sequences(q, k, options):
    """The sequences of a dense batch (rank 4) or of a packed one (rank 3), in order."""
    seqlens_q = options.seqlens_q
    seqlens_kv = options.seqlens_kv
    if seqlens_kv is None and options.cu_seqlens_kv is None:
        seqlens_kv = seqlens_q
    if q.ndim == 4:
        for b in range(q.shape[0]):
            len_q = q.shape[1] if seqlens_q is None else int(seqlens_q[b])
            len_kv = k.shape[1] if seqlens_kv is None else int(seqlens_kv[b])
            rows_q, rows_kv = slice(0, len_q), slice(0, len_kv)
            yield Sequence(b, len_q, len_kv, (b, rows_q), (b, rows_kv), (b, slice(None), rows_q))
        return
    cu_q = options.cu_seqlens_q
    cu_kv = options.cu_seqlens_kv if options.cu_seqlens_kv is not None else cu_q
    for n in range(len(cu_q) - 1):
        begin_q, begin_kv = int(cu_q[n]), int(cu_kv[n])
        len_q = int(cu_q[n + 1]) - begin_q if seqlens_q is None else int(seqlens_q[n])
        len_kv = int(cu_kv[n + 1]) - begin_kv if seqlens_kv is None else int(seqlens_kv[n])
        rows_q, rows_kv = slice(begin_q, begin_q + len_q), slice(begin_kv, begin_kv + len_kv)
        yield Sequence(n, len_q, len_kv, (rows_q,), (rows_kv,), (slice(None), rows_q))


def _broadcast_entry(array, index):
    """Index of the [heads|1, Sq|1, Sk|1] part of a mask or bias that sequence `index` has."""
    return 0 if array.shape[0] == 1 else index


def _clip(array, sequence):
    """A mask or bias [heads|1, Sq|1, Sk|1] cut to the sequence's used lengths; size-1 axes stay."""
    rows = slice(None) if array.shape[1] == 1 else slice(0, sequence.seqlen_q)
    columns = slice(None) if array.shape[2] == 1 else slice(0, sequence.seqlen_kv)
    return array[:, rows, columns]


def _visible(sequence, num_heads_q, options):
    """Boolean [num_heads_q, seqlen_q, seqlen_kv]: which key each query may read."""
    shape = (num_heads_q, sequence.seqlen_q, sequence.seqlen_kv)
    i = np.arange(sequence.seqlen_q)[:, None]
    j = np.arange(sequence.seqlen_kv)[None, :]
    diagonal = i + _offset(sequence, options)
    seen = np.ones(shape, bool)
    if options.causal:
        seen &= j <= diagonal
    # Differences of positions: a bound may be the largest integer there is, and a sum with it wrap.
    left, right = options.window
    if left >= 0:
        seen &= diagonal - j <= left
    if right >= 0:
        seen &= j - diagonal <= right
    if options.mask is not None:
        mask = options.mask[_broadcast_entry(options.mask, sequence.index)]
        seen &= _clip(mask, sequence).astype(bool)
    if options.bias is not None:
        bias = options.bias[_broadcast_entry(options.bias, sequence.index)]
        seen &= _clip(bias, sequence).astype(np.float64) != -np.inf
    if options.q_segment_ids is not None:
        q_ids = options.q_segment_ids[sequence.q_rows]
        kv_ids = options.kv_segment_ids[sequence.kv_rows]
        seen &= q_ids[:, None] == kv_ids[None, :]
    return seen


def _offset(sequence, options):
    return sequence.seqlen_kv - sequence.seqlen_q if options.alignment == "bottom_right" else 0


def _product_over_visible(weights, rows, visible):
    """weights @ rows where a pair that is not visible adds nothing, whatever its row holds.

    weights and visible are [heads, I, J], rows is [heads, J, D]; weights are 0 where not visible,
    so only rows with a non-finite entry need care: 0 * NaN would leak them.
    """
    finite = np.isfinite(rows)
    with np.errstate(invalid="ignore"):
        result = weights @ np.where(finite, rows, 0)
    for j in np.unique(np.nonzero(~finite)[1]):
        weight = weights[:, :, j, None]
        with np.errstate(invalid="ignore"):
            # Only the non-finite entries of row j are still missing from the sum.
            missing = np.where(finite[:, None, j, :], 0, weight * rows[:, None, j, :])
            result = result + np.where(visible[:, :, j, None], missing, 0)
    return result


@dataclass
class _Forward:
    """What the forward of one sequence leaves behind; arrays are [num_heads_q, ...]."""

    q: np.ndarray
    k: np.ndarray
    v: np.ndarray
    scale: float
    visible: np.ndarray
    softcap_slope: np.ndarray | None
    p: np.ndarray
    p_sink: np.ndarray | None
    keep: np.ndarray
    o: np.ndarray
    lse: np.ndarray


def _forward_sequence(q, k, v, sequence, options, arithmetic, for_backward=False):
    num_heads_q, head_dim = q.shape[-2:]
    group = num_heads_q // max(k.shape[-2], 1)
    heads_first = (1, 0, 2)
    q_n = arithmetic.load(q[sequence.q_rows]).transpose(heads_first)
    k_n = arithmetic.load(k[sequence.kv_rows]).transpose(heads_first).repeat(group, axis=0)
    v_n = arithmetic.load(v[sequence.kv_rows]).transpose(heads_first).repeat(group, axis=0)
    scale = arithmetic.products.type(_scale(options, head_dim))

    with np.errstate(invalid="ignore", over="ignore"):
        s = arithmetic.round(scale * (q_n @ k_n.transpose(0, 2, 1)))
        softcap_slope = None
        if options.softcap > 0:
            softcap = arithmetic.products.type(options.softcap)
            t = np.tanh(s / softcap)
            softcap_slope = 1 - t * t
            s = softcap * t
        if options.bias is not None:
            bias = options.bias[_broadcast_entry(options.bias, sequence.index)]
            s = s + arithmetic.load(_clip(bias, sequence))
        if options.alibi_slopes is not None:
            slopes = arithmetic.load(options.alibi_slopes)
            slopes = slopes if slopes.ndim == 1 else slopes[sequence.index]
            i = np.arange(sequence.seqlen_q)[:, None]
            j = np.arange(sequence.seqlen_kv)[None, :]
            s = s - slopes[:, None, None] * np.abs(i + _offset(sequence, options) - j)
    visible = _visible(sequence, num_heads_q, options)
    s = np.where(visible, s, -np.inf)

    # The sink is one more column of logits; it has a probability but no value.
    minus_inf = np.full(num_heads_q, -np.inf, arithmetic.products)
    sink = minus_inf if options.sink is None else arithmetic.load(options.sink)
    columns = np.concatenate(
        [s, np.broadcast_to(sink[:, None, None], (num_heads_q, sequence.seqlen_q, 1))], axis=2
    )
    largest = columns.max(axis=2, keepdims=True)
    shift = np.where(largest == -np.inf, 0, largest)
    with np.errstate(divide="ignore", invalid="ignore", over="ignore"):
        weights = np.exp(columns - shift)
        total = weights.sum(axis=2, keepdims=True)
        lse = (np.log(total) + shift)[:, :, 0]
        probabilities = np.where(total == 0, 0, weights / np.where(total == 0, 1, total))
        if for_backward and arithmetic.lse is not None:
            # Rounding lse moves it by up to half its spacing, and every P of the row by that
            # factor; from 1/2 on (lse beyond 2^23) P has no digit left to speak of.
            half = np.minimum(np.spacing(np.abs(lse.astype(arithmetic.lse))) / 2, 0.5)[:, :, None]
            probabilities = np.where(total == 0, 0, np.exp(columns - lse[:, :, None] + half))
    # A NaN logit makes its row NaN, not its excluded entries.
    p = arithmetic.round(np.where(visible, probabilities[:, :, :-1], 0))
    p_sink = None if options.sink is None else probabilities[:, :, -1]

    keep = np.ones_like(p)
    if options.dropout_p > 0:
        threshold = dropout_threshold(options.dropout_p)
        kept = dropout_keep(
            options.dropout_p, options.dropout_rng, sequence.index, num_heads_q, *p.shape[1:]
        )
        keep = kept * (arithmetic.products.type(65536) / (65536 - threshold))
    o = arithmetic.round(_product_over_visible(p * keep, v_n, visible))
    return _Forward(q_n, k_n, v_n, scale, visible, softcap_slope, p, p_sink, keep, o, lse)


def _scale(options, head_dim):
    if options.scale is not None:
        return options.scale
    # head_dim 0: every score is an empty sum, so any finite scale is right.
    return head_dim**-0.5 if head_dim > 0 else 1.0


def attention_forward(q, k, v, *, arithmetic=EXACT, **options):
    """(o, lse) in the precision of `arithmetic`; rows outside every sequence: o = 0, lse = -inf."""
    options = Options(**options)
    o = np.zeros((*q.shape[:-1], v.shape[-1]), arithmetic.products)
    lse_shape = (q.shape[0], q.shape[2], q.shape[1]) if q.ndim == 4 else (q.shape[1], q.shape[0])
    lse = np.full(lse_shape, -np.inf, arithmetic.products)
    for sequence in sequences(q, k, options):
        forward = _forward_sequence(q, k, v, sequence, options, arithmetic)
        o[sequence.q_rows] = forward.o.transpose(1, 0, 2)
        lse[sequence.lse_rows] = forward.lse
    return o, lse


def attention_backward(d_o, q, k, v, *, d_lse=None, arithmetic=EXACT, **options):
    """Gradients of sum(o * d_o) + sum(lse * d_lse) over the rows inside the sequences."""
    options = Options(**options)
    num_heads_q, num_heads_kv = q.shape[-2], k.shape[-2]
    group = num_heads_q // max(num_heads_kv, 1)
    dq = np.zeros(q.shape, arithmetic.products)
    dk = np.zeros(k.shape, arithmetic.products)
    dv = np.zeros(v.shape, arithmetic.products)
    dbias = None if options.bias is None else np.zeros(options.bias.shape, arithmetic.products)
    dsink = None if options.sink is None else np.zeros(options.sink.shape, arithmetic.products)

    def sum_groups(x):
        return x.reshape(num_heads_kv, group, *x.shape[1:]).sum(axis=1).transpose(1, 0, 2)

    for sequence in sequences(q, k, options):
        forward = _forward_sequence(q, k, v, sequence, options, arithmetic, for_backward=True)
        d_o_n = arithmetic.load(d_o[sequence.q_rows]).transpose(1, 0, 2)
        p, visible = forward.p, forward.visible
        seen_by_key = visible.transpose(0, 2, 1)

        p_dropped = p * forward.keep
        dv_n = _product_over_visible(p_dropped.transpose(0, 2, 1), d_o_n, seen_by_key)
        with np.errstate(invalid="ignore"):
            dp = arithmetic.round(d_o_n @ forward.v.transpose(0, 2, 1))
            dp = np.where(visible, dp, 0) * forward.keep
            # sum_j P dP equals sum_d dO O; the second form is how it is computed in practice, so
            # the yardstick has its rounding. A row without visible key has no term at all.
            seen = visible.any(axis=2)
            delta = np.where(seen, (d_o_n * forward.o).sum(axis=2), 0)
            d_lse_n = 0 if d_lse is None else arithmetic.load(d_lse[sequence.lse_rows])
            row_term = d_lse_n - delta
            ds = np.where(visible, p * (dp + row_term[:, :, None]), 0)
        if dbias is not None:
            index = _broadcast_entry(options.bias, sequence.index)
            region = _clip(dbias[index], sequence)
            full = arithmetic.round(ds)
            kept_axes = tuple(axis for axis in range(3) if dbias.shape[axis + 1] == 1)
            region += full.sum(axis=kept_axes, keepdims=True)
        if dsink is not None:
            with np.errstate(invalid="ignore"):
                dsink += (forward.p_sink * row_term).sum(axis=1)
        if forward.softcap_slope is not None:
            with np.errstate(invalid="ignore"):
                ds = np.where(visible, ds * forward.softcap_slope, 0)
        ds = arithmetic.round(ds)
        dq_n = forward.scale * _product_over_visible(ds, forward.k, visible)
        dk_n = forward.scale * _product_over_visible(ds.transpose(0, 2, 1), forward.q, seen_by_key)
        dq[sequence.q_rows] = dq_n.transpose(1, 0, 2)
        dk[sequence.kv_rows] = sum_groups(dk_n)
        dv[sequence.kv_rows] = sum_groups(dv_n)
    return Gradients(
        *(None if x is None else arithmetic.round(x) for x in (dq, dk, dv, dbias, dsink))
    )


def merge(o1, lse1, o2, lse2, *, arithmetic=EXACT):
    """(o, lse) of one pass over the keys of both parts; an empty part has lse = -inf."""
    o1, lse1, o2, lse2 = (arithmetic.load(x) for x in (o1, lse1, o2, lse2))
    lse = np.logaddexp(lse1, lse2)

    def weight(part_lse):
        with np.errstate(invalid="ignore"):
            w = np.where(part_lse == -np.inf, 0, np.exp(part_lse - lse))
        return np.swapaxes(w, -1, -2)[..., None]

    return arithmetic.round(weight(lse1) * o1 + weight(lse2) * o2), lse
