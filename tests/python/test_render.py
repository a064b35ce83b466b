"""Pages with figures are what their records say."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from bench import render
from onchip.bench import record, table

ROOT = Path(__file__).resolve().parents[2]
SHA = "0123456789abcdef0123456789abcdef01234567"


def result(impl, case, tflops, **more):
    return {
        "case": case,
        "impl": impl,
        "backend": "x",
        "kernel": "y",
        "ms": 2.0,
        "samples_ms": [1.0, 2.0, 3.0],
        "tflops": tflops,
        "gbps": 1.0,
        "peak_bytes": 3 << 20,
        "error": {"vs": "fp64", "max": 1e-3, "rms": 2e-5},
        **more,
    }


FORWARD = "attention/fwd/bf16/h16d128/causal/b4s4096"
RESULTS = [
    result("onchip:cuda.sm90", FORWARD, 612.4, pipe_use=0.8137),
    result("torch:cudnn", FORWARD, 500.0),
    result("torch:flash", FORWARD, 300.0),
    result("torch:cudnn", FORWARD.replace("4096", "1024"), 444.0),
    {
        **dict.fromkeys(("backend", "kernel"), "x"),
        **dict(case="host/c++/attention_forward", impl="onchip:cuda.sm90"),
        **dict(ms=0.004, samples_ms=[0.004], host_us=4.0),
    },
    {
        **dict.fromkeys(("backend", "kernel"), "x"),
        **dict(case="first_call/archive/attention_forward", impl="onchip:cuda.sm90"),
        **dict(ms=3.5, samples_ms=[3.5]),
    },
]


def made(created="2026-01-02T03:04:05+00:00", gpu="A GPU"):
    machine = record.machine() | {
        "gpu": gpu,
        "driver": "1.2",
        "clocks": {"sm_mhz": 1700.0, "memory_mhz": 1.0, "max_sm_mhz": 1.0},
        "power_limit": 700.0,
    }
    skipped = [{"case": FORWARD, "impl": "flash-attn-4", "reason": "it is not here"}]
    ceilings = {"copy_tbps": 4.26, "matmul_bf16_tflops": 789.0}
    known = dict(commit=SHA, dirty=False, command="c", created=created)
    return record.build(RESULTS, skipped, machine=machine, ceilings=ceilings, **known)


def test_the_committed_pages_are_as_rendered():
    assert render.stale() == [], "run python -m bench.render"


def test_every_committed_record_is_whole():
    for _, one in render.read_records(render.RECORDS):
        record.check(one)


def test_figures_of_a_record():
    page = render.performance_page([("one.json", made())])
    assert "## A GPU, driver 1.2, 1700 MHz just after, power limit 700 W, 2026-01-02" in page
    assert f"| {FORWARD} | 612 | 500 | 300 | 1.22 | 81.4 % |" in page
    assert f"| {FORWARD.replace('4096', '1024')} |  | 444 |  |  |  |" in page
    assert "| host/c++/attention_forward | onchip:cuda.sm90 | 4.00 µs |" in page
    assert "| first_call/archive/attention_forward | onchip:cuda.sm90 | 3.5 ms |" in page
    assert f"| {FORWARD} | onchip:cuda.sm90 | 2.00e-05 | 1.00e-03 | 3.0 |" in page
    assert "copy 4.26 TB/s, matmul bf16 789 TFLOP/s" in page
    assert f"commit {SHA[:12]}." in page
    assert f"Not measured: flash-attn-4 on `{FORWARD}`: it is not here" in page
    assert "81.4 %" in table.text_table(made())


def test_figures_of_a_cpu():
    """By the best sample: what else the machine does only ever slows a call down."""
    decode = "attention/step/bf16/h64k8d128/paged16/b1s32768"
    results = [
        result("onchip:reference", FORWARD, 0.001),
        result("onchip:cpu", FORWARD, 0.1, pipe_use=0.7),
        result("torch:sdpa", FORWARD, 0.05, pipe_use=0.35),
        result("onchip:cpu", decode, 0.02, gbps=20.0, bandwidth_use=0.8),
    ]
    one = record.build(results, [], ceilings={"read_tbps": 0.05}, commit=SHA, dirty=True)
    page = render.performance_page([("one.json", one)])
    assert f"commit {SHA[:12]} with changes." in page
    assert "GFLOP/s, best sample:" in page and "Decoding, GB/s:" in page
    assert (
        "| case | onchip:reference | onchip:cpu | torch:sdpa | onchip / best other | of peak |"
        in (page)
    )
    # 2 ms the median, 1 ms the best.
    assert f"| {FORWARD} | 2.000 | 200 | 100 | 2.00 | 70.0 % |" in page
    assert f"| {decode} | 40 | 80.0 % |" in page
    assert "Host times" not in page
    part = render.readme_part([("one.json", one), ("gpu.json", made())])
    assert part.index("A GPU") < part.index("GFLOP/s, best sample, on ") < part.index("| 200 |")
    ours_alone = record.build(results[1:2], [], ceilings={}, commit=SHA, dirty=True)
    assert "no record yet" in render.readme_part([("one.json", ours_alone)])


def test_readme_has_the_newest_record_of_a_gpu(tmp_path):
    for name, one in {
        "a.json": made("2026-01-01T00:00:00+00:00", "old GPU"),
        "b.json": made("2026-01-03T00:00:00+00:00", "new GPU"),
        "c.json": made("2026-01-04T00:00:00+00:00", None),
    }.items():
        record.write(one, tmp_path / name)
    records = render.read_records(tmp_path)
    assert [name for name, _ in records] == ["c.json", "b.json", "a.json"]
    part = render.readme_part(records)
    assert "new GPU" in part and "old GPU" not in part
    assert "| 1224800 | 1000000 |" in render.readme_part(records[:1])
    text = f"before\n{render.BEGIN}\nstale\n{render.END}\nafter\n"
    written = render.with_part(text, part)
    assert written == f"before\n{part}\nafter\n"
    assert render.with_part(written, part) == written
    with pytest.raises(ValueError, match=r"README\.md: wanted"):
        render.with_part("no marks", part)


def test_a_record_of_a_gpu_lacks_nothing(tmp_path):
    whole = made()
    record.check(whole)
    host = next(r for r in whole["results"] if r["case"].startswith("host/"))
    for broken in (
        {k: v for k, v in host.items() if k != "host_us"},
        {k: v for k, v in RESULTS[0].items() if k != "error"},
    ):
        with pytest.raises(ValueError, match=r"record\.results"):
            record.check({**whole, "results": [broken]})


# ---- the campaign, with stages that need no GPU


STAGES = """
import importlib.machinery, importlib.util, json, pathlib, sys, time
loader = importlib.machinery.SourceFileLoader("campaign", sys.argv[1])
spec = importlib.util.spec_from_loader("campaign", loader)
run = importlib.util.module_from_spec(spec)
sys.modules["campaign"] = run
loader.exec_module(run)
state = pathlib.Path(sys.argv[2])
py = lambda text: [sys.executable, "-c", text]
ran = state / "ran"
note = f"open({str(ran)!r}, 'a').write('x');"
chosen = [
    run.Stage("good", py(note + "print('fine')"), 30, together=True),
    run.Stage("bad", py("import sys; print('broken'); sys.exit(3)"), 30, together=True),
    run.Stage("late", py("import time; time.sleep(60)"), 1, together=True),
    run.Stage("answer", py("print('words'); print('{\\"a\\": 1}')"), 30, answers=True),
]
for again in (False, False, True):
    campaign = run.Campaign(state, {"fingerprint": sys.argv[3]}, again)
    campaign.run(chosen, time.time() + 100)
print(json.dumps({name: o["code"] for name, o in campaign.outcomes.items()}))
print(json.dumps([campaign.outcomes["answer"]["answer"], ran.read_text()]))
"""


def test_the_campaign_keeps_what_is_finished(tmp_path):
    program = str(ROOT / "tools/gpu/run")

    def campaign(fingerprint):
        answer = subprocess.run(
            [sys.executable, "-c", STAGES, program, str(tmp_path), fingerprint],
            capture_output=True,
            text=True,
            check=True,
        ).stdout
        lines = answer.splitlines()
        return answer, json.loads(lines[-2]), json.loads(lines[-1])

    answer, codes, (found, ran) = campaign("one")
    assert codes == {"good": 0, "bad": 3, "late": 124, "answer": 0}
    assert found == {"a": 1}
    assert ran == "xx"  # once, not again, and again because it was asked for
    assert "TIME LIMIT" in answer and "FAILED (3)" in answer and "    broken" in answer
    assert campaign("one")[2][1] == "xxx"
    assert campaign("two")[2][1] == "xxxxx"  # other sources
