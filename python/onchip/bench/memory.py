"""Peak memory of a call as the kernel sees it: whoever allocates, NumPy, C++ or a framework."""

import ctypes
import gc
from collections.abc import Callable
from pathlib import Path

_STATUS = Path("/proc/self/status")
_CLEAR_REFS = Path("/proc/self/clear_refs")
_RESET_PEAK = "5"

# The kernel counts resident pages per thread or CPU and adds them up late.
RESOLUTION_BYTES = 512 * 1024


def _resident(field: str) -> int:
    for line in _STATUS.read_text(encoding="ascii").splitlines():
        if line.startswith(field + ":"):
            return int(line.split()[1]) * 1024
    raise OSError(f"{_STATUS}: no {field}")


def peak_extra_bytes(call: Callable[[], object], result_bytes: int) -> int | None:
    """Resident memory at the call's peak, minus that before it, minus its results.

    None where the kernel does not let a process reset its peak. The caller warms up first: pages of
    code that the first call loads are not the call's memory.
    """
    gc.collect()
    # Free memory that malloc keeps would be taken again unseen.
    ctypes.CDLL(None).malloc_trim(0)
    try:
        _CLEAR_REFS.write_text(_RESET_PEAK, encoding="ascii")
        before = _resident("VmRSS")
    except OSError:
        return None
    result = call()
    peak = _resident("VmHWM")
    del result
    return max(0, peak - before - result_bytes)


def available_bytes() -> int:
    """Memory that this process may still take, of the machine and of its control group."""
    available = 1 << 62
    for line in Path("/proc/meminfo").read_text(encoding="ascii").splitlines():
        if line.startswith("MemAvailable:"):
            available = int(line.split()[1]) * 1024
    group = Path("/sys/fs/cgroup")
    try:
        limit = (group / "memory.max").read_text(encoding="ascii").strip()
        used = int((group / "memory.current").read_text(encoding="ascii"))
    except OSError:  # no limit on this level
        return available
    return available if limit == "max" else min(available, int(limit) - used)
