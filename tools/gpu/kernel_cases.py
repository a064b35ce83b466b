"""The calls that kernel_check.py makes of the sm90 attention forward kernel, and how a result is
judged: the formula in float64, tensors laid out in larger buffers of NaN."""

import itertools
import random
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))

# ---- reference


def visible(sq, sk, offset, causal, device):
    import torch

    i = torch.arange(sq, device=device)[:, None]
    j = torch.arange(sk, device=device)[None, :]
    return (j <= i + offset) if causal else torch.ones(sq, sk, dtype=torch.bool, device=device)


def formula(q, k, v, scale, offset, causal, rounding=None):
    """O [sq, hq, dv] and lse [hq, sq] of one sequence: fp64, or the plain formula with S, P and O
    rounded to a type and products in fp32."""
    import torch

    wide = torch.float64 if rounding is None else torch.float32
    r = (lambda x: x) if rounding is None else (lambda x: x.to(rounding).to(wide))
    group = q.shape[1] // k.shape[1]
    q, k, v = (x.to(wide).transpose(0, 1) for x in (q, k, v))
    k, v = k.repeat_interleave(group, 0), v.repeat_interleave(group, 0)
    s = r(q @ k.transpose(1, 2) * scale)
    seen = visible(q.shape[1], k.shape[1], offset, causal, q.device)
    s = s.masked_fill(~seen, float("-inf"))
    lse = torch.logsumexp(s, -1) if s.shape[-1] else s.new_full(s.shape[:2], float("-inf"))
    p = r(torch.exp(s - lse[..., None]))
    p = torch.where(seen & (lse != float("-inf"))[..., None], p, torch.zeros_like(p))
    o = r(p @ v)
    return o.transpose(0, 1), lse


def judge(name, o, lse, ref, plain, failures):
    """docs/semantics.md, section 5. ref, plain: (o, lse)."""
    import torch

    def fail(text):
        failures.append(f"{name}: {text}")

    got, want = o.double(), ref[0].double()
    if not torch.equal(torch.isnan(got), torch.isnan(want)):
        return fail(f"NaN positions of o differ ({int(torch.isnan(got).sum())} got)")
    bits = 7 if o.dtype == torch.bfloat16 else 10
    largest = float(want.nan_to_num().abs().max()) if want.numel() else 0.0
    ulp = 2.0 ** (torch.tensor(largest).log2().floor().item() - bits) if largest else 0.0
    bound = 2 * float((plain[0].double() - want).nan_to_num().abs().max()) + ulp if largest else 0.0
    error = float((got - want).nan_to_num().abs().max()) if want.numel() else 0.0
    if not error <= bound:
        fail(f"o off by {error:.3e}, bound {bound:.3e}")
    if lse is not None:
        a, b = lse.double(), ref[1].double()
        if not torch.equal(torch.isinf(a) & (a < 0), torch.isinf(b)) or not torch.equal(
            torch.isnan(a), torch.isnan(b)
        ):
            return fail("-inf or NaN positions of lse differ")
        finite = torch.isfinite(b)
        off = ((a - b).abs() / b.abs().clamp(min=1))[finite]
        if off.numel() and not float(off.max()) <= 1e-5:
            fail(f"lse off by {float(off.max()):.3e}")
    return None


# ---- cases


class Case:
    """Tensors of one call, laid out in larger buffers of NaN. `lengths`: None, or per sequence
    (q begin, q slot, q length, kv begin, kv length) with the batch index first."""

    def __init__(
        self,
        name,
        *,
        dtype,
        heads,
        dims,
        causal=False,
        top_left=False,
        scale=None,
        batch=1,
        sq=1,
        sk=1,
        layout="bshd",
        packed=None,
        used=None,
        spread=1.0,
        bad=None,
        index="int32",
        changes=None,
    ):
        self.__dict__.update(locals())
        del self.__dict__["self"]
        self.changes = changes or {}

    def tensor(self, rows, heads, dim, value):
        """[batch, rows, heads, dim] in the case's layout, inside a buffer filled with `value`."""
        import torch

        dtype = torch.bfloat16 if self.dtype == "bf16" else torch.float16
        batch = 1 if self.packed else self.batch
        if self.layout in ("guard before", "guard behind"):
            import guard_pages

            view = guard_pages.tensor(
                (batch, rows, heads, dim), dtype, value, self.layout == "guard behind"
            )
            return view, view
        wide = -(-dim // 8) * 8 + (8 if self.layout != "bshd" else 0)
        if self.layout == "bhsd":
            buffer = torch.full((batch, heads, rows + 5, wide), value, dtype=dtype, device="cuda")
            view = buffer[:, :, 1 : rows + 1, :dim].transpose(1, 2)
        elif self.layout == "sbhd":
            buffer = torch.full(
                (rows + 5, batch + 1, heads, wide), value, dtype=dtype, device="cuda"
            )
            view = buffer[1 : rows + 1, :batch, :, :dim].transpose(0, 1)
        else:
            buffer = torch.full((batch, rows + 5, heads, wide), value, dtype=dtype, device="cuda")
            view = buffer[:, 1 : rows + 1, :, :dim]
        return buffer, view

    def run(self, failures, *, debug=False):
        import attention_runner
        import torch

        hq, hkv = self.heads
        dqk, dv = self.dims
        nan = float("nan")
        total_q, total_kv = (self.sq, self.sk)
        _, q = self.tensor(total_q, hq, dqk, nan)
        _, k = self.tensor(total_kv, hkv, dqk, nan)
        _, v = self.tensor(total_kv, hkv, dv, nan)
        o_buffer, o = self.tensor(total_q, hq, dv, nan)
        lse_shape = (hq, total_q) if self.packed else (self.batch, hq, total_q)
        lse = torch.full(lse_shape, nan, device="cuda")
        arguments, sequences = {}, []
        integer = torch.int64 if self.index == "int64" else torch.int32
        if self.packed:

            def clamp(values, total):
                out = []
                for x in values:
                    out.append(min(max(x, out[-1] if out else 0), total))
                return out

            cu_q, cu_kv = self.packed
            arguments["cu_seqlens_q"] = torch.tensor(cu_q, dtype=integer, device="cuda")
            arguments["cu_seqlens_kv"] = torch.tensor(cu_kv, dtype=integer, device="cuda")
            cu_q, cu_kv = clamp(cu_q, total_q), clamp(cu_kv, total_kv)
            for n in range(len(cu_q) - 1):
                sequences.append(
                    [0, cu_q[n], cu_q[n + 1] - cu_q[n], cu_kv[n], cu_kv[n + 1] - cu_kv[n]]
                )
        else:
            sequences = [[b, 0, total_q, 0, total_kv] for b in range(self.batch)]
        if self.used:
            for axis, values in zip(("q", "kv"), self.used, strict=True):
                if values is None:
                    continue
                arguments[f"seqlens_{axis}"] = torch.tensor(values, dtype=integer, device="cuda")
                at = 2 if axis == "q" else 4
                for s, n in zip(sequences, values, strict=True):
                    s[at] = min(max(n, 0), s[at])
        expected = torch.zeros(o.shape, dtype=torch.float64, device="cuda")
        plain = torch.zeros(o.shape, dtype=torch.float64, device="cuda")
        expected_lse = torch.full(lse.shape, float("-inf"), dtype=torch.float64, device="cuda")
        scale = self.scale if self.scale is not None else dqk**-0.5
        for b, q0, nq, k0, nk in sequences:
            offset = 0 if self.top_left else nk - nq
            seen_keys = max(min(nk, nq + offset), 0) if self.causal else nk
            for t, begin, n in ((q, q0, nq), (k, k0, seen_keys), (v, k0, seen_keys)):
                fresh = torch.randn((n, *t.shape[2:]), device="cuda")
                spread = 1.0 if t is v else self.spread
                t[b, begin : begin + n] = (fresh * spread).to(t.dtype)
            if self.bad == "constant":
                q[b, q0 : q0 + nq] = self.spread
                k[b, k0 : k0 + seen_keys] = -self.spread
            if self.bad == "query" and nq:
                q[b, q0] = nan
            qs, ks, vs = (q[b, q0 : q0 + nq], k[b, k0 : k0 + seen_keys], v[b, k0 : k0 + seen_keys])
            out, out_lse = formula(qs, ks, vs, scale, offset, self.causal)
            expected[b, q0 : q0 + nq] = out
            plain[b, q0 : q0 + nq] = formula(qs, ks, vs, scale, offset, self.causal, q.dtype)[0]
            if self.packed:
                expected_lse[:, q0 : q0 + nq] = out_lse
            else:
                expected_lse[b, :, q0 : q0 + nq] = out_lse
        squeeze = (lambda t: t[0]) if self.packed else (lambda t: t)
        failure = torch.zeros(8, dtype=torch.int32, pin_memory=True) if debug else None
        results = []
        # As many blocks as fit; few, each with tiles of many kinds.
        for blocks in (None, 5):
            o_buffer.fill_(nan)
            lse.fill_(nan)
            call = attention_runner.Attention(
                *(squeeze(t) for t in (q, k, v, o)),
                lse,
                scale=self.scale,
                causal=self.causal,
                top_left=self.top_left,
                blocks=blocks,
                wait_failure=failure,
                debug_waits=int(debug),
                **self.changes,
                **arguments,
            )
            try:
                call.launch()
                torch.cuda.synchronize()
            except Exception:
                if debug and int(failure[0]):
                    _, block, thread, role, barrier, stage, parity = failure[:7].tolist()
                    print(
                        f"STUCK {self.name} {call.spec.name}: block {block} thread {thread} "
                        f"role {role} barrier {barrier} stage {stage} parity {parity}"
                    )
                raise
            if self.name.startswith("split") and call.split_tiles == 0:
                failures.append(f"{self.name} {call.spec.name}: no tile is split")
            results.append((o_buffer.clone(), lse.clone()))
        name = f"{self.name} [{call.spec.name}]"
        for a, b in zip(*results, strict=True):
            if not torch.equal(a.view(torch.uint8), b.view(torch.uint8)):
                failures.append(f"{name}: bits depend on the schedule")
        judge(name, o, lse, (expected, expected_lse), (plain, expected_lse), failures)
        outside = torch.ones_like(o_buffer, dtype=torch.bool)
        offset = o.storage_offset()
        torch.as_strided(outside, o.shape, o.stride(), offset).fill_(False)
        if not torch.isnan(o_buffer[outside]).all():
            failures.append(f"{name}: wrote outside o")


LENGTHS = (
    (1, 1),
    (64, 64),
    (77, 77),
    (128, 128),
    (129, 257),
    (257, 129),
    (5, 2),
    (65, 64),
    (257, 128),
    (100, 229),
    (1, 300),
    (300, 1),
    (192, 192),
    (193, 385),
    (512, 1536),
    (1536, 512),
    (1000, 1000),
    (640, 0),
)
HEADS = ((5, 5), (8, 2), (6, 1), (9, 3))
MASKS = (
    ("full", {}),
    ("causal", {"causal": True}),
    ("top_left", {"causal": True, "top_left": True}),
)


def dense_cases():
    turn = 0
    for dtype in ("bf16", "fp16"):
        for dim in (64, 128):
            for mask, options in MASKS:
                for sq, sk in LENGTHS:
                    turn += 1
                    yield Case(
                        f"dense {sq}x{sk} {mask}",
                        dtype=dtype,
                        heads=HEADS[turn % 4],
                        dims=(dim, dim),
                        batch=1 + turn % 3,
                        sq=sq,
                        sk=sk,
                        **options,
                    )
    for mask, options in MASKS:
        for dim in (64, 128):
            common = dict(dtype="bf16", heads=(4, 2), dims=(dim, dim), **options)
            yield Case(f"dense 4096 {mask}", **{**common, "heads": (3, 3)}, sq=4096, sk=4096)
            for layout in ("bhsd", "sbhd"):
                yield Case(f"{layout} {mask}", batch=2, sq=333, sk=271, layout=layout, **common)
            for scale in (-0.1, 0.0, 1.0, 1e-4):
                yield Case(f"scale {scale} {mask}", batch=2, sq=200, sk=333, scale=scale, **common)
            yield Case(f"spread 30 {mask}", sq=300, sk=300, spread=30.0, **common)
            for size in (1.0, 30.0):
                yield Case(
                    f"all scores {-size * size * dim:g} {mask}",
                    sq=200,
                    sk=200,
                    spread=size,
                    bad="constant",
                    **common,
                )
            yield Case(f"NaN in a query {mask}", sq=300, sk=300, bad="query", **common)
            many = {**common, "heads": (2, 1)}
            yield Case(f"many small {mask}", batch=3000, sq=3, sk=5, **many)
        for dims in (
            (8, 8),
            (40, 40),
            (72, 72),
            (96, 96),
            (120, 120),
            (64, 128),
            (128, 64),
            (1, 24),
            (33, 104),
        ):
            # Rows of a width that is no multiple of 16 bytes lie in wider ones.
            yield Case(
                f"dims {dims} {mask}",
                dtype="fp16",
                heads=(4, 2),
                dims=dims,
                batch=2,
                sq=150,
                sk=210,
                layout="bhsd",
                **options,
            )


def varlen_cases():
    rng = random.Random(7)

    def boundaries(lengths, first):
        out = [first]
        for n in lengths:
            out.append(out[-1] + n)
        return out

    for dtype, dim in (("bf16", 64), ("bf16", 128), ("fp16", 64), ("fp16", 128)):
        for mask, options in MASKS:
            common = dict(dtype=dtype, dims=(dim, dim), **options)
            lists = {
                "one": ([300], [300]),
                "mixed": ([5, 0, 129, 64, 1, 300, 17], [9, 40, 129, 0, 1, 64, 333]),
                "decode-like": ([1, 0, 1], [3, 0, 5]),
                "many": (
                    [rng.randrange(0, 40) for _ in range(300)],
                    [rng.randrange(0, 90) for _ in range(300)],
                ),
            }
            for turn, (name, (lq, lk)) in enumerate(lists.items()):
                first = 3 * (turn % 2)
                cu_q, cu_kv = boundaries(lq, first), boundaries(lk, 2 * first)
                yield Case(
                    f"packed {name} {mask}",
                    heads=HEADS[turn % 4],
                    packed=(cu_q, cu_kv),
                    sq=cu_q[-1] + 150 * (turn % 2),
                    sk=cu_kv[-1] + 7,
                    index=("int32", "int64")[turn % 2],
                    **common,
                )
                used = [max(0, n - rng.randrange(0, 9)) for n in lq], [n // 2 for n in lk]
                yield Case(
                    f"packed used {name} {mask}",
                    heads=HEADS[(turn + 1) % 4],
                    packed=(cu_q, cu_kv),
                    used=used,
                    sq=cu_q[-1] + 1,
                    sk=cu_kv[-1],
                    index=("int64", "int32")[turn % 2],
                    **common,
                )
            yield Case(
                f"packed bad cu_seqlens {mask}",
                heads=(4, 2),
                sq=400,
                sk=500,
                packed=([-5, 130, 90, 260, 9000], [40, 20, 200, 470, 480]),
                **common,
            )
            yield Case(
                f"packed strided {mask}",
                heads=(4, 2),
                sq=400,
                sk=500,
                layout="bhsd",
                packed=([0, 130, 390], [0, 200, 480]),
                **common,
            )
            yield Case(
                f"packed no sequence {mask}",
                heads=(4, 2),
                sq=200,
                sk=5,
                packed=([0], [0]),
                **common,
            )
            yield Case(
                f"dense seqlens {mask}",
                heads=(4, 2),
                batch=5,
                sq=333,
                sk=300,
                used=([333, 0, 100, 64, 700], [300, 5, 0, 65, -3]),
                **common,
            )
            yield Case(
                f"dense kv seqlens {mask}",
                heads=(4, 2),
                batch=3,
                sq=200,
                sk=300,
                used=(None, [300, 129, 1]),
                index="int64",
                layout="sbhd",
                **common,
            )


def turn_cases():
    for dim, causal, turn_taking in itertools.product((64, 128), (False, True), (0, 1)):
        yield Case(
            f"turns={turn_taking} causal={causal}",
            dtype="bf16",
            heads=(6, 2),
            dims=(dim, dim),
            sq=1000,
            sk=1000,
            causal=causal,
            batch=20,
            changes={"turn_taking": turn_taking},
        )


def split_cases():
    """Last waves of one tile and of about half of 132 multiprocessors, calls of fewer tiles
    than there are; with tails of rows and keys, with two parts a tile and with many."""
    for dtype, dims in itertools.product(("bf16", "fp16"), ((128, 128), (64, 128), (128, 64))):
        common = dict(dtype=dtype, dims=dims)
        for name, heads, batch, sq, sk in (
            ("one beyond a wave", (19, 19), 7, 90, 1500),
            ("half a wave", (12, 3), 17, 60, 2500),
            ("half a wave, tails", (8, 8), 4, 200, 2500),
            ("one tile", (1, 1), 1, 64, 4096),
            ("few tiles", (5, 1), 2, 300, 3333),
        ):
            yield Case(f"split {name}", heads=heads, batch=batch, sq=sq, sk=sk, **common)
        few = dict(heads=(4, 2), sq=300, sk=2000, **common)
        yield Case("split scale -0.1", scale=-0.1, **few)
        yield Case("split scale 0", scale=0.0, **few)
        yield Case("split spread 30", spread=30.0, **few)
        yield Case("split NaN in a query", bad="query", **few)
        yield Case("split bhsd", layout="bhsd", **few)
    yield Case("split odd dims", dtype="bf16", heads=(4, 2), dims=(41, 72), sq=200, sk=2000)
