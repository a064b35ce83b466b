"""The CPU's campaign: what it keeps, what it asks, what it writes."""

import json

import pytest

import onchip
from bench import cpu, render
from onchip.bench import cases, measure, record

FORWARD = "attention/fwd/fp32/h2d16/causal/b1s64"
MEMORY = "attention/fwd/fp32/h1d16/full/b1s64"
PEAKS = {"fma_fp32_x_tflops": 100.0, "read_tbps": 0.02}


@pytest.fixture
def campaign(monkeypatch, tmp_path):
    """Small rows; the fingerprint is a word. Returns (exit status, the record)."""
    rows = [
        cpu.Row("forward", [FORWARD], lambda case: cpu.Wanted(share=1e-9), ("onchip:cpu",)),
        cpu.Row(
            "memory",
            [MEMORY],
            lambda case: cpu.Wanted(peak_bytes=1 << 30),
            ("onchip:cpu",),
            apart=True,
        ),
    ]
    monkeypatch.setattr(cpu, "ROWS", rows)
    peaks = iter([PEAKS | {"read_tbps": 0.01 * n} for n in range(1, 20)])
    monkeypatch.setattr(record, "ceilings", lambda: next(peaks))

    def run(*words, fingerprint="one"):
        monkeypatch.setattr(cpu, "fingerprint", lambda threads: f"{fingerprint} {threads}")
        for old in tmp_path.glob("*.json"):
            if old.name != "state.json":
                old.unlink()
        paths = ["--state", str(tmp_path / "state.json"), "--out", str(tmp_path)]
        status = cpu.main([*paths, "--threads", "1", *words])
        [path] = [p for p in tmp_path.glob("*.json") if p.name != "state.json"]
        return status, json.loads(path.read_text())

    yield run
    onchip.set_num_threads(0)


def test_one_record_of_every_row(campaign, capsys):
    status, made = campaign()
    assert status == 0
    record.check(made)
    assert [r["case"] for r in made["results"]] == [FORWARD, MEMORY]
    assert made["commit"] is not None and made["machine"]["threads"] == 1
    # The higher of what was reached before and after.
    assert made["ceilings"] == PEAKS | {"read_tbps": 0.02}
    assert made["results"][0]["pipe_use"] > 0
    out = capsys.readouterr().out
    assert f"forward  {FORWARD}" in out and "SHORT" not in out
    assert FORWARD in render.performance_page([("x.json", made)])


def test_peaks_that_are_too_low_are_seen(campaign, monkeypatch, capsys):
    monkeypatch.setattr(record, "ceilings", lambda: {"fma_fp32_x_tflops": 1e-6})
    status, _ = campaign()
    assert status == 1
    assert "it had other work when that was measured" in capsys.readouterr().out


def test_finished_rows_are_kept(campaign, monkeypatch):
    _, alone = campaign("--only", "forward")
    assert [r["case"] for r in alone["results"]] == [FORWARD]
    measured = []
    together = measure.measure_together

    def noted(wanted, **options):
        measured.append([case.name for case, _ in wanted])
        return together(wanted, **options)

    monkeypatch.setattr(measure, "measure_together", noted)
    _, whole = campaign()
    assert measured == []
    assert whole["results"][0]["samples_ms"] == alone["results"][0]["samples_ms"]
    assert [r["case"] for r in whole["results"]] == [FORWARD, MEMORY]
    campaign(fingerprint="other sources")
    assert measured == [[FORWARD]]
    campaign("--again", fingerprint="other sources")
    assert measured == [[FORWARD]] * 2


def test_what_stopped_the_campaign_costs_one_row(campaign, monkeypatch):
    def stopped(*arguments, **options):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(measure, "measure_in_own_process", stopped)
        with pytest.raises(KeyboardInterrupt):
            campaign()
    monkeypatch.setattr(measure, "measure_together", stopped)
    _, made = campaign()
    assert [r["case"] for r in made["results"]] == [FORWARD, MEMORY]


def result(impl, case, best_ms, **more):
    return {
        **dict(case=case, impl=impl, backend="x", kernel="y", ms=best_ms, samples_ms=[best_ms]),
        **dict(tflops=1.0, gbps=1.0, peak_bytes=3 << 20, error=dict(vs="fp64", max=0.0, rms=0.0)),
        **more,
    }


def test_verdict():
    row = cpu.Row("r", [FORWARD], lambda case: cpu.Wanted(0.6, 1.0, 4 << 20))
    assert row.peer == "torch:sdpa"
    peer = result("torch:sdpa", FORWARD, 0.99)

    def judged(*results, skipped=()):
        made = record.build(list(results), list(skipped), ceilings={}, commit=None)
        return cpu.verdict([row], made)

    # 2 % short passes.
    text, passed = judged(result("onchip:cpu", FORWARD, 1.0, pipe_use=0.59), peer)
    assert passed
    for cell in ("0.99 (wanted 1.00)", "0.59 (wanted 0.60)", "3.00 (at most 4.00)"):
        assert cell in text
    for ours in (
        result("onchip:cpu", FORWARD, 1.02, pipe_use=0.6),
        result("onchip:cpu", FORWARD, 1.0, pipe_use=0.58),
        result("onchip:cpu", FORWARD, 1.0, pipe_use=0.6, peak_bytes=5 << 20),
        result("onchip:cpu", FORWARD, 1.0, pipe_use=0.6, peak_bytes=None),
    ):
        text, passed = judged(ours, peer)
        assert not passed and text.rstrip().endswith("SHORT")
    # Without the peer nothing can be said of the ratio.
    text, passed = judged(result("onchip:cpu", FORWARD, 1.0, pipe_use=0.6))
    assert not passed and "? (wanted 1.00)" in text
    reason = {"case": FORWARD, "impl": "onchip:cpu", "reason": "not in this backend yet"}
    text, passed = judged(peer, skipped=[reason])
    assert not passed and "not in this backend yet" in text


def test_rows_ask_for_what_they_measure():
    for row in cpu.ROWS:
        for name in row.cases:
            case = cases.parse(name)
            assert case.name == name
            row.wanted(case)
    by_name = {row.name: row for row in cpu.ROWS}
    fast = by_name["C-fwd fp32"]
    assert fast.wanted(cases.parse(fast.cases[0])) == cpu.Wanted(0.6, 1.0)
    assert {cases.parse(name).seqlen for name in fast.cases} == {1024, 4096, 16384}
    causal = {
        (case.head_dim, case.seqlen, case.num_heads): fast.wanted(case)
        for case in map(cases.parse, fast.cases)
        if case.causal
    }
    assert causal[128, 16384, 1] == causal[128, 1024, 8] == cpu.Wanted(0.7, 1.35)
    assert causal[64, 4096, 16] == causal[64, 16384, 4] == cpu.Wanted(0.6, 1.05)


def test_the_fingerprint_is_of_how_it_is_measured():
    assert cpu.fingerprint(1) == cpu.fingerprint(1) != cpu.fingerprint(2)
