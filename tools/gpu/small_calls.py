#!/usr/bin/env python3
"""Small calls of every sm90 attention forward kernel through onchip.torch, for compute-sanitizer:
tails, empty rows, packed sequences, tiles shared out by keys. Each result is compared with the
formula in fp64."""

import itertools
import sys

import torch

from onchip.torch import attention


def formula(q, k, v, causal):
    """One sequence, [rows, heads, dim]."""
    q, k, v = (x.double().transpose(0, 1) for x in (q, k, v))
    group = q.shape[0] // k.shape[0]
    k, v = k.repeat_interleave(group, 0), v.repeat_interleave(group, 0)
    s = q @ k.transpose(1, 2) * q.shape[2] ** -0.5
    if causal:
        i = torch.arange(q.shape[1], device=q.device)[:, None]
        j = torch.arange(k.shape[1], device=q.device)[None]
        s = s.masked_fill(j > i + k.shape[1] - q.shape[1], float("-inf"))
    return (torch.softmax(s, -1).nan_to_num(0) @ v).transpose(0, 1)


def check(name, got, wanted):
    error = float((got.double() - wanted).abs().max())
    if not error < 0.05:
        sys.exit(f"{name}: off by {error}")


def main():
    torch.manual_seed(0)
    count = 0
    kinds = itertools.product((torch.bfloat16, torch.float16), (64, 128), (False, True))
    for dtype, dim, causal in kinds:

        def draw(*shape, dtype=dtype):
            return torch.randn(shape, device="cuda").to(dtype)

        # The last is a call of 16 tiles: without a mask, at 128, all are split.
        for rows, keys in ((200, 333), (65, 1), (130, 70), (130, 2100)):
            q, k, v = draw(2, rows, 4, dim), draw(2, keys, 2, dim), draw(2, keys, 2, dim)
            o = attention(q, k, v, causal=causal, backend="cuda.sm90")
            for b in range(2):
                check(f"{dtype} {dim} {rows}x{keys}", o[b], formula(q[b], k[b], v[b], causal))
            count += 1
        cuts = [0, 5, 5, 134, 300]
        q, k, v = (draw(310, heads, dim) for heads in (4, 2, 2))
        cu = torch.tensor(cuts, device="cuda")
        o, _ = attention(
            q, k, v, causal=causal, cu_seqlens_q=cu, backend="cuda.sm90", return_lse=True
        )
        for begin, end in itertools.pairwise(cuts):
            part = slice(begin, end)
            if end > begin:
                check(f"packed {dtype} {dim}", o[part], formula(q[part], k[part], v[part], causal))
        check("slack", o[300:], torch.zeros_like(o[300:]).double())
        count += 1
    print(f"{count} calls right")


with torch.no_grad():
    main()
