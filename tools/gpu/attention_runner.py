"""Launches the attention forward kernel on torch tensors without the library."""

import ctypes
import dataclasses
import functools
import hashlib
import os
import random

import attention_plan
import driver
import nvrtc
import torch

CUBINS = nvrtc.ROOT / "build/cubins"


def source_digest():
    """Of everything a cubin depends on."""
    options = (option for option in nvrtc.OPTIONS if not option.startswith("-I"))
    h = hashlib.sha256("\n".join([nvrtc.version(), *options]).encode())
    folders = ("src/gpu/tile", "src/gpu/kernels/sm90")
    for path in sorted(p for f in folders for p in (nvrtc.ROOT / f).rglob("*")):
        if path.suffix in (".cuh", ".hpp"):
            h.update(path.read_bytes())
    return h.hexdigest()[:12]


def cubin(spec):
    """From build/cubins if it was made from the present sources, else compiled now."""
    path = CUBINS / f"{spec.name}-{source_digest()}.cubin"
    if path.exists():
        return path.read_bytes()
    image, log = nvrtc.compile_text(attention_plan.kernel_text(), spec.name, [spec.define])
    if image is None:
        raise RuntimeError(f"{spec.name}: {log}")
    CUBINS.mkdir(parents=True, exist_ok=True)
    temporary = path.with_suffix(f".{os.getpid()}")
    temporary.write_bytes(image)
    temporary.replace(path)
    return image


@functools.cache
def kernel(spec):
    return driver.Kernel(cubin(spec), attention_plan.library().plan_entry().decode(), spec.block[2])


def _tensor_fields(t):
    if t.dim() == 3:
        t = t.unsqueeze(0)
    size = t.element_size()
    batch, rows, heads, dim = t.shape
    if t.stride(3) != 1 and dim > 1:
        raise ValueError("the innermost stride must be 1")
    strides = (t.stride(0) * size, t.stride(1) * size, t.stride(2) * size)
    return (ctypes.c_longlong * 8)(t.data_ptr(), *strides, batch, rows, heads, dim)


class Refused(Exception):
    pass


class Attention:
    """One call, prepared: launch() may run many times. q, k, v, o: [batch, rows, heads, dim], or
    packed [rows, heads, dim] with cu_seqlens; lse like [batch, heads, rows] or [heads, rows].
    `blocks`: at most so many, else one a multiprocessor. `batch_invariant`: no tile is split; those
    that are do not depend on `blocks`."""

    def __init__(
        self,
        q,
        k,
        v,
        o,
        lse=None,
        *,
        scale=None,
        causal=False,
        top_left=False,
        cu_seqlens_q=None,
        cu_seqlens_kv=None,
        seqlens_q=None,
        seqlens_kv=None,
        spec=None,
        blocks=None,
        batch_invariant=False,
        longest_block=None,
        wait_failure=None,
        **changes,
    ):
        lib = attention_plan.library()
        packed = q.dim() == 3
        lengths = (cu_seqlens_q, cu_seqlens_kv, seqlens_q, seqlens_kv)
        varlen = any(t is not None for t in lengths)
        if spec is None:
            spec = attention_plan.select(
                q.dtype == torch.bfloat16, q.shape[-1], v.shape[-1], causal, varlen
            )
        self.spec = spec = dataclasses.replace(spec, **changes)
        batch = cu_seqlens_q.numel() - 1 if packed else q.shape[0]
        rows = q.dim() - 3
        shape = (ctypes.c_int * 9)(
            batch,
            q.shape[rows],
            k.shape[rows],
            q.shape[-2],
            k.shape[-2],
            q.shape[-1],
            v.shape[-1],
            int(packed),
            int(top_left),
        )
        reason = lib.plan_reject(spec.array, shape)
        tensors = [_tensor_fields(t) for t in (q, k, v, o)]
        for t in tensors:
            reason = reason or lib.plan_reject_tensor(t)
        if reason:
            raise Refused(reason.decode())
        maps = []
        for operand, t in enumerate(tensors):
            out = (ctypes.c_ulonglong * 15)()
            lib.plan_map(spec.array, shape, operand, t, out)
            dtype = driver.DTYPE_BFLOAT16 if spec.bf16 else driver.DTYPE_FLOAT16
            maps.append(driver.tensor_map(dtype, out[0], out[1:6], out[6:10], out[10:15]))
        multiprocessors = torch.cuda.get_device_properties(0).multi_processor_count
        split = (ctypes.c_int * 4)()
        lib.plan_split(spec.array, shape, multiprocessors, int(batch_invariant), split)
        self.split_tiles = split[0]
        self._grid = lib.plan_grid(spec.array, shape, split, blocks or multiprocessors)

        def anything(size):
            values = (-(2**63), 2**63 - 1, (-(-size // 8),))
            return torch.randint(*values, dtype=torch.int64, device="cuda") if size else None

        counter = anything(lib.plan_counter_bytes(spec.array, shape, split, self._grid))
        parts = anything(lib.plan_parts_bytes(spec.array, split))
        pointers = (ctypes.c_ulonglong * 10)(
            *(
                0 if t is None else t.data_ptr()
                for t in (lse, *lengths, counter, parts, longest_block, wait_failure)
            ),
            random.getrandbits(63) * 2,
        )
        int64 = sum(
            1 << i for i, t in enumerate(lengths) if t is not None and t.dtype == torch.int64
        )
        _, self._threads, _, params_bytes = spec.block
        params = (ctypes.c_char * params_bytes)()
        strides = (
            (0, 0)
            if lse is None
            else ((0, lse.stride(0)) if packed else (lse.stride(0), lse.stride(1)))
        )
        scale = q.shape[-1] ** -0.5 if scale is None else scale
        lib.plan_params(spec.array, shape, split, scale, pointers, *strides, int64, params)
        self._arguments = [*maps, params]
        self._keep = (q, k, v, o, lse, lengths, counter, parts, longest_block, wait_failure)
        self._kernel = kernel(spec) if self._grid else None

    def launch(self):
        if self._kernel is not None:
            self._kernel.launch(
                self._grid, self._threads, self._arguments, torch.cuda.current_stream().cuda_stream
            )
