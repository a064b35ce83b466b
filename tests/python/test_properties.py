"""Properties that hold for every call, on random shapes and random options together."""

from dataclasses import replace

import numpy as np
from cases import LENGTHS, SEGMENTS, cases
from harness import (
    BACKWARD_BACKENDS,
    assert_same_bits,
    backward,
    check,
    forward,
    poisoned,
    restrided,
)
from hypothesis import given
from hypothesis import strategies as st

import onchip
from onchip.oracle import compare
from onchip.oracle.cases import PER_PAIR


def test_outputs_and_workspace_start_poisoned(monkeypatch):
    """What every other test relies on: a byte that no kernel writes is NaN, not a lucky zero."""
    made = []
    poisoned = np.empty

    def recorded(*arguments, **keywords):
        array = poisoned(*arguments, **keywords)
        made.append(array.copy())
        return array

    monkeypatch.setattr(np, "empty", recorded)
    x = np.ones((1, 3, 1, 4), np.float32)
    onchip.ops.attention_forward(x, x, x, backend="reference")
    assert [array.dtype for array in made] == [np.float32, np.float32, bool]
    lse = np.ones((1, 1, 3), np.float32)
    bias = np.ones((1, 1, 1, 1), np.float32)
    onchip.ops.attention_backward(x, x, x, x, x, lse, bias=bias, backend="cpu")
    assert [array.dtype for array in made[3:]] == [np.float32] * 4 + [bool]
    for array in made:
        wanted = np.isnan(array) if array.dtype == np.float32 else array.view(np.uint8) == 255
        assert wanted.all() and array.size > 0


seeds = st.integers(0, 2**32 - 1)


def run(backend, case):
    """(o, lse) and, where the backend has a backward, the gradients."""
    o, lse = forward(backend, *case.tensors, **case.options)
    return (o, lse), run_backward(backend, case, o, lse)


def run_backward(backend, case, o, lse):
    if backend not in BACKWARD_BACKENDS:
        return None
    return backward(backend, case.d_o, *case.tensors, o, lse, d_lse=case.d_lse, **case.options)


def assert_same_run(got, wanted):
    assert_same_bits(got[0], wanted[0])
    if wanted[1] is not None:
        assert_same_bits(got[1], wanted[1])


@given(case=cases())
def test_random_calls_equal_the_oracle(backend, case):
    check(backend, *case.tensors, d_o=case.d_o, d_lse=case.d_lse, **case.options)


@given(case=cases(packed=False, without=("dropout",)), seed=seeds)
def test_permuting_the_batch_commutes(backend, case, seed):
    """Dropout is left out: its mask names the batch entry."""
    order = np.random.default_rng(seed).permutation(case.q.shape[0])
    per_entry = (*PER_PAIR, *SEGMENTS, *LENGTHS)
    options = {
        name: value[order] if name in per_entry and value.shape[0] == len(order) else value
        for name, value in case.options.items()
    }
    if "alibi_slopes" in options and options["alibi_slopes"].ndim == 2:
        options["alibi_slopes"] = options["alibi_slopes"][order]
    moved = replace(
        case,
        **{name: getattr(case, name)[order] for name in ("q", "k", "v", "d_o")},
        d_lse=None if case.d_lse is None else case.d_lse[order],
        options=options,
    )
    outputs, gradients = run(backend, case)
    moved_outputs, moved_gradients = run(backend, moved)
    assert_same_bits(moved_outputs, [x[order] for x in outputs])
    if gradients is not None:
        # dbias of a broadcast batch and dsink are sums over the batch: their order is free.
        assert_same_bits(moved_gradients[:3], [x[order] for x in gradients[:3]])


@given(case=cases(without=("dropout",)), seed=seeds)
def test_permuting_the_heads_commutes(backend, case, seed):
    """Whole groups move, and for the forward also the query heads within a group."""
    rng = np.random.default_rng(seed)
    heads_q, heads_kv = case.q.shape[-2], case.k.shape[-2]
    group = heads_q // heads_kv
    order_kv = rng.permutation(heads_kv)
    for shuffle_within in (False, True):
        within = [rng.permutation(group) if shuffle_within else np.arange(group) for _ in order_kv]
        order_q = np.concatenate([h * group + w for h, w in zip(order_kv, within, strict=True)])
        options = dict(case.options)
        for name in PER_PAIR:
            if name in options and options[name].shape[1] == heads_q:
                options[name] = options[name][:, order_q]
        for name in ("alibi_slopes", "sink"):
            if name in options:
                options[name] = options[name][..., order_q]
        lse_axis = case.q.ndim - 3
        moved = replace(
            case,
            q=case.q[..., order_q, :],
            k=case.k[..., order_kv, :],
            v=case.v[..., order_kv, :],
            d_o=case.d_o[..., order_q, :],
            d_lse=None if case.d_lse is None else case.d_lse.take(order_q, lse_axis),
            options=options,
        )
        o, lse = forward(backend, *case.tensors, **case.options)
        moved_o, moved_lse = forward(backend, *moved.tensors, **moved.options)
        assert_same_bits((moved_o, moved_lse), (o[..., order_q, :], lse.take(order_q, lse_axis)))
        if not shuffle_within and backend in BACKWARD_BACKENDS:
            gradients = run_backward(backend, case, o, lse)
            moved_gradients = run_backward(backend, moved, moved_o, moved_lse)
            wanted = [
                gradients.dq[..., order_q, :],
                gradients.dk[..., order_kv, :],
                gradients.dv[..., order_kv, :],
            ]
            assert_same_bits(moved_gradients[:3], wanted)
            if gradients.dsink is not None:
                compare.assert_bitwise("dsink", moved_gradients.dsink, gradients.dsink[order_q])


@given(case=cases(packed=True, without=("dropout",)), seed=seeds)
def test_permuting_packed_sequences_commutes(backend, case, seed):
    options = dict(case.options)
    num_seqs = len(options["cu_seqlens_q"]) - 1
    order = np.random.default_rng(seed).permutation(num_seqs)
    rows = {}
    for axis, total in (("q", case.q.shape[0]), ("kv", case.k.shape[0])):
        cu = options[f"cu_seqlens_{axis}"]
        slots = [np.arange(cu[n], cu[n + 1]) for n in order]
        rows[axis] = np.concatenate([*slots, np.arange(cu[-1], total)])
        lengths = np.diff(cu)[order]
        options[f"cu_seqlens_{axis}"] = np.concatenate([[0], np.cumsum(lengths)]).astype(cu.dtype)
        if f"seqlens_{axis}" in options:
            options[f"seqlens_{axis}"] = options[f"seqlens_{axis}"][order]
        if f"{axis}_segment_ids" in options:
            options[f"{axis}_segment_ids"] = options[f"{axis}_segment_ids"][rows[axis]]
    for name in PER_PAIR:
        if name in options and options[name].shape[0] == num_seqs:
            options[name] = options[name][order]
    if "alibi_slopes" in options and options["alibi_slopes"].ndim == 2:
        options["alibi_slopes"] = options["alibi_slopes"][order]
    moved = replace(
        case,
        q=case.q[rows["q"]],
        k=case.k[rows["kv"]],
        v=case.v[rows["kv"]],
        d_o=case.d_o[rows["q"]],
        d_lse=None if case.d_lse is None else case.d_lse[:, rows["q"]],
        options=options,
    )
    (o, lse), gradients = run(backend, case)
    moved_outputs, moved_gradients = run(backend, moved)
    assert_same_bits(moved_outputs, (o[rows["q"]], lse[:, rows["q"]]))
    if gradients is not None:
        wanted = [gradients.dq[rows["q"]], gradients.dk[rows["kv"]], gradients.dv[rows["kv"]]]
        assert_same_bits(moved_gradients[:3], wanted)


@given(case=cases(packed=True, without=("dropout",)), chosen=st.integers(0, 2))
def test_a_batch_invariant_sequence_does_not_know_its_neighbours(backend, case, chosen):
    """One sequence of a packed call, and the same alone as a dense batch of one: the same bits."""
    options = dict(case.options)
    cu_q, cu_kv = options.pop("cu_seqlens_q"), options.pop("cu_seqlens_kv")
    n = chosen % (len(cu_q) - 1)
    length_q = options.pop("seqlens_q")[n] if "seqlens_q" in options else cu_q[n + 1] - cu_q[n]
    length_kv = options.pop("seqlens_kv")[n] if "seqlens_kv" in options else cu_kv[n + 1] - cu_kv[n]
    rows_q = slice(cu_q[n], cu_q[n] + length_q)
    rows_kv = slice(cu_kv[n], cu_kv[n] + length_kv)
    for name in PER_PAIR:
        if name in options:
            x = options[name]
            x = x[n : n + 1] if x.shape[0] > 1 else x
            x = x[:, :, :length_q] if x.shape[2] > 1 else x
            options[name] = x[..., :length_kv] if x.shape[3] > 1 else x
    for name, rows in (("q_segment_ids", rows_q), ("kv_segment_ids", rows_kv)):
        if name in options:
            options[name] = options[name][None, rows]
    if options.get("alibi_slopes", np.zeros(0)).ndim == 2:
        options["alibi_slopes"] = options["alibi_slopes"][n]
    alone = (case.q[None, rows_q], case.k[None, rows_kv], case.v[None, rows_kv])
    o, lse = forward(backend, *case.tensors, **case.options, batch_invariant=True)
    alone_o, alone_lse = forward(backend, *alone, **options, batch_invariant=True)
    assert_same_bits((o[rows_q], lse[:, rows_q]), (alone_o[0], alone_lse[0]))
    if backend in BACKWARD_BACKENDS:
        gradients = backward(
            backend,
            case.d_o,
            *case.tensors,
            o,
            lse,
            d_lse=case.d_lse,
            **case.options,
            batch_invariant=True,
        )
        d_lse = None if case.d_lse is None else case.d_lse[None, :, rows_q]
        by_itself = backward(
            backend,
            case.d_o[None, rows_q],
            *alone,
            alone_o,
            alone_lse,
            d_lse=d_lse,
            **options,
            batch_invariant=True,
        )
        wanted = [gradients.dq[rows_q], gradients.dk[rows_kv], gradients.dv[rows_kv]]
        assert_same_bits([x[0] for x in by_itself[:3]], wanted)


@given(case=cases(), seed=seeds)
def test_poison_around_every_input_has_no_influence(backend, case, seed):
    rng = np.random.default_rng(seed)
    assert_same_run(run(backend, case.map_arrays(lambda x: poisoned(x, rng))), run(backend, case))


@given(case=cases(), seed=seeds)
def test_strides_have_no_influence(backend, case, seed):
    rng = np.random.default_rng(seed)
    assert_same_run(run(backend, case.map_arrays(lambda x: restrided(x, rng))), run(backend, case))


@given(case=cases(), seed=seeds)
def test_strides_of_o_and_lse_have_no_influence_on_the_backward(grad_backend, case, seed):
    rng = np.random.default_rng(seed)
    (o, lse), wanted = run(grad_backend, case)
    got = run_backward(grad_backend, case, poisoned(restrided(o, rng), rng), restrided(lse, rng))
    assert_same_bits(got, wanted)


@given(case=cases(), factor=st.sampled_from([-1.0, 2.0, 0.5]))
def test_linear_in_v(backend, case, factor):
    scaled = (factor * case.v.astype(np.float64)).astype(case.v.dtype)
    o, lse = forward(backend, *case.tensors, **case.options)
    scaled_o, scaled_lse = forward(backend, case.q, case.k, scaled, **case.options)
    compare.assert_bitwise("lse", scaled_lse, lse)
    compare.assert_same_value("o", scaled_o, factor * o.astype(np.float64))


@given(case=cases(without=("sink", "dropout")), value=st.sampled_from([1.0, -0.75, 100.0]))
def test_a_constant_v_comes_out_constant(backend, case, value):
    o, lse = forward(backend, case.q, case.k, np.full_like(case.v, value), **case.options)
    seen = np.isfinite(lse.swapaxes(-1, -2))[..., None]
    wanted = np.broadcast_to(np.where(seen, value, 0), o.shape).astype(o.dtype)
    compare.assert_same_value("o", o, wanted)


@given(case=cases(packed=False, without=("seqlens",)), seed=seeds)
def test_causal_rows_do_not_know_the_future(backend, case, seed):
    rng = np.random.default_rng(seed)
    seqlen_q, seqlen_kv = case.q.shape[1], case.k.shape[1]
    options = {**case.options, "causal": True}
    token = int(rng.integers(0, seqlen_kv))
    o, lse = forward(backend, *case.tensors, **options)
    k, v, q = case.k.copy(), case.v.copy(), case.q.copy()
    k[:, token:] = (3 * rng.standard_normal(k[:, token:].shape)).astype(k.dtype)
    v[:, token:] = (3 * rng.standard_normal(v[:, token:].shape)).astype(v.dtype)
    offset = 0 if options.get("alignment") == "top_left" else seqlen_kv - seqlen_q
    before = max(0, min(seqlen_q, token - offset))  # rows with i + off < token
    q[:, before:] = (3 * rng.standard_normal(q[:, before:].shape)).astype(q.dtype)
    changed_o, changed_lse = forward(backend, q, k, v, **options)
    assert_same_bits(
        (changed_o[:, :before], changed_lse[..., :before]), (o[:, :before], lse[..., :before])
    )


@given(case=cases(dtypes=(np.float64,), longest=9, widest=5))
def test_gradients_are_the_forwards_finite_differences(grad_backend, case):
    """Along random directions in every input at once; each input has its own direction."""
    rng = np.random.default_rng(case.q.size)
    step = compare.DIFFERENCE_STEP
    _, gradients = run(grad_backend, case)
    inputs = {"q": case.q, "k": case.k, "v": case.v}
    options = {name: x for name, x in case.options.items() if name in ("bias", "sink")}
    # A step must not be lost in a narrower dtype.
    options = {name: x.astype(np.float64) for name, x in options.items()}
    inputs |= options
    fixed = {name: x for name, x in case.options.items() if name not in options}

    def loss(**changed):
        tensors = inputs | changed
        o, lse = forward(grad_backend, **tensors, **fixed)
        total = (o * case.d_o).sum()
        return (
            total
            if case.d_lse is None
            else total + np.where(np.isfinite(lse), lse * case.d_lse, 0).sum()
        )

    wide = replace(case, options=fixed | options)
    _, gradients = run(grad_backend, wide)
    for name, x in inputs.items():
        for _ in range(3):
            direction = rng.standard_normal(x.shape)
            with np.errstate(invalid="ignore"):
                along = np.where(
                    np.isfinite(x), direction * getattr(gradients, f"d{name}"), 0
                ).sum()
            difference = loss(**{name: x + step * direction}) - loss(**{name: x - step * direction})
            compare.assert_derivative(f"d{name}", along, difference / (2 * step))


@given(case=cases(longest=160))
def test_runs_repeat_bit_for_bit_whatever_the_number_of_threads(backend, case):
    before = onchip.get_num_threads()
    try:
        onchip.set_num_threads(1)
        wanted = run(backend, case)
        for threads in (1, 2, 3):
            onchip.set_num_threads(threads)
            assert_same_run(run(backend, case), wanted)
    finally:
        onchip.set_num_threads(before)


@given(case=cases())
def test_inputs_are_not_written_and_outputs_are_fresh(backend, case):
    copies = case.map_arrays(np.copy)
    first = run(backend, case)
    second = run(backend, case)
    arrays = [*case.tensors, case.d_o, case.d_lse, *case.options.values()]
    saved = [*copies.tensors, copies.d_o, copies.d_lse, *copies.options.values()]
    for now, then in zip(arrays, saved, strict=True):
        if isinstance(now, np.ndarray):
            np.testing.assert_array_equal(
                np.ascontiguousarray(now).view(np.uint8), then.view(np.uint8)
            )
    outputs = [
        x for result in (*first, *second) if result is not None for x in result if x is not None
    ]
    arrays = [x for x in arrays if isinstance(x, np.ndarray)]
    for index, x in enumerate(outputs):
        assert not any(np.shares_memory(x, other) for other in [*arrays, *outputs[:index]])
