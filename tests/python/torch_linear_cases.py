"""What the tests of onchip.torch's linear operators share: every variant as a call on tensors, and
its recurrence as a plain loop in PyTorch, whose gradients are autograd's."""

import linear_cases
import numpy as np
import torch
from linear_cases import Sizes
from torch.nn.functional import logsigmoid, silu

import onchip.torch

STATES = Sizes(batch=2, length=5, heads_k=2, heads_v=4, dk=3, dv=2)


def as_tensor(x):
    return torch.from_numpy(np.ascontiguousarray(x))


def as_state(state):
    if isinstance(state, tuple):
        return tuple(as_tensor(part) for part in state)
    return as_tensor(state)


def parts_of(state):
    return () if state is None else state if isinstance(state, tuple) else (state,)


def draw(variant, dtype=torch.float64, seed=0, sizes=STATES, **lead):
    rng = np.random.default_rng(seed)
    drawn = linear_cases.draw(rng, variant, sizes, **lead)
    return {name: as_tensor(x).to(dtype) for name, x in drawn.items()}


def draw_state(variant, count=2, seed=1, sizes=STATES, layout=None, dtype=torch.float64):
    layout = variant.layout({}) if layout is None else layout
    rng = np.random.default_rng(seed)
    state = as_state(linear_cases.draw_state(rng, variant, sizes, count, layout=layout))
    if isinstance(state, tuple):
        return tuple(part.to(dtype) for part in state)
    return state.to(dtype)


def call(variant, tensors, phase="", **options):
    """onchip.torch's function: phase "" or "_step"."""
    positional, keyword = linear_cases._split(variant, tensors)
    function = getattr(onchip.torch, f"{variant.op}{phase}")
    return function(*positional, **keyword, **variant.options, **options)


def leaves(tensors):
    return {name: x.detach().clone().requires_grad_() for name, x in tensors.items()}


def leaf_state(state):
    made = tuple(part.detach().clone().requires_grad_() for part in parts_of(state))
    return made if isinstance(state, tuple) else made[0] if made else None


# ---- the recurrences as plain loops --------------------------------------------------------------


def _unit(x):
    return x / (x.square().sum(-1, keepdim=True) + 1e-6).sqrt()


def _softplus(x):
    return torch.where(x > 20, x, torch.log1p(x.clamp(max=20).exp()))


def _rates(given, options):
    """log_decay and beta as the recurrence has them, from raw ones where A_log says so."""
    gate, beta = given.get("log_decay"), given.get("beta")
    if "A_log" not in given:
        return gate, beta
    rate = given["A_log"].exp().reshape(-1, *[1] * (gate.dim() - 3))
    raw = gate + given.get("dt_bias", torch.zeros(()))
    bound = options.get("lower_bound")
    gate = -rate * _softplus(raw) if bound is None else bound * (rate * raw).sigmoid()
    return gate, beta.sigmoid() * (2 if options.get("allow_neg_eigval") else 1)


def _plain_gsa(given, initial_state, layout):
    q, k, v, s = (given[name] for name in "qkvs")
    q, k = (x.repeat_interleave(v.shape[2] // x.shape[2], 2) for x in (q, k))
    lead = (q.shape[0], v.shape[2])
    if initial_state is None:
        keys = q.new_zeros(*lead, q.shape[-1], s.shape[-1])
        values = q.new_zeros(*lead, s.shape[-1], v.shape[-1])
    else:
        keys, values = (x.mT if layout == "vk" else x for x in initial_state)
    rows = []
    for t in range(q.shape[1]):
        alpha = given["log_decay"][:, t].exp()
        keys = keys * alpha[..., None, :] + k[:, t, :, :, None] * s[:, t, :, None, :]
        values = values * alpha[..., None] + s[:, t, :, :, None] * v[:, t, :, None, :]
        logits = q.shape[-1] ** -0.5 * (q[:, t, :, None, :] @ keys)
        rows.append((logits.softmax(-1) @ values).squeeze(-2))
    return torch.stack(rows, 1), tuple(x.mT if layout == "vk" else x for x in (keys, values))


def _plain_mamba1(given, options, initial_state, layout):
    delta = given["delta"] + given.get("delta_bias", torch.zeros(()))
    delta = _softplus(delta) if options.get("delta_softplus", True) else delta
    u, rates = given["u"], given["A"]
    channels, numbers = rates.shape

    def spread(x):
        x = x[:, :, None] if x.dim() == 3 else x
        return x.repeat_interleave(channels // x.shape[2], 2)

    b, c = spread(given["B"]), spread(given["C"])
    state = u.new_zeros(u.shape[0], channels, numbers)
    if initial_state is not None:
        state = initial_state.mT if layout == "kv" else initial_state
    rows = []
    for t in range(u.shape[1]):
        step = delta[:, t, :, None]
        state = (step * rates).exp() * state + step * b[:, t] * u[:, t, :, None]
        y = (c[:, t] * state).sum(-1)
        if "D" in given:
            y = y + given["D"] * u[:, t]
        rows.append(y * silu(given["z"][:, t]) if "z" in given else y)
    return torch.stack(rows, 1), (state.mT if layout == "kv" else state,)


def _plain_rwkv4(given, initial_state):
    k, v, log_decay, u = (given[name] for name in ("k", "v", "log_decay", "u"))
    numerator = denominator = torch.zeros_like(v[:, 0])
    m = torch.full_like(numerator, -float("inf"))
    if initial_state is not None:
        numerator, denominator = (part * initial_state[2].exp() for part in initial_state[:2])
        m = initial_state[2].detach()
    rows = []
    for t in range(k.shape[1]):
        own = (u + k[:, t]).exp()
        rows.append((numerator + own * v[:, t]) / (denominator + own))
        numerator = log_decay.exp() * numerator + k[:, t].exp() * v[:, t]
        denominator = log_decay.exp() * denominator + k[:, t].exp()
        m = torch.maximum(log_decay + m, k[:, t]).detach()
    return torch.stack(rows, 1), (numerator * (-m).exp(), denominator * (-m).exp(), m)


def _plain_hgrn(given, initial_state):
    x, log_decay = given["x"], given["log_decay"]
    state = torch.zeros_like(x[:, 0]) if initial_state is None else initial_state
    rows = []
    for t in range(x.shape[1]):
        state = log_decay[:, t].exp() * state + x[:, t]
        rows.append(state)
    return torch.stack(rows, 1), (state,)


def plain(variant, tensors, initial_state=None, *, layout=None):
    """(o, parts of the final state), batch by batch of tokens, states [N, Hv, dk, dv]."""
    if variant.op == "hgrn":
        return _plain_hgrn(tensors, initial_state)
    if variant.op == "rwkv4":
        return _plain_rwkv4(tensors, initial_state)
    if variant.op == "mamba1":
        layout = variant.layout({}) if layout is None else layout
        return _plain_mamba1(tensors, variant.options, initial_state, layout)
    if variant.op == "gsa":
        return _plain_gsa(tensors, initial_state, variant.layout({}) if layout is None else layout)
    op, options = variant.op, dict(variant.options)
    layout = variant.layout({}) if layout is None else layout
    given = dict(tensors)
    if op == "mamba2":
        given |= dict(q=given["C"], k=given["B"], v=given["x"])
    if "r" in given:
        given["q"] = given["r"]
    heads = given["v"].shape[2]

    def spread(x):
        return x.repeat_interleave(heads // x.shape[2], 2)

    each = options.get("num_householder", 1)
    q, v = spread(given["q"]), given["v"]
    gate, beta = _rates(given, options)
    k = spread(given["k"]) if "k" in given else 1 - gate.exp()
    if options.get("qk_l2norm"):
        q, k = _unit(q), _unit(k)
    batch, length, _, dk = q.shape
    scale = 1.0 if op in ("mamba2", "rwkv7") else dk**-0.5
    parts = parts_of(initial_state)
    state = parts[0] if parts else q.new_zeros(batch, heads, dk, v.shape[-1])
    if parts and layout == "vk":
        state = state.mT
    n = parts[1] if len(parts) > 1 else q.new_zeros(batch, heads, dk)
    # mlstm's true state is e^m (C, n); the loop carries it, and m only for eps and the results.
    exponential = op == "mlstm" and options.get("gate", "exp") == "exp"
    m = q.new_zeros(batch, heads)
    if len(parts) > 2:
        state, n = state * parts[2].exp()[..., None, None], n * parts[2].exp()[..., None]
        m = parts[2].detach()
    if op == "retention":
        gate = torch.log(1 - 2.0 ** (-5 - torch.arange(heads, dtype=q.dtype)))
    if op == "mamba2":
        dt = given["dt"] + given.get("dt_bias", torch.zeros(()))
        dt = _softplus(dt) if options.get("dt_softplus", True) else dt
        dt = dt.clamp(*options.get("dt_limit", (0.0, float("inf"))))
        gate, v = dt * given["A"], dt[..., None] * v
    if op == "mlstm":
        gate = logsigmoid(given["f"])
        write = given["i"].exp() if exponential else given["i"].sigmoid()
        k = k * write[..., None]
    if gate is not None:
        gate = gate.expand(batch, length, heads) if gate.dim() == 1 else gate
    rows = []
    for t in range(length):
        at = slice(t * each, (t + 1) * each)
        before = state
        alpha = torch.ones(()) if gate is None else gate[:, t].exp()
        decay = alpha[..., None, None] if alpha.dim() < 3 else alpha[..., None]
        state = decay * state
        if op in ("linear_attention", "mlstm"):
            n = alpha[..., None] * n + k[:, t]
        if exponential:
            m = torch.maximum(gate[:, t] + m, given["i"][:, t]).detach()
        for row in range(at.start, at.stop):
            kt, vt = k[:, row], v[:, row]
            if op in ("rwkv7", "iplr"):
                a, b = spread(given["a"])[:, t], spread(given["b"])[:, t]
                removed = b[..., None] * (a[..., None, :] @ before)
                state = state + removed
                write = vt
            elif op == "gdn2":
                key = given["b"][:, t] * kt
                write = given["w"][:, t] * vt - (key[..., None, :] @ state).squeeze(-2)
            elif op == "comba":
                key = spread(given["p"])[:, t] * beta[:, t, :, None]
                write = beta[:, t, :, None] * vt - (key[..., None, :] @ before).squeeze(-2)
            elif beta is not None:
                held = (kt[..., None, :] @ state).squeeze(-2)
                write = beta[:, row, :, None] * (vt - held)
            else:
                write = vt
            state = state + kt[..., None] * write[..., None, :]
        read = state
        if op == "rwkv6":
            read = before + (given["u"] * k[:, t])[..., None] * v[:, t, :, None, :]
        o = scale * (q[:, t, :, None, :] @ read).squeeze(-2)
        dot = scale * (q[:, t] * n).sum(-1, keepdim=True)
        if op == "linear_attention" and options.get("normalize"):
            o = o / (dot + 1e-10)
        if exponential or (op == "mlstm" and options.get("normalize")):
            o = o / (dot.abs().clamp(min=1) + options.get("eps", 0.0) * m.exp()[..., None])
        if op == "mamba2":
            skip = given.get("D")
            if skip is not None:
                o = o + (skip[:, None] if skip.dim() == 1 else skip) * given["x"][:, t]
            if "z" in given:
                o = o * silu(given["z"][:, t])
        rows.append(o)
    o = torch.stack(rows, 1) if rows else q.new_zeros(batch, 0, heads, v.shape[-1])
    state, n = state * (-m).exp()[..., None, None], n * (-m).exp()[..., None]
    return o, (state.mT if layout == "vk" else state, n, m)[: variant.parts]
