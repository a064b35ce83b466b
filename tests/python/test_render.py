"""Pages with figures are what their records say."""

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


def test_which_figures_are_current():
    newest, older, elsewhere = (
        made("2026-01-03T00:00:00+00:00"),
        made("2026-01-02T00:00:00+00:00"),
        made("2026-01-01T00:00:00+00:00", "another GPU"),
    )
    older["results"] = [*older["results"], result("flash-attn-4", FORWARD, 700.0)]
    page = render.performance_page([("c.json", newest), ("b.json", older), ("a.json", elsewhere)])
    _, first, second, third = page.split("\n## ")
    current = "Its figures are the current ones."
    assert current in first and current in third and current not in second
    assert "Superseded by the newer record" in second and "\nhave: `flash-attn-4`.\n" in second
    twice = render.performance_page([("b.json", older), ("c.json", newest)])
    assert "have: nothing that a newer one lacks." in twice


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
