"""kernel_check.py's times: the sm90 attention forward kernel beside torch's cuDNN and flash
backends."""

import json
import os
import random
import statistics
import sys
from dataclasses import replace
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))
import attention_plan

OUT = Path(os.environ.get("OUT", attention_plan.ROOT / "build"))


def variants(dim, causal):
    spec = attention_plan.select(True, dim, dim, causal, False)
    turned = replace(spec, turn_taking=1 - spec.turn_taking)
    return {"ours": spec, "ours turns" if turned.turn_taking else "ours no turns": turned}


def phase_time(rounds):
    import attention_runner
    import torch
    from torch.nn.attention import SDPBackend, sdpa_kernel
    from torch.nn.functional import scaled_dot_product_attention as sdpa

    flush = torch.empty(256 << 20, dtype=torch.uint8, device="cuda")
    multiprocessors = torch.cuda.get_device_properties(0).multi_processor_count
    cycles = torch.zeros(1, dtype=torch.int64, device="cuda")
    jobs, cells = [], {}
    for dim in (64, 128):
        for causal in (False, True):
            for s in (1024, 4096, 16384):
                batch, heads = 16384 // s, 2048 // dim
                case = (dim, "causal" if causal else "full", s)
                q, k, v = (
                    torch.randn(batch, s, heads, dim, device="cuda").to(torch.bfloat16)
                    for _ in range(3)
                )
                flops = 4.0 * batch * heads * s * s * dim / (2 if causal else 1)
                lse = torch.empty(batch, heads, s, device="cuda")
                for name, spec in variants(dim, causal).items():
                    o = torch.empty_like(q)
                    options = dict(spec=spec, causal=causal)
                    call = attention_runner.Attention(q, k, v, o, lse, **options)
                    counted = attention_runner.Attention(
                        q, k, v, o, lse, longest_block=cycles, **options
                    )
                    counts = []
                    for _ in range(5):
                        cycles.zero_()
                        counted.launch()
                        counts.append(int(cycles))
                    use = flops / (4096 * multiprocessors * statistics.median(counts))
                    cells[case, name] = {"flops": flops, "pipe_use": use, "ms": []}
                    jobs.append((case, name, call.launch))
                for name, backend in (
                    ("cudnn", SDPBackend.CUDNN_ATTENTION),
                    ("flash", SDPBackend.FLASH_ATTENTION),
                ):

                    def peer(q=q, k=k, v=v, causal=causal, backend=backend):
                        with torch.no_grad(), sdpa_kernel(backend):
                            sdpa(
                                q.transpose(1, 2),
                                k.transpose(1, 2),
                                v.transpose(1, 2),
                                is_causal=causal,
                            )

                    peer()
                    cells[case, name] = {"flops": flops, "ms": []}
                    jobs.append((case, name, peer))
    torch.cuda.synchronize()
    events = [torch.cuda.Event(enable_timing=True) for _ in range(2)]
    for _ in range(rounds):
        random.shuffle(jobs)
        for case, name, job in jobs:
            flush.zero_()
            torch.cuda._sleep(400_000)  # the launch is queued before the device gets to it
            events[0].record()
            job()
            events[1].record()
            torch.cuda.synchronize()
            cells[case, name]["ms"].append(events[0].elapsed_time(events[1]))
    records = []
    names = sorted({n for _, n in cells}, key=lambda n: (not n.startswith("ours"), n))
    print(f"{'':24}" + "".join(f"{n:>22}" for n in names))
    for case in sorted({c for c, _ in cells}):
        line = f"d{case[0]} {case[1]} {case[2]}"
        row = f"{line:24}"
        base = statistics.median(cells[case, "cudnn"]["ms"])
        for n in names:
            cell = cells.get((case, n))
            if cell is None:
                row += f"{'':>22}"
                continue
            ms = statistics.median(cell["ms"])
            cell["tflops"] = cell["flops"] / ms * 1e-9
            text = f"{cell['tflops']:.0f} x{base / ms:.2f}"
            if "pipe_use" in cell:
                text += f" {100 * cell['pipe_use']:.1f}%"
            row += f"{text:>22}"
            records.append(
                {
                    "case": line,
                    "impl": n,
                    "ms": ms,
                    "samples_ms": cell["ms"],
                    "tflops": cell["tflops"],
                    "pipe_use": cell.get("pipe_use"),
                }
            )
        print(row)
    OUT.mkdir(parents=True, exist_ok=True)
    (OUT / "kernel_time.json").write_text(json.dumps(records))
    return len(records), []
