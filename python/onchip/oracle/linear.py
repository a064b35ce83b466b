"""Linear attention as the formulas of section 3 of docs/semantics.md: one plain loop over tokens
for each operator, by the operator's name, written from its paper.

Every function takes one sequence: rows [T, heads, ..], constants as they are, the state before its
first token in the order "kv" (or None), and returns its outputs [T, Hv, dv] and the state after its
last token, a tuple. All arithmetic is in the dtype of the arrays that come in: float64, or
longdouble for differences. `run` cuts batches and packed tensors into sequences.
"""

import inspect
import itertools

import numpy as np

RESET = -104.0  # a log_decay below this is one


def _decay(log_decay):
    return np.where(log_decay < RESET, 0, np.exp(log_decay))


def _sigmoid(x):
    with np.errstate(over="ignore"):
        return 1 / (1 + np.exp(-x))


def _softplus(x):
    with np.errstate(over="ignore"):
        return np.where(x > 20, x, np.log1p(np.exp(np.minimum(x, 20))))


def _heads(x, like):
    """Rows of query and key heads, one for each value head of `like`."""
    return np.repeat(x, like.shape[1] // x.shape[1], axis=1)


def _outer(k, v):
    return k[:, :, None] * v[:, None, :]


def _read(state, q, scale):
    return scale * np.einsum("hkv,hk->hv", state, q)


def _zeros(state, q, v):
    if state is not None:
        return state[0].astype(q.dtype)
    return np.zeros((v.shape[1], q.shape[2], v.shape[2]), q.dtype)


def _scale(scale, q):
    return q.shape[-1] ** q.dtype.type(-0.5) if scale is None else scale


def linear_attention(q, k, v, *, normalize=False, scale=None, state=None):
    """Katharopoulos et al. 2020: numerator and denominator of a kernel without feature map."""
    scale, q, k = _scale(scale, q), _heads(q, v), _heads(k, v)
    s = _zeros(state, q, v)
    z = np.zeros(s.shape[:2], q.dtype) if state is None or not normalize else state[1]
    o = np.zeros_like(v)
    for t in range(len(v)):
        s = s + _outer(k[t], v[t])
        z = z + k[t]
        o[t] = _read(s, q[t], scale)
        if normalize:
            o[t] /= (scale * (q[t] * z).sum(-1) + 1e-10)[:, None]
    return o, (s, z) if normalize else (s,)


def simple_gla(q, k, v, log_decay=None, *, scale=None, state=None):
    """Yang et al. 2024 with one gate a head."""
    scale, q, k = _scale(scale, q), _heads(q, v), _heads(k, v)
    s = _zeros(state, q, v)
    o = np.zeros_like(v)
    for t in range(len(v)):
        if log_decay is not None:
            g = log_decay if log_decay.ndim == 1 else log_decay[t]
            s = _decay(g)[:, None, None] * s
        s = s + _outer(k[t], v[t])
        o[t] = _read(s, q[t], scale)
    return o, (s,)


def retention(q, k, v, *, scale=None, state=None):
    """Sun et al. 2023: gamma = 1 - 2^(-5-h)."""
    heads = np.arange(v.shape[1]).astype(v.dtype)
    return simple_gla(q, k, v, np.log1p(-(2 ** (-5 - heads))), scale=scale, state=state)


def lightning_attention(q, k, v, log_decay, *, scale=None, state=None):
    """Qin et al. 2024."""
    return simple_gla(q, k, v, log_decay, scale=scale, state=state)


def mamba2(
    x,
    dt,
    A,
    B,
    C,
    *,
    D=None,
    z=None,
    dt_bias=None,
    dt_softplus=True,
    dt_limit=(0.0, np.inf),
    scale=None,
    state=None,
):
    """Dao & Gu 2024: h = exp(dt A) h + dt B x, y = C h + D x."""
    scale = 1 if scale is None else scale
    b, c = _heads(B, x), _heads(C, x)
    h = _zeros(state, c, x)
    y = np.zeros_like(x)
    for t in range(len(x)):
        step = dt[t] if dt_bias is None else dt[t] + dt_bias
        step = np.clip(_softplus(step) if dt_softplus else step, *dt_limit)
        h = _decay(step * A)[:, None, None] * h + _outer(b[t], step[:, None] * x[t])
        y[t] = _read(h, c[t], scale)
        if D is not None:
            y[t] += (D if D.ndim == 2 else D[:, None]) * x[t]
        if z is not None:
            y[t] *= z[t] * _sigmoid(z[t])
    return y, (h,)


def mlstm(
    q,
    k,
    v,
    i,
    f,
    *,
    gate="exp",
    normalize=None,
    eps=0.0,
    scale=None,
    state=None,
    stabilisers=None,
    denominators=None,
):
    """Beck et al. 2024 and 2025 without stabiliser: the true C and n, which e^-m brings into the
    state's form. `stabilisers`, `denominators`: rows [T, Hv] that stand for the recurrence's own,
    as constants."""
    scale, q, k = _scale(scale, q), _heads(q, v), _heads(k, v)
    exponential = gate == "exp"
    normalize = exponential if normalize is None else normalize
    c = _zeros(state, q, v)
    n = np.zeros(c.shape[:2], q.dtype) if state is None or len(state) < 2 else state[1]
    m = np.zeros(c.shape[0], q.dtype) if state is None or len(state) < 3 else state[2]
    if exponential:
        c, n = np.exp(m)[:, None, None] * c, np.exp(m)[:, None] * n
    h = np.zeros_like(v)
    for t in range(len(v)):
        log_forget = -np.log1p(np.exp(-f[t]))
        forget = np.exp(log_forget) if exponential else _decay(log_forget)
        write = np.exp(i[t]) if exponential else _sigmoid(i[t])
        c = forget[:, None, None] * c + _outer(write[:, None] * k[t], v[t])
        n = forget[:, None] * n + write[:, None] * k[t]
        if exponential:
            m = np.maximum(log_forget + m, i[t]) if stabilisers is None else stabilisers[t]
        h[t] = _read(c, q[t], scale)
        if denominators is not None:
            h[t] /= denominators[t][:, None]
        elif normalize:
            eps_t = eps * np.exp(m) if exponential else eps
            h[t] /= (np.maximum(np.abs(scale * (n * q[t]).sum(-1)), 1) + eps_t)[:, None]
    if exponential:
        return h, (np.exp(-m)[:, None, None] * c, np.exp(-m)[:, None] * n, m)
    return h, (c, n) if normalize else (c,)


def gla(q, k, v, log_decay, *, scale=None, state=None):
    """Yang et al. 2024, the recurrent form."""
    scale, q, k = _scale(scale, q), _heads(q, v), _heads(k, v)
    s = _zeros(state, q, v)
    o = np.zeros_like(v)
    for t in range(len(v)):
        s = _decay(log_decay[t])[:, :, None] * s + _outer(k[t], v[t])
        o[t] = _read(s, q[t], scale)
    return o, (s,)


def rwkv6(r, k, v, log_decay, u, *, scale=None, state=None):
    """Peng et al. 2024: the state is read before it decays, with u for the token itself."""
    scale, r, k = _scale(scale, r), _heads(r, v), _heads(k, v)
    s = _zeros(state, r, v)
    o = np.zeros_like(v)
    for t in range(len(v)):
        kv = _outer(k[t], v[t])
        o[t] = _read(s + u[:, :, None] * kv, r[t], scale)
        s = _decay(log_decay[t])[:, :, None] * s + kv
    return o, (s,)


def hgrn2(q, v, log_decay, *, scale=None, state=None):
    """Qin et al. 2024: the forget gate's rest is the key."""
    return gla(q, 1 - np.exp(log_decay), v, log_decay, scale=scale, state=state)


def _unit(x):
    """Of length 1, but for the eps."""
    return x / np.sqrt((x * x).sum(-1, keepdims=True) + x.dtype.type(1e-6))


def _gates(log_decay, beta, A_log, dt_bias, lower_bound, allow_neg_eigval):
    """The published layers' gates from their raw inputs."""
    if A_log is None:
        return log_decay, beta
    rate = np.exp(A_log)[:, None] if log_decay.ndim == 3 else np.exp(A_log)
    raw = log_decay if dt_bias is None else log_decay + dt_bias
    if lower_bound is None:
        log_decay = -rate * _softplus(raw)
    else:
        log_decay = lower_bound * _sigmoid(rate * raw)
    return log_decay, (2 if allow_neg_eigval else 1) * _sigmoid(beta)


def delta_rule(q, k, v, beta, *, qk_l2norm=False, scale=None, state=None):
    """Schlag et al. 2021: the value at k moves towards v by beta."""
    return gated_delta_rule(q, k, v, None, beta, qk_l2norm=qk_l2norm, scale=scale, state=state)


def gated_delta_rule(
    q,
    k,
    v,
    log_decay=None,
    beta=None,
    *,
    A_log=None,
    dt_bias=None,
    lower_bound=None,
    allow_neg_eigval=False,
    qk_l2norm=False,
    scale=None,
    state=None,
):
    """Yang et al. 2025, the product of transition and state written out. With a log_decay a channel
    it is Kimi's."""
    scale = _scale(scale, q)
    if qk_l2norm:
        q, k = _unit(q), _unit(k)
    q, k = _heads(q, v), _heads(k, v)
    log_decay, beta = _gates(log_decay, beta, A_log, dt_bias, lower_bound, allow_neg_eigval)
    s = _zeros(state, q, v)
    o = np.zeros_like(v)
    for t in range(len(v)):
        if log_decay is not None:
            g = log_decay if log_decay.ndim == 1 else log_decay[t]
            s = _decay(g).reshape(s.shape[0], -1, 1) * s
        reflection = np.eye(s.shape[1]) - beta[t][:, None, None] * _outer(k[t], k[t])
        s = reflection @ s + _outer(beta[t][:, None] * k[t], v[t])
        o[t] = _read(s, q[t], scale)
    return o, (s,)


def kda(q, k, v, log_decay, beta, **options):
    """Kimi Team 2025."""
    return gated_delta_rule(q, k, v, log_decay, beta, **options)


def comba(q, k, v, p, log_decay=None, beta=None, *, qk_l2norm=False, scale=None, state=None):
    """Hu et al. 2025, as its kernels have it: the erase reads the state before its decay."""
    scale = _scale(scale, q)
    if qk_l2norm:
        q, k = _unit(q), _unit(k)
    q, k, p = _heads(q, v), _heads(k, v), _heads(p, v)
    s = _zeros(state, q, v)
    o = np.zeros_like(v)
    for t in range(len(v)):
        new = beta[t][:, None] * (v[t] - _read(s, p[t], 1))
        if log_decay is not None:
            g = log_decay if log_decay.ndim == 1 else log_decay[t]
            s = _decay(g)[:, None, None] * s
        s = s + _outer(k[t], new)
        o[t] = _read(s, q[t], scale)
    return o, (s,)


def gdn2(q, k, v, log_decay, b, w, *, qk_l2norm=False, scale=None, state=None):
    """S = (I - k (b k)^T) Diag(alpha) S + k (w v)^T."""
    scale = _scale(scale, q)
    if qk_l2norm:
        q, k = _unit(q), _unit(k)
    q, k = _heads(q, v), _heads(k, v)
    s = _zeros(state, q, v)
    o = np.zeros_like(v)
    for t in range(len(v)):
        s = _decay(log_decay[t])[:, :, None] * s
        s = (np.eye(s.shape[1]) - _outer(k[t], b[t] * k[t])) @ s + _outer(k[t], w[t] * v[t])
        o[t] = _read(s, q[t], scale)
    return o, (s,)


def gated_delta_product(
    q,
    k,
    v,
    log_decay=None,
    beta=None,
    *,
    num_householder,
    qk_l2norm=False,
    scale=None,
    state=None,
):
    """Siems et al. 2025: num_householder delta rules a token; k, v, beta are rows of their own."""
    scale = _scale(scale, q)
    if qk_l2norm:
        q, k = _unit(q), _unit(k)
    q, k = _heads(q, v), _heads(k, v)
    s = _zeros(state, q, v)
    o = np.zeros((len(q), *v.shape[1:]), v.dtype)
    for t in range(len(q)):
        if log_decay is not None:
            g = log_decay if log_decay.ndim == 1 else log_decay[t]
            s = _decay(g)[:, None, None] * s
        for j in range(t * num_householder, (t + 1) * num_householder):
            s = s + _outer(beta[j][:, None] * k[j], v[j] - _read(s, k[j], 1))
        o[t] = _read(s, q[t], scale)
    return o, (s,)


def rwkv7(r, log_decay, k, v, a, b, *, scale=None, state=None):
    """Peng et al. 2025: S = S (Diag(w) + a b^T) + v k^T, transposed here."""
    scale = 1 if scale is None else scale
    r, k, a, b = (_heads(x, v) for x in (r, k, a, b))
    s = _zeros(state, r, v)
    o = np.zeros_like(v)
    for t in range(len(v)):
        transition = _outer(b[t], a[t])
        if log_decay is not None:
            decay = _decay(log_decay[t])
            transition = transition + decay[:, :, None] * np.eye(s.shape[1])
        else:
            transition = transition + np.eye(s.shape[1])
        s = transition @ s + _outer(k[t], v[t])
        o[t] = _read(s, r[t], scale)
    return o, (s,)


def iplr(q, k, v, a, b, *, scale=None, state=None):
    """The same without decay, and the scale of the others."""
    return rwkv7(q, None, k, v, a, b, scale=_scale(scale, q), state=state)


def gsa(q, k, v, s, log_decay, *, scale=None, state=None):
    """Zhang et al. 2024: two gated linear attentions, the first's read made weights of slots."""
    scale, q, k = _scale(scale, q), _heads(q, v), _heads(k, v)
    shape = (v.shape[1], q.shape[2], s.shape[2])
    keys = np.zeros(shape, q.dtype) if state is None else state[0]
    values = np.zeros((shape[0], shape[2], v.shape[2]), q.dtype) if state is None else state[1]
    o = np.zeros_like(v)
    for t in range(len(v)):
        alpha = _decay(log_decay[t])
        keys = keys * alpha[:, None, :] + _outer(k[t], s[t])
        values = alpha[:, :, None] * values + _outer(s[t], v[t])
        logits = _read(keys, q[t], scale)
        weights = np.exp(logits - logits.max(-1, keepdims=True))
        o[t] = _read(values, weights / weights.sum(-1, keepdims=True), 1)
    return o, (keys, values)


def hgrn(x, log_decay, *, scale=None, state=None):
    """Qin et al. 2023: a forget gate and what it lets in, channel by channel."""
    scale = 1 if scale is None else scale
    h = np.zeros(x.shape[1:], x.dtype) if state is None else state[0]
    o = np.zeros_like(x)
    for t in range(len(x)):
        h = _decay(log_decay[t]) * h + x[t]
        o[t] = scale * h
    return o, (h,)


def mamba1(
    u,
    delta,
    A,
    B,
    C,
    *,
    D=None,
    z=None,
    delta_bias=None,
    delta_softplus=True,
    scale=None,
    state=None,
):
    """Gu & Dao 2023, equation 2 with A discretised by zero-order hold and B by Euler's step:
    h = exp(delta A) h + delta B u, y = C h + D u."""
    scale = 1 if scale is None else scale
    channels, numbers = A.shape
    B, C = (x[:, None, :] if x.ndim == 2 else x for x in (B, C))
    h = np.zeros((channels, numbers), u.dtype) if state is None else state[0].T
    y = np.zeros_like(u)
    for t in range(len(u)):
        step = delta[t] if delta_bias is None else delta[t] + delta_bias
        step = (_softplus(step) if delta_softplus else step)[:, None]
        each = channels // max(B.shape[1], 1)
        b, c = (np.repeat(x[t], each, axis=0) for x in (B, C))
        h = _decay(step * A) * h + step * b * u[t][:, None]
        y[t] = scale * (c * h).sum(1)
        if D is not None:
            y[t] += D * u[t]
        if z is not None:
            y[t] *= z[t] * _sigmoid(z[t])
    return y, (h.T,)


def rwkv4(k, v, log_decay, u, *, scale=None, state=None, maxima=None):
    """Peng et al. 2023, equation 16 with its sums as they stand; e^-m brings them into the state's
    form. `maxima`: rows [T, D] that stand for the recurrence's own, as constants."""
    scale = 1 if scale is None else scale
    if state is None:
        zeros = np.zeros(v.shape[1:], v.dtype)
        state = (zeros, zeros, np.full_like(zeros, -np.inf))
    if not len(v):
        return np.zeros_like(v), state
    m = state[2]
    numerator, denominator = np.exp(m) * state[0], np.exp(m) * state[1]
    o = np.zeros_like(v)
    for t in range(len(v)):
        own = np.exp(u + k[t])
        o[t] = scale * (numerator + own * v[t]) / (denominator + own)
        numerator = np.exp(log_decay) * numerator + np.exp(k[t]) * v[t]
        denominator = np.exp(log_decay) * denominator + np.exp(k[t])
        m = np.maximum(log_decay + m, k[t]) if maxima is None else maxima[t]
    return o, (np.exp(-m) * numerator, np.exp(-m) * denominator, m)


# Tensors that are no rows; log_decay with one axis is one too.
CONSTANTS = ("A", "D", "dt_bias", "A_log", "u", "delta_bias")


def is_row(name, key, x):
    """Whether the tensor has a row a token; of a step, an element of the batch."""
    return x.ndim > 1 and (key not in CONSTANTS or (name, key) == ("mamba1", "u"))


def _parts(state):
    return state if isinstance(state, tuple) else (state,)


def _turned(name, parts):
    """Matrices: of gsa both parts, elsewhere the first alone has four axes; mamba1's has three."""
    axes = 3 if name == "mamba1" else 4
    return tuple(np.swapaxes(part, -1, -2) if part.ndim == axes else part for part in parts)


def run(
    name,
    tensors,
    *,
    cu_seqlens=None,
    seqlens=None,
    initial_state=None,
    state_layout=None,
    dtype=np.float64,
    **options,
):
    """(o, final state) of onchip.ops.<name>_forward; rows that no sequence has are 0."""
    function = globals()[name]
    layout = state_layout or ("vk" if name in ("mamba1", "mamba2") else "kv")
    tensors = {key: np.asarray(x).astype(dtype) for key, x in tensors.items() if x is not None}
    names = list(inspect.signature(function).parameters)
    rows = [key for key in tensors if is_row(name, key, tensors[key])]
    values = next(key for key in ("x", "v", "u") if key in tensors)
    # Rows a token of the tensors that have several.
    each = dict.fromkeys(("k", "v", "beta"), options.get("num_householder", 1))
    tokens = next((key for key in ("q", "r") if key in tensors), values)
    if cu_seqlens is None:
        batch, slot = tensors[tokens].shape[:2]
        spans = [(n, 0, slot) for n in range(batch)]
    else:
        spans = [(None, int(a), int(b)) for a, b in itertools.pairwise(cu_seqlens)]
    initial = None
    if initial_state is not None:
        initial = tuple(np.asarray(part).astype(dtype) for part in _parts(initial_state))
        initial = _turned(name, initial) if layout == "vk" else initial
    o = np.zeros((*tensors[tokens].shape[:-2], *tensors[values].shape[-2:]), dtype)
    finals = []
    for n, (batch_index, begin, end) in enumerate(spans):
        if seqlens is not None:
            end = begin + int(seqlens[n])
        one = dict(tensors)
        for key in rows:
            span = slice(begin * each.get(key, 1), end * each.get(key, 1))
            one[key] = tensors[key][span if batch_index is None else (batch_index, span)]
        state = None if initial is None else tuple(part[n] for part in initial)
        assert set(one) <= set(names) or "options" in names
        out, final = function(**one, state=state, **options)
        o[slice(begin, end) if batch_index is None else (batch_index, slice(begin, end))] = out
        finals.append(final)
    joined = tuple(np.stack(parts) for parts in zip(*finals, strict=True)) if finals else None
    return o, _turned(name, joined) if joined and layout == "vk" else joined
