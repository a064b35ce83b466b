"""cuda.sm90 in the operator tests: NumPy arrays go to the GPU as torch tensors and come back.

What the kernel refuses by its page must be refused with that reason, and the test is skipped with
it; whatever it takes is judged as on every other backend.
"""

import hypothesis
import ml_dtypes
import numpy as np
import pytest

import onchip

BACKEND = "cuda.sm90"
BFLOAT16 = np.dtype(ml_dtypes.bfloat16)
LENGTHS = ("cu_seqlens_q", "cu_seqlens_kv", "seqlens_q", "seqlens_kv")
# In the harness, what a test draws in one of these is drawn in the other: the kernel has the second
# only, and what a test says of masks and lengths holds in any dtype.
DTYPES = {np.dtype(np.float64): np.dtype(np.float16), np.dtype(np.float32): BFLOAT16}
# cases.py: options that the kernel has not.
WITHOUT = ("window", "softcap", "bias", "mask", "alibi_slopes", "segments", "sink", "dropout")
HEAD_DIMS = (8, 16, 24, 40, 64, 72, 96, 128)


def problem():
    """Why nothing can run on the backend here; None if it can."""
    rows = {row["name"]: row for row in onchip.describe()["backends"]}
    if BACKEND not in rows:
        return "not in the onchip that is installed"
    if not rows[BACKEND]["available"]:
        return rows[BACKEND]["detail"]
    try:
        import torch
    except ImportError:
        return "torch is not installed"
    return None if torch.cuda.is_available() else "this torch does not see the GPU"


needed = pytest.mark.skipif(problem() is not None, reason=f"{BACKEND}: {problem()}")


def _poison_torch():
    """New CUDA tensors start as NaN: what a kernel fails to write shows."""
    import torch

    torch.use_deterministic_algorithms(True)
    assert torch.empty(3, device="cuda").isnan().all()


def _root(array):
    while isinstance(array.base, np.ndarray):
        array = array.base
    return array


def to_torch(array):
    """The array on the GPU, with its strides and what lies around it, where torch can have them."""
    import torch

    dtype = {BFLOAT16: torch.bfloat16, np.dtype(bool): torch.bool}.get(array.dtype)
    dtype = dtype or getattr(torch, array.dtype.name)
    if array.size == 0:
        return torch.empty(array.shape, dtype=dtype, device="cuda")
    size = array.dtype.itemsize
    root = _root(array)
    offset = array.__array_interface__["data"][0] - root.__array_interface__["data"][0]
    strided = root.flags.c_contiguous and offset % size == 0
    if not strided or any(s < 0 or s % size for s in array.strides):
        root = array = array.copy(order="C")
        offset = 0
    flat = torch.from_numpy(root.reshape(-1).view(np.uint8).copy()).cuda()
    strides = [s // size for s in array.strides]
    return flat.view(dtype).as_strided(array.shape, strides, offset // size)


def to_numpy(tensor):
    import torch

    tensor = tensor.cpu()
    if tensor.dtype == torch.bfloat16:
        return tensor.view(torch.int16).numpy().view(BFLOAT16)
    return tensor.numpy()


def _legal(options, q, k):
    """Whether the lengths obey the contract: wrong ones are an error only in host memory."""
    totals = {"q": q.shape[-3], "kv": k.shape[-3]}
    for name in LENGTHS:
        values = options.get(name)
        if values is None:
            continue
        values, axis = np.asarray(values), name.rpartition("_")[2]
        if values.ndim != 1 or values.dtype.kind not in "iu" or values.min(initial=0) < 0:
            return False
        if name.startswith("cu_") and (
            values.size == 0 or (np.diff(values) < 0).any() or values[-1] > totals[axis]
        ):
            return False
        if name.startswith("seqlens_"):
            cu = options.get(f"cu_seqlens_{axis}", options.get("cu_seqlens_q"))
            slots = totals[axis] if cu is None else np.diff(np.asarray(cu))
            if (cu is not None and values.shape != slots.shape) or (values > slots).any():
                return False
    return True


def _reasons(q, k, v, tensors, options):
    """Words of which the refusal must have one; none: the kernel must take the call."""
    words = []
    if q.dtype not in (np.float16, BFLOAT16):
        words.append("dtype: got")
    if q.shape[-1] > 128 or v.shape[-1] > 128:
        words.append("got " + str(max(q.shape[-1], v.shape[-1])))
    if v.shape[-1] % 8:
        words.append("head_dim_v must be a multiple of 8")
    if 0 in (q.shape[-1], v.shape[-1]):
        words.append("head_dim must be at least 1")
    for name in ("softcap", "bias", "mask", "alibi_slopes", "sink"):
        if options.get(name) is not None and (name != "softcap" or options[name]):
            words.append(name)
    if options.get("q_segment_ids") is not None:
        words.append("segment ids")
    if options.get("dropout_p"):
        words.append("dropout")
    if max(options.get("window", (-1, -1))) >= 0:
        words.append("window")
    if options.get("check") and any(options.get(name) is not None for name in LENGTHS):
        words.append("check of lengths in device memory")
    for x in tensors:
        if x.shape[-1] > 1 and x.stride(-1) != 1:
            x = x.contiguous()  # as onchip.ops does
        strides = [s for s, n in zip(x.stride()[:-1], x.shape, strict=False) if n > 1]
        if any(s * x.element_size() % 16 for s in strides):
            words.append("outer strides must be multiples of 16 bytes")
        if any(s <= 0 for s in strides):
            words.append("outer strides of 0 or less")
        if x.data_ptr() % 16:
            words.append("base pointers must be multiples of 16 bytes")
    return words


def _of_one_dtype(*arrays):
    """What a test made itself, beside what it drew, follows the drawn ones (DTYPES)."""
    drawn = {x.dtype for x in arrays} & set(DTYPES.values())
    return [x.astype(DTYPES[x.dtype]) if DTYPES.get(x.dtype) in drawn else x for x in arrays]


def forward(q, k, v, **options):
    import torch

    import onchip.torch

    _poison_torch()
    q, k, v = _of_one_dtype(q, k, v)
    tensors = [to_torch(x) for x in (q, k, v)]
    on_device = _legal(options, q, k)
    given = {}
    for name, value in options.items():
        if isinstance(value, np.ndarray) and (on_device or name not in LENGTHS):
            value = to_torch(value)
        given[name] = value
    allowed = _reasons(q, k, v, tensors, options)
    try:
        results = onchip.ops.attention_forward(*tensors, **given, backend=BACKEND)
    except onchip.Unsupported as refusal:
        message = str(refusal)
        reason = message.partition(f"{BACKEND}: ")[2]
        assert reason, message
        assert any(words in reason for words in allowed), f"{message}\nallowed: {allowed}"
        if hypothesis.currently_in_test_context():
            hypothesis.reject()
        pytest.skip(f"{BACKEND}: {reason}")
    again = onchip.torch.attention(*tensors, **given, backend=BACKEND, return_lse=True)
    for one, other in zip(results, again, strict=True):
        assert torch.equal(one.view(torch.uint8), other.view(torch.uint8))
    return tuple(to_numpy(x) for x in results)
