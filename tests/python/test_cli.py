"""The command line, as argparse and as typer read it."""

import importlib.util
import inspect
import json
import os
import re
import subprocess
import sys

import numpy as np
import pytest

import onchip
from bench import render
from onchip import ArraySpec, _kinds, _native
from onchip.bench import record
from onchip.cli import commands, main
from onchip.cli.signature import parameters
from onchip.cli.verify import SUBJECTS


@pytest.fixture(params=["plain", "coloured"])
def parser(request, monkeypatch):
    """plain: as without the extra `cli`."""
    if request.param == "plain":
        monkeypatch.setitem(sys.modules, "typer", None)
    monkeypatch.setenv("COLUMNS", "200")
    return request.param


@pytest.fixture
def run(parser, capsys):
    def run(*words):
        status = main(words)
        captured = capsys.readouterr()
        return status, captured.out, captured.err

    return run


def test_doctor(run):
    status, out, err = run("doctor")
    assert status == 0 and err == ""
    described = onchip.describe()
    lines = [line.strip() for line in out.splitlines()]
    for part in ("onchip", "backends", "GPU", "settings", "array libraries and extras"):
        assert part in lines
    rows = dict(re.split(r"  +", line, maxsplit=1) for line in lines if "  " in line)
    assert rows["version"] == onchip.__version__
    assert rows["library"] == _native.__file__
    assert rows["threads"] == f"{onchip.get_num_threads()} of {os.cpu_count()} available CPUs" or (
        described["threads"]["available_cpus"] != os.cpu_count()
    )
    for backend in described["backends"]:
        assert backend["detail"] in rows[backend["name"]]
        assert rows[backend["name"]].startswith("not available: ") != backend["available"]
    for setting in described["settings"]:
        assert rows[setting["name"]] == f"{setting['value']} ({setting['origin']})"
    assert rows["numpy"] == sys.modules["numpy"].__version__
    for name, part in (("driver", "driver"), ("NVRTC", "nvrtc")):
        found = described["gpu"][part]
        assert (found["problem"] or found["version"]) in rows[name]


def test_doctor_shows_settings_and_their_problems():
    done = subprocess.run(
        [sys.executable, "-m", "onchip", "doctor"],
        env=os.environ | {"ONCHIP_NUM_THREADS": "many", "ONCHIP_CPU_ISA": "portable"},
        capture_output=True,
        text=True,
        check=True,
    )
    assert re.search(r"^  problem: .*ONCHIP_NUM_THREADS.*many", done.stdout, re.MULTILINE)
    assert re.search(r"^  ONCHIP_CPU_ISA +portable \(environment\)$", done.stdout, re.MULTILINE)


@pytest.mark.parametrize(
    ("setting", "refused"),
    [
        ("ONCHIP_NUM_THREADS=many", [None, "cpu", "reference"]),
        ("ONCHIP_CPU_ISA=AVX2", [None, "cpu"]),
    ],
)
def test_wrong_settings_refuse_every_call_they_concern(setting, refused):
    """No other backend silently takes the call in place of the one that the setting is about."""
    script = """
import numpy, onchip
x = numpy.ones((1, 4, 1, 4), "float32")
lse = numpy.zeros((1, 1, 4), "float32")
for backend in (None, "cpu", "reference"):
    for call in (
        lambda: onchip.ops.attention_forward(x, x, x, backend=backend),
        lambda: onchip.ops.merge(x, lse, x, lse, backend=backend),
    ):
        try:
            call()
        except onchip.Unsupported as error:
            print(backend, repr(str(error)))
        else:
            print(backend, "done")
print(onchip.explain("attention_forward", x, x, x).splitlines()[0])
"""
    name, value = setting.split("=")
    done = subprocess.run(
        [sys.executable, "-c", script],
        env=os.environ | {name: value},
        capture_output=True,
        text=True,
        check=True,
    )
    *calls, explained = done.stdout.splitlines()
    for line, backend in zip(calls, [None, None, "cpu", "cpu", *2 * ["reference"]], strict=True):
        assert line.startswith(f"{backend} ")
        if backend in refused:
            assert f'{name}: got "{value}"' in line
        else:
            assert line == f"{backend} done"
    assert explained == "attention_forward: no backend takes this call"


SHAPE = (2, 1024, 16, 128)
GROUPED = (2, 1024, 4, 128)
BF16 = ArraySpec(SHAPE, "bfloat16")
BF16_KV = ArraySpec(GROUPED, "bfloat16")
LSE = ArraySpec((2, 16, 1024), "float32")
PACKED = ArraySpec((300, 4, 64), "float32")


EXPLAINED = [
    (
        "attention_forward --dtype bf16 --q 2,1024,16,128 --k 2,1024,4,128 --causal",
        lambda: onchip.explain("attention_forward", BF16, BF16_KV, BF16_KV, causal=True),
    ),
    (
        "attention_forward --q 300,4,64 --cu-seqlens-q 0,100,300 --window-left 64 --softcap 30.5 "
        "--alignment top_left",
        lambda: onchip.explain(
            "attention_forward",
            *[PACKED] * 3,
            cu_seqlens_q=[0, 100, 300],
            window=(64, -1),
            softcap=30.5,
            alignment="top_left",
        ),
    ),
    (
        "attention_backward --dtype bfloat16 --q 2,1024,16,128 --sink --bias 1,16,1,1024 "
        "--segment-ids --dropout-p 0.1 --deterministic",
        lambda: onchip.explain(
            "attention_backward",
            *[BF16] * 5,
            LSE,
            sink=ArraySpec((16,), "float32"),
            bias=ArraySpec((1, 16, 1, 1024), "bfloat16"),
            q_segment_ids=ArraySpec((2, 1024), "int32"),
            kv_segment_ids=ArraySpec((2, 1024), "int32"),
            dropout_p=0.1,
            dropout_rng=(0, 0),
            deterministic=True,
        ),
    ),
    (
        "attention_forward --q 2,1024,16,128 --dtype fp16 --device cuda:1 --mask 1,1,1024,1024 "
        "--alibi-slopes 16 --seqlens-q 5,1024 --scale 0.5 --batch-invariant --backend reference",
        lambda: onchip.explain(
            "attention_forward",
            *[ArraySpec(SHAPE, "float16", "cuda:1")] * 3,
            mask=ArraySpec((1, 1, 1024, 1024), "bool", "cuda:1"),
            alibi_slopes=ArraySpec((16,), "float32", "cuda:1"),
            seqlens_q=[5, 1024],
            scale=0.5,
            batch_invariant=True,
            backend="reference",
        ),
    ),
    (
        "attention_backward --dtype bf16 --q 2,1024,16,128 --d-lse",
        lambda: onchip.explain("attention_backward", *[BF16] * 5, LSE, d_lse=LSE),
    ),
    (
        "attention_decode --dtype bf16 --q 2,1,16,128 --k-cache 5,4096,4,128 "
        "--cache-seqlens 7,900 --cache-slot 3,-1 --window-left 64 --backend reference",
        lambda: onchip.explain(
            "attention_decode",
            ArraySpec((2, 1, 16, 128), "bfloat16"),
            *[ArraySpec((5, 4096, 4, 128), "bfloat16")] * 2,
            cache_seqlens=[7, 900],
            cache_slot=[3, -1],
            window=(64, -1),
            backend="reference",
        ),
    ),
    (
        "attention_decode --q 2,3,8,96 --k-cache 70,16,2,96 --v-cache 70,16,2,64 "
        "--cache-seqlens 5,900 --k-new 2,3,2,96 --page-table 58 --rotary-dim 32 "
        "--rotary-interleaved --q-positions --segment-ids --sink",
        lambda: onchip.explain(
            "attention_decode",
            ArraySpec((2, 3, 8, 96), "float32"),
            ArraySpec((70, 16, 2, 96), "float32"),
            ArraySpec((70, 16, 2, 64), "float32"),
            cache_seqlens=[5, 900],
            k_new=ArraySpec((2, 3, 2, 96), "float32"),
            v_new=ArraySpec((2, 3, 2, 64), "float32"),
            page_table=np.concatenate(
                [[[0, *[0] * 57]], [[*range(1, 58), 0]]], dtype=np.int32, casting="unsafe"
            ),
            rotary_cos=ArraySpec((2000, 16), "float32"),
            rotary_sin=ArraySpec((2000, 16), "float32"),
            rotary_interleaved=True,
            q_positions=np.zeros((2, 3), np.int32),
            q_segment_ids=ArraySpec((2, 3), "int32"),
            kv_segment_ids=ArraySpec((2, 903), "int32"),
            sink=ArraySpec((8,), "float32"),
        ),
    ),
    (
        "attention_decode --device cuda --dtype fp16 --q 2,1,8,64 --k-cache 9,16,2,64 "
        "--cache-seqlens 5,9 --page-table 4",
        lambda: onchip.explain(
            "attention_decode",
            ArraySpec((2, 1, 8, 64), "float16", "cuda"),
            *[ArraySpec((9, 16, 2, 64), "float16", "cuda")] * 2,
            cache_seqlens=ArraySpec((2,), "int32", "cuda"),
            page_table=ArraySpec((2, 4), "int32", "cuda"),
        ),
    ),
    (
        [
            *("simple_gla_forward", "--dtype", "bf16", "--arrays"),
            "q=2,64,4,16 k=2,64,4,16 v=2,64,8,32 log_decay=2,64,8:fp32",
            *("--options", "state_layout=vk chunk_len=64 scale=0.5 output_final_state=true"),
        ],
        lambda: onchip.explain(
            "simple_gla_forward",
            *[ArraySpec((2, 64, 4, 16), "bfloat16")] * 2,
            ArraySpec((2, 64, 8, 32), "bfloat16"),
            ArraySpec((2, 64, 8), "float32"),
            state_layout="vk",
            chunk_len=64,
            scale=0.5,
            output_final_state=True,
        ),
    ),
    (
        [
            *("linear_attention_forward", "--options", "cu_seqlens=0,5,9 normalize=true"),
            *("--arrays", "q=9,2,4 k=9,2,4 v=9,2,3 initial_state=2,2,4,3 initial_state=2,2,4"),
        ],
        lambda: onchip.explain(
            "linear_attention_forward",
            *[ArraySpec((9, 2, 4), "float32")] * 2,
            ArraySpec((9, 2, 3), "float32"),
            cu_seqlens=[0, 5, 9],
            normalize=True,
            initial_state=(
                ArraySpec((2, 2, 4, 3), "float32"),
                ArraySpec((2, 2, 4), "float32"),
            ),
        ),
    ),
    (
        "merge --o1 2,1024,16,128 --dtype bf16",
        lambda: onchip.explain("merge", BF16, LSE, BF16, LSE),
    ),
]


@pytest.mark.parametrize(
    ("words", "wanted"),
    EXPLAINED,
    ids=[
        "grouped",
        "packed",
        "backward",
        "masked",
        "d_lse",
        "slots",
        "paged",
        "cuda",
        "gla",
        "states",
        "merge",
    ],
)
def test_explain(run, words, wanted):
    words = words.split() if isinstance(words, str) else words
    status, out, err = run("explain", *words)
    assert (status, err) == (0, "")
    assert out == wanted()


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["explain", "attention_forward"], "explain: q: got nothing, wanted its shape"),
        (["explain", "attention_forward", "--q", "2,x"], "explain: q: got '2,x', wanted integers"),
        (["explain", "attention_forward", "--q", "2,3"], "attention_forward: q: got "),
        (["explain", "attention", "--q", "2,3,4,5"], "explain: op_name: got 'attention', wanted"),
        (["explain", "merge"], "explain: o1: got nothing, wanted"),
        (
            ["explain", "attention_decode", "--q", "2,1,4,8"],
            "explain: cache_seqlens: got nothing, wanted the lengths",
        ),
        (
            ["explain", "attention_decode", "--q", "2,1,4,8", "--cache-seqlens", "1,2"],
            "explain: k_cache: got nothing, wanted its shape",
        ),
        (
            ["explain", "attention_decode", "--q", "2,1,4,8", "--dropout-p", "0.5"],
            "explain: dropout_p: got 0.5, wanted nothing: attention_decode does not take it",
        ),
        (
            ["explain", "retention_forward", "--arrays", "q=1,2,3,4 k"],
            "explain: arrays: got 'k', wanted <name>=<value>",
        ),
        (
            ["explain", "retention_forward", "--arrays", "q=1,2,3,4"],
            "explain: retention_forward: missing a required argument: 'k'",
        ),
        (
            ["explain", "retention_forward", "--q", "1,2,3,4"],
            "explain: q: got '1,2,3,4', wanted nothing: retention_forward does not take it",
        ),
        (
            ["explain", "attention_forward", "--q", "2,3,4,5", "--rotary-dim", "4"],
            "explain: rotary_dim: got 4, wanted nothing: attention_forward does not take it",
        ),
        (
            ["explain", "merge", "--o1", "2,3,4,5", "--causal"],
            "explain: causal: got True, wanted nothing: merge does not take it",
        ),
        (
            ["explain", "merge", "--q", "2,3,4,5"],
            "explain: q: got '2,3,4,5', wanted nothing: merge does not take it",
        ),
        (
            ["explain", "attention_forward", "--q", "2,3,4,5", "--o1", "2,3,4,5"],
            "explain: o1: got '2,3,4,5', wanted nothing: attention_forward does not take it",
        ),
        (
            ["kernels", "list", "--path", "x"],
            "kernels: path: got 'x', wanted nothing: list does not take it",
        ),
        (["verify", "attention"], "verify: operator: got 'attention', wanted all, attention_f"),
        (["verify", "--dtype", "fp8"], "verify: dtype: got 'fp8', wanted fp64, fp32, fp16, bf16"),
        (["verify", "--backend", "gpu"], "verify: backend: got 'gpu', wanted one of "),
        (["verify", "--seed", "-1"], "verify: seed: got -1, wanted 0 to 4294967295"),
        (["verify", "--count", "0"], "verify: count: got 0, wanted more than 0"),
        (["verify", "--longest", "0"], "verify: longest: got 0, wanted more than 0"),
        (["verify", "--seconds", "nan"], "verify: seconds: got nan, wanted more than 0"),
        (["kernels", "clean"], "kernels: action: got 'clean', wanted list, warm,"),
        (["kernels", "build"], "kernels: path: got nothing, wanted a file"),
    ],
)
def test_failures(run, words, message):
    status, out, err = run(*words)
    assert status == 1 and out == ""
    assert err.startswith(f"onchip: {message}")


@pytest.mark.parametrize(
    "words",
    [
        [],
        ["cure"],
        ["doctor", "--fast"],
        ["explain"],
        ["explain", "merge", "--no-such"],
        ["explain", "merge", "--scale", "x"],
    ],
)
def test_wrong_calls(run, words):
    status, _, err = run(*words)
    assert status == 2
    assert "sage: onchip" in err or words == []


def test_help(run):
    status, out, err = run("--help")
    assert status == 0 and err == ""
    for command in commands.COMMANDS:
        assert command.__name__ in out
        status, text, err = run(command.__name__, "--help")
        assert status == 0 and err == ""
        for parameter in parameters(command):
            assert parameter.name in text if parameter.positional else parameter.flag in text


@pytest.mark.parametrize(
    "operator", ["attention_forward", "attention_backward", "attention_decode"]
)
def test_explain_reaches_every_option(operator):
    options = set(inspect.signature(getattr(onchip.ops, operator)).parameters)
    options -= {"d_o", "o", "lse"}  # shaped by the others
    spelled = {parameter.name for parameter in parameters(commands.explain)}
    otherwise = {
        "window": "window_left",
        "q_segment_ids": "segment_ids",
        "kv_segment_ids": "segment_ids",
        "dropout_rng": "dropout_p",
        "rotary_cos": "rotary_dim",
        "rotary_sin": "rotary_dim",
    }
    assert {otherwise.get(name, name) for name in options} <= spelled


def test_version(run):
    assert run("--version") == (0, f"onchip {onchip.__version__}\n", "")


# ---- verify


def rows_of(out):
    """(operator, backend): the other cells of verify's table."""
    lines = [re.split(r"  +", line) for line in out.splitlines()]
    return {tuple(cells[:2]): cells[2:] for cells in lines if len(cells) > 4}


def test_verify(run):
    status, out, err = run("verify", "--count", "6", "--seed", "3")
    assert (status, err) == (0, "")
    rows = rows_of(out)
    here = [row["name"] for row in onchip.describe()["backends"] if row["available"]]
    for operator in SUBJECTS:
        compared, refused, failed, worst = rows[operator, "reference"]
        assert (compared, refused, failed) == ("6", "0", "0")
        assert 0 <= float(worst.split()[0]) <= 1
        assert {backend for name, backend in rows if name == operator} == set(here)
    assert out.endswith("seed 3\n")
    assert run("verify", "--count", "6", "--seed", "3") == (0, out, "")


def test_verify_draws_another_seed_each_time(run):
    words = ("verify", "merge", "--backend", "cpu", "--dtype", "fp16", "--count", "2")
    seeds = {run(*words)[1].splitlines()[-1] for _ in range(3)}
    assert len(seeds) == 3


def test_verify_of_long_sequences(run, monkeypatch):
    seen = []

    def noted(q, k, v, **options):
        seen.append(max(q.shape[-3], k.shape[-3]))
        raise onchip.InternalError("seen")

    monkeypatch.setattr(onchip.ops, "attention_forward", noted)
    words = ("verify", "attention_forward", "--backend", "cpu", "--count", "8", "--seed", "1")
    status, out, _ = run(*words, "--longest", "700")
    assert status == 1 and max(seen) > 300
    first = seen[0]
    again = re.search(r"^  again: onchip (.*)$", out, re.MULTILINE)[1]
    assert "--longest 700 --seed 1 --count 1" in again
    seen.clear()
    run(*again.split())
    assert seen == [first]


def test_verify_ends_in_time(run):
    status, out, _ = run("verify", "merge", "--backend", "cpu", "--seconds", "0.2")
    assert status == 0
    assert int(rows_of(out)["merge", "cpu"][0]) > 0


def spoil(monkeypatch, operator, change):
    """The operator of onchip.ops with its results changed on the reference."""
    right = getattr(onchip.ops, operator)

    def wrong(*arrays, **options):
        result = right(*arrays, **options)
        if options["backend"] == "reference":
            change(result)
        return result

    monkeypatch.setattr(onchip.ops, operator, wrong)


LINEAR = ("mamba2_forward", "simple_gla_backward")


@pytest.mark.parametrize(
    ("operator", "tensor", "which"),
    [
        ("attention_forward", "o", 0),
        ("attention_forward", "lse", 1),
        ("attention_backward", "dv", 2),
        ("attention_decode", "o", 0),
        ("mamba2_forward", "o", 0),
        ("simple_gla_backward", "dk", 1),
        ("merge", "o", 0),
    ],
)
def test_verify_finds_a_wrong_element(run, monkeypatch, operator, tensor, which):
    spoiled = []

    def change(result):
        array = result[which]
        if array.dtype != np.float32:  # of the call in fp64 that others are judged by
            return
        at = next(iter(np.argwhere(np.isfinite(array.astype(np.float64)))[-1:]), None)
        if at is not None:
            array[tuple(at)] += 5
            spoiled.append(tuple(int(i) for i in at))

    spoil(monkeypatch, operator, change)
    status, out, err = run("verify", operator, "--dtype", "fp32", "--count", "4", "--seed", "11")
    assert (status, err) == (1, "")
    rows = rows_of(out)
    assert rows[operator, "reference"][2] == str(len(spoiled))
    assert rows[operator, "cpu"][2] == "0"

    def found(text):
        at = re.escape(str(spoiled[0]))
        return re.search(rf"^  {tensor}: .*worst at {at}: got \S+, wanted \S+", text, re.MULTILINE)

    assert found(out)
    # Linear attention is judged by the error of a whole tensor.
    of_one = r"error \S+, bound \S+: \S+ x \(1 of \d+ elements"
    of_all = r"RMS error \S+ of \S+, at most \S+ of it"
    assert re.search(of_all if operator in LINEAR else of_one, out)
    again = re.search(r"^  again: onchip (.*)$", out, re.MULTILINE)[1]
    assert again.startswith(f"verify {operator} --backend reference --dtype fp32 --seed ")
    first = spoiled[0]
    spoiled.clear()
    status, repeated, _ = run(*again.split())
    assert status == 1 and spoiled == [first]
    assert found(repeated)


def test_verify_finds_what_was_not_written(run, monkeypatch):
    def nothing_written(q, k, v, **options):
        kind = _kinds.kind_of(q)
        o, lse = onchip_forward(q, k, v, **options)
        return kind.empty(o.shape, o.dtype.name, q), lse

    onchip_forward = onchip.ops.attention_forward
    monkeypatch.setattr(onchip.ops, "attention_forward", nothing_written)
    status, out, _ = run("verify", "attention_forward", "--backend", "cpu", "--count", "3")
    assert status == 1
    assert "o: NaN in the wrong place at (" in out


def test_verify_reports_what_a_call_raises(run, monkeypatch):
    def broken(*arrays, **options):
        raise onchip.InternalError("attention_forward: out of order")

    monkeypatch.setattr(onchip.ops, "attention_forward", broken)
    status, out, _ = run("verify", "attention_forward", "--count", "2", "--seed", "0")
    assert status == 1
    assert "InternalError: attention_forward: out of order" in out
    assert "--backend reference --seed 0 --count 1" in out


def test_verify_reports_a_legal_call_that_is_refused_as_wrong(run, monkeypatch):
    def broken(*arrays, **options):
        raise onchip.InvalidArgument("merge: o1: got 7, wanted 8")

    monkeypatch.setattr(onchip.ops, "merge", broken)
    status, out, _ = run("verify", "merge", "--count", "2")
    assert status == 1 and "merge: o1: got 7, wanted 8" in out


def test_verify_fails_where_nothing_was_compared(run, monkeypatch):
    def refused(*arrays, **options):
        raise onchip.Unsupported("attention_forward: cpu: not today")

    monkeypatch.setattr(onchip.ops, "attention_forward", refused)
    status, out, _ = run("verify", "attention_forward", "--backend", "cpu", "--count", "2")
    assert status == 1
    assert "attention_forward on cpu: nothing compared: not today" in out
    assert out.endswith("nothing was compared\n")


def test_verify_needs_its_packages(run, monkeypatch):
    found = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name: None if name == "ml_dtypes" else found(name)
    )
    status, out, err = run("verify")
    assert (status, out) == (1, "")
    assert err == "onchip: verify: ml_dtypes is not installed: pip install 'onchip[cli]'\n"


# ---- bench


CASE = "attention/fwd/fp32/h2d16/causal/b1s64"
QUICK = ("--impl", "onchip:cpu,numpy:plain", "--threads", "1")


@pytest.fixture
def few_peaks(monkeypatch):
    """Finding them takes seconds, and test_bench.py does it."""
    peaks = {"fma_fp32_portable_tflops": 0.1, "read_tbps": 0.01}
    monkeypatch.setattr("onchip.bench.record.ceilings", lambda: peaks)
    yield peaks
    onchip.set_num_threads(0)


def test_bench(run, few_peaks, tmp_path):
    out_path, plot_path = tmp_path / "record.json", tmp_path / "plot.svg"
    grouped = "attention/fwd/fp32/h4k2d16/full/b1s40"
    status, out, err = run(
        *("bench", f"{CASE},{grouped}", *QUICK, "--rounds", "6"),
        *("--out", str(out_path), "--plot", str(plot_path)),
    )
    assert (status, err) == (0, "")
    made = json.loads(out_path.read_text())
    record.check(made)
    assert made["ceilings"] == few_peaks
    assert made["machine"]["threads"] == 1
    by_impl = {(r["case"], r["impl"]): r for r in made["results"]}
    assert set(by_impl) == {(CASE, "onchip:cpu"), (CASE, "numpy:plain"), (grouped, "onchip:cpu")}
    assert all(len(r["samples_ms"]) == 6 for r in made["results"])
    assert [entry["case"] for entry in made["skipped"]] == [grouped]
    assert f"not measured: numpy:plain, {grouped}: the plain formula" in out
    assert "1 threads\nat best: fma fp32 portable 0.1 TFLOP/s, read 0.01 TB/s\n" in out
    lines = [re.split(r"  +", line) for line in out.splitlines()]
    row = next(cells for cells in lines if cells[0] == CASE)
    best = {impl: min(by_impl[CASE, impl]["samples_ms"]) for impl in QUICK[1].split(",")}
    assert row[3] == f"{best['numpy:plain'] / best['onchip:cpu']:.2f}"
    assert row[4] == f"{100 * by_impl[CASE, 'onchip:cpu']['pipe_use']:.1f} %"
    assert CASE in plot_path.read_text() and "onchip:cpu" in plot_path.read_text()
    # A page can be rendered from it.
    assert f"| {CASE} | {row[1]} | {row[2]} | {row[3]} | {row[4]} |" in (
        render.performance_page([("record.json", made)])
    )


def test_bench_of_flags(run, few_peaks):
    status, out, _ = run(
        *("bench", "--phase", "fwd,bwd", "--heads", "4k2", "--head-dim", "8", "--mask", "window5"),
        *("--seqlen", "16,24", "--batch", "2", "--impl", "onchip:reference"),
    )
    assert status == 0
    for phase in ("fwd", "bwd"):
        for seqlen in (16, 24):
            assert f"attention/{phase}/fp32/h4k2d8/window5/b2s{seqlen} " in out


def test_bench_of_a_file(run, few_peaks, tmp_path):
    file = tmp_path / "cases.txt"
    file.write_text(f"# what matters\n{CASE}  # small\n\n{CASE}\n")
    status, out, _ = run("bench", "--file", str(file), *QUICK)
    assert status == 0
    assert out.count(CASE) == 1
    file.write_text(f"{CASE}\nattention/forward\n")
    status, out, err = run("bench", "--file", str(file), *QUICK)
    assert (status, out) == (1, "")
    assert "cases.txt, line 2: case: got 'attention/forward', wanted attention/<fwd" in err
    file.write_text("# nothing\n")
    assert "has no case" in run("bench", "--file", str(file))[2]


def test_bench_takes_what_is_here(run, few_peaks):
    status, out, _ = run("bench", CASE)
    assert status == 0
    here = [f"onchip:{row['name']}" for row in onchip.describe()["backends"] if row["available"]]
    # Backends on a GPU need PyTorch too.
    assert {"onchip:cpu", "onchip:reference"} <= {name for name in here if name in out}
    assert "numpy:plain" not in out
    assert ("torch:sdpa" in out) == (importlib.util.find_spec("torch") is not None)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["attention/fwd"], "case: got 'attention/fwd', wanted attention/<fwd|bwd|fwdbwd>/"),
        ([CASE, "--dtype", "fp32"], "got cases in more than one way, wanted names, or --file, or"),
        (["--mask", "diagonal"], "case: got 'attention/fwd/fp32/d64/diagonal/s1024', wanted "),
        (["--file", "/no/such/file"], "file: /no/such/file: "),
        ([CASE, "--impl", "onchip:gpu"], "impl: got 'onchip:gpu', wanted some of numpy:plain, "),
        ([CASE, "--rounds", "4"], "rounds: got 4, wanted 5 at least"),
        ([CASE, "--limit", "0"], "limit: got 0.0, wanted more than 0"),
        ([CASE, "--seed", "-1"], "seed: got -1, wanted 0 or more"),
        ([CASE, "--out", "x.txt"], "out: got 'x.txt', wanted a file name with .json"),
        ([CASE, "--plot", "x.gif"], "plot: got 'x.gif', wanted a file name with .png, .svg, .pdf"),
        ([CASE, "--out", "/no/such/x.json"], "out: got '/no/such/x.json', wanted a folder that"),
    ],
)
def test_bench_refuses(run, words, message):
    status, out, err = run("bench", *words)
    assert (status, out) == (1, "")
    assert err.startswith(f"onchip: bench: {message}")


def test_bench_refuses_a_number_of_threads(run):
    status, out, err = run("bench", CASE, "--threads", "5000")
    assert (status, out) == (1, "")
    assert err.startswith("onchip: set_num_threads: num_threads: got 5000")


def kernel_names():
    return [row["name"] for row in json.loads(_native.kernels_list(""))["kernels"]]


def test_kernels(run):
    status, out, err = run("kernels", "list")
    assert (status, err) == (0, "")
    listed = out.splitlines()
    assert listed == ["name", *kernel_names()]
    status, out, err = run("kernels", "list", "--filter", "no such kernel")
    assert (status, out) == (1, "") and "no such kernel" in err


def test_kernels_ahead_of_their_call(tmp_path):
    """From the archive, if this installation has one; else compiles one kernel where there is
    NVRTC, and elsewhere says that there is none."""
    names = kernel_names()
    if not names:
        pytest.skip("this library has no GPU kernels")

    def run(*words):
        return subprocess.run(
            [sys.executable, "-m", "onchip", "kernels", *words, "--filter", names[0]],
            env=os.environ | {"ONCHIP_CACHE_DIR": str(tmp_path)},
            capture_output=True,
            text=True,
        )

    archive = tmp_path / "kernels.bin"
    done = [run("warm"), run("resources"), run("build", "--path", str(archive))]
    gpu = onchip.describe()["gpu"]
    shipped = gpu["kernel_archive"]["kernels"] > 0
    if gpu["nvrtc"]["problem"] and not shipped:
        for one in done:
            assert one.returncode == 1 and "NVRTC" in one.stderr
        return
    for one in done:
        assert one.returncode == 0, one.stderr
    assert names[0] in done[1].stdout and ("archive" if shipped else "disk") in done[1].stdout
    assert archive.stat().st_size > 0
