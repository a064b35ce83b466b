"""The command line, as argparse and as typer read it."""

import importlib.util
import inspect
import json
import os
import re
import subprocess
import sys
import time

import pytest

import onchip
from bench import render
from onchip import _native
from onchip.bench import record
from onchip.bench.implementations import absent
from onchip.cli import commands
from onchip.cli.progress import progress
from onchip.cli.signature import parameters


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


def test_doctor_of_a_package_without_kernels(run, monkeypatch, tmp_path):
    described = onchip.describe()
    gone = tmp_path / "onchip_kernels.bin"
    described["gpu"]["kernel_archive"] = {"path": str(gone), "kernels": 0, "problem": f"{gone}: 2"}
    monkeypatch.setattr(onchip, "describe", lambda: described)
    assert re.search(
        r"\n  kernel archive  none: one is made where NVRTC is found", run("doctor")[1]
    )
    gone.write_text("not an archive")
    assert f"\n  kernel archive  {gone}: 2\n" in run("doctor")[1]


@pytest.mark.parametrize("words", [["doctor"], ["--help"], ["verify", "merge", "--count", "2"]])
def test_output_that_cannot_be_written(parser, words):
    hidden = "import sys; sys.modules['typer'] = None; " if parser == "plain" else ""
    script = f"{hidden}import sys; from onchip.cli import main; sys.exit(main({words!r}))"
    with open("/dev/full", "w") as full:
        done = subprocess.run(
            [sys.executable, "-c", script], stdout=full, stderr=subprocess.PIPE, text=True
        )
    assert done.returncode == 1
    assert done.stderr == "onchip: standard output: No space left on device\n"
    reader, writer = os.pipe()
    os.close(reader)
    done = subprocess.run(
        [sys.executable, "-c", script], stdout=writer, stderr=subprocess.PIPE, text=True
    )
    os.close(writer)
    assert (done.returncode, done.stderr) == (1, "")


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


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["explain", "attention_forward"], "explain: q: got nothing, wanted its shape"),
        (["explain", "attention_forward", "--q", "2,x"], "explain: q: got '2,x', wanted integers"),
        (["explain", "attention_forward", "--q", "2,3"], "attention_forward: q: got "),
        (["explain", "attention", "--q", "2,3,4,5"], "explain: operator: got 'attention', wanted"),
        (["explain", "attention_forwrd"], "explain: operator: got 'attention_forwrd', wanted"),
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
            ["explain", "simple_gla_forward", "--arrays", "q=1,2,3,4"],
            "explain: simple_gla_forward: missing a required argument: 'log_decay'"
            "; give --arrays 'log_decay=SHAPE'\n",
        ),
        (
            ["explain", "gated_delta_product_step", "--v", "1,2,3,4"],
            "explain: gated_delta_product_step: missing a required argument: 'q'; give --q SHAPE "
            "--arrays 'log_decay=SHAPE beta=SHAPE state=SHAPE' --options 'num_householder=N'\n",
        ),
        (
            ["explain", "attention_forward", "--q", "2,3,4,5", "--causal", "true"],
            "explain: causal: got 'true', wanted --causal alone, or nothing: it takes no value\n",
        ),
        (
            ["explain", "retention_forward", "--q", "1,2,3,4", "--causal"],
            "explain: causal: got True, wanted nothing: retention_forward does not take it",
        ),
        (
            ["explain", "rwkv6_forward", "--q", "1,2,3,4"],
            "explain: q: got '1,2,3,4', wanted nothing: rwkv6_forward does not take it",
        ),
        (
            ["explain", "attention_forward", "--q", "2,3,4,5", "--options", "decay=1"],
            "explain: attention_forward: got an unexpected keyword argument 'decay'\n",
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
        sentence = inspect.getdoc(command).partition(".")[0]
        assert " ".join(sentence.split()) in re.sub(r"[\s│]+", " ", out)
        status, text, err = run(command.__name__, "--help")
        assert status == 0 and err == ""
        for parameter in parameters(command):
            assert parameter.name in text if parameter.positional else parameter.flag in text


def test_version(run):
    assert run("--version") == (0, f"onchip {onchip.__version__}\n", "")


@pytest.mark.parametrize("command", ["verify", "bench"])
def test_a_wrong_setting_is_not_worked_around(command):
    """It takes a backend away that is here: nothing may then pass without a word of it."""
    words = [sys.executable, "-m", "onchip", command]
    environment = os.environ | {"ONCHIP_CPU_ISA": "avx9"}
    done = subprocess.run(words, env=environment, capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr.startswith(f'onchip: {command}: ONCHIP_CPU_ISA: got "avx9", wanted ')


def test_long_steps_show_that_they_run(monkeypatch, capsys):
    monkeypatch.setattr("onchip.cli.progress._SECONDS_BETWEEN_LINES", 0.02)
    with progress("bench", 4.0) as show:
        show(1.0, "one call")
        time.sleep(0.3)
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) > 2 and set(lines) == {"bench: 25 %, one call (0 s)"}
    time.sleep(0.1)
    assert capsys.readouterr().err == ""


def test_brackets_of_a_help_text_are_shown(run):
    _, text, _ = run("bench", "--help")
    assert "[h<heads>[k<key heads>]]d<head_dim>" in text and "[v<head_dim_v>]" in text
    assert "N[kN]" in text


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


def test_bench_says_when_shares_mean_nothing(run, few_peaks):
    few_peaks["fma_fp32_portable_tflops"] = 1e-9
    said = " % of what the machine reaches at best: it had other work when that was measured"
    status, out, _ = run("bench", CASE, *QUICK)
    assert status == 0 and re.search(rf" %\n\d+{said}", out)
    few_peaks["fma_fp32_portable_tflops"] = 1e9
    assert said not in run("bench", CASE, *QUICK)[1]


def test_bench_shows_what_it_cannot_write(run, few_peaks, tmp_path):
    out_path, plot_path = tmp_path / "gone.json", tmp_path / "gone.svg"
    for path in (out_path, plot_path):
        path.symlink_to(tmp_path / "nowhere" / "file")
    status, out, err = run("bench", CASE, *QUICK, "--out", str(out_path), "--plot", str(plot_path))
    assert (status, err) == (1, "")
    assert f"\n{CASE} " in out
    assert re.search(rf"\nno record: .*{out_path}'\nno plot: .*{plot_path}'\n$", out)


def test_bench_draws_with_matplotlib_alone(run, monkeypatch):
    monkeypatch.setattr("onchip.cli.bench.find_spec", lambda name: None)
    status, out, err = run("bench", CASE, "--plot", "x.svg")
    assert (status, out) == (1, "")
    assert err == "onchip: bench: plot: got 'x.svg', which needs matplotlib: install it\n"


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
    measured, _, rest = out.partition("not here: ")
    assert ("torch:sdpa" in measured) == (importlib.util.find_spec("torch") is not None)
    assert f"onchip:cuda.sm80: {absent('onchip:cuda.sm80')}\n" in rest


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


def test_bench_refuses_a_folder_as_a_file(run, tmp_path):
    (tmp_path / "x.json").mkdir()
    status, out, err = run("bench", CASE, "--out", str(tmp_path / "x.json"))
    assert (status, out) == (1, "")
    assert "x.json', a folder, wanted a file name" in err


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
