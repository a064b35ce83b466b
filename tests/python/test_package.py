"""The package as a caller sees it: names, signatures, errors, what it says about itself."""

import inspect
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

import onchip
from onchip import ArraySpec, _native

ROOT = Path(__file__).parents[2]


def header_version():
    text = (ROOT / "include/onchip/onchip.h").read_text()
    return ".".join(
        re.search(rf"^#define ONCHIP_VERSION_{part} (\d+)$", text, re.MULTILINE)[1]
        for part in ("MAJOR", "MINOR", "PATCH")
    )


def test_version():
    assert onchip.__version__ == onchip.describe()["version"] == header_version()


def test_every_name_is_there():
    for module in (onchip, onchip.ops):
        for name in module.__all__:
            assert hasattr(module, name), name
            assert name == "__version__" or getattr(module, name).__doc__, name


def test_second_import_is_refused_and_leaves_the_first_alone():
    script = """
import sys
import numpy, onchip
first = onchip
for name in [name for name in sys.modules if name.startswith("onchip")]:
    del sys.modules[name]
try:
    import onchip
except ImportError as error:
    print(error)
x = numpy.ones((1, 4, 1, 4), "float32")
first.explain("attention_forward", x, x, x)
"""
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=True
    )
    assert done.stdout.startswith("onchip._native is loaded in this process already")


def test_importing_imports_no_array_library():
    code = (
        "import sys, onchip; "
        "print([m for m in ('numpy', 'torch', 'jax', 'ml_dtypes') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n" and done.stderr == ""


# ---- signatures: docs/semantics.md section 6 has names, order and defaults


def contract_signature(name):
    text = (ROOT / "docs/semantics.md").read_text()
    found = re.search(rf"`{name}\((.*?)\)`? -> ", text, re.DOTALL)
    return re.sub(r"\s+", " ", found[1]).strip()


def signature(function):
    parameters = [
        parameter.replace(annotation=inspect.Parameter.empty)
        for parameter in inspect.signature(function).parameters.values()
    ]
    text = str(inspect.Signature(parameters))[1:-1]
    return text.replace("'", '"')


def test_signature_of_attention_forward():
    assert signature(onchip.ops.attention_forward) == contract_signature("attention_forward")


def test_signature_of_attention_backward():
    options = contract_signature("attention_forward").partition("*, ")[2]
    wanted = contract_signature("attention_backward")
    assert wanted.endswith("<the same options>")
    wanted = wanted.replace("<the same options>", options)
    assert signature(onchip.ops.attention_backward) == wanted


def test_signature_of_attention_decode():
    options = contract_signature("attention_forward").partition("*, ")[2]
    options = options.replace("dropout_p=0.0, dropout_rng=None, ", "")
    wanted = contract_signature("attention_decode")
    assert wanted.endswith("<the options without dropout>")
    wanted = wanted.replace("<the options without dropout>", options)
    assert signature(onchip.ops.attention_decode) == wanted


def test_signature_of_merge():
    assert signature(onchip.ops.merge) == contract_signature("merge")


# ---- errors


def test_exceptions_are_what_callers_catch_already():
    for name, builtin in {
        "InvalidArgument": ValueError,
        "Unsupported": NotImplementedError,
        "OutOfMemory": MemoryError,
        "CompileFailed": RuntimeError,
        "DeviceError": RuntimeError,
        "InternalError": RuntimeError,
    }.items():
        error = getattr(onchip, name)
        assert issubclass(error, builtin) and issubclass(error, onchip.Error)


X = np.zeros((1, 3, 2, 8), np.float32)

WRONG_OPTIONS = [
    ({"causal": "yes"}, "causal: got 'yes', wanted True or False"),
    ({"causal": 2}, "causal: got 2, wanted True or False"),
    ({"causal": X}, "causal: got ndarray, wanted True or False"),
    ({"check": 0.5}, "check: got 0.5, wanted True or False"),
    ({"scale": "1"}, "scale: got '1', wanted a number"),
    ({"scale": float("nan")}, "scale: got nan, wanted a number"),
    ({"softcap": [1]}, "softcap: got list, wanted a number"),
    ({"dropout_p": 1j}, "dropout_p: got complex, wanted a number"),
    ({"alignment": "middle"}, """alignment: got 'middle', wanted "bottom_right" or "top_left\""""),
    ({"alignment": 1}, """alignment: got 1, wanted "bottom_right" or "top_left\""""),
    ({"precision": "fp8"}, """precision: got 'fp8', wanted None or "tf32\""""),
    ({"window": 3}, "window: got 3, wanted (left, right), -1 for no bound"),
    ({"window": (1, 2, 3)}, "window: got (1, 2, 3), wanted (left, right), -1 for no bound"),
    ({"window": (1.5, 0)}, "window: got 1.5, wanted an integer of 64 bits"),
    ({"window": (0, 2**63)}, f"window: got {2**63}, wanted an integer of 64 bits"),
    ({"max_seqlen_q": "8"}, "max_seqlen_q: got '8', wanted an integer of 64 bits"),
    ({"backend": 7}, "backend: got 7, wanted a name or None"),
    ({"backend": "cpu\0"}, "backend: got a name with a zero byte, wanted a name or None"),
    ({"backend": "\ud800"}, "backend: got '\\ud800', wanted a name or None"),
    ({"alignment": "\ud800"}, "alignment: got '\\ud800', wanted "),
    ({"dropout_rng": (1, "x")}, "dropout_rng: got a tuple ("),
    ({"mask": [[True]]}, "mask: got list, wanted an array"),
    ({"backend": "x" * 200}, 'backend: got "xxx'),
]


@pytest.mark.parametrize(("options", "message"), WRONG_OPTIONS, ids=lambda x: str(x)[:40])
def test_wrong_options(options, message):
    for call in (
        lambda: onchip.ops.attention_forward(X, X, X, **options),
        lambda: onchip.explain("attention_forward", X, X, X, **options),
    ):
        with pytest.raises(onchip.InvalidArgument) as caught:
            call()
        assert str(caught.value).startswith(f"attention_forward: {message}")


def test_long_text_is_cut_between_characters():
    with pytest.raises(onchip.InvalidArgument) as caught:
        onchip.ops.attention_forward(X, X, X, alignment="\u00e9" * 500)
    assert len(str(caught.value)) < 200


@pytest.mark.parametrize(
    "value", [True, False, 0, 1, np.True_, np.False_], ids=lambda x: f"{type(x).__name__}-{x}"
)
def test_flags(value):
    x = np.random.default_rng(0).standard_normal((1, 3, 2, 8))
    o, _ = onchip.ops.attention_forward(x, x, x, causal=value)
    wanted, _ = onchip.ops.attention_forward(x, x, x, causal=bool(value))
    np.testing.assert_array_equal(o, wanted)


@pytest.mark.parametrize("value", [0.25, np.float32(0.25), np.float64(0.25)])
def test_numbers(value):
    x = np.random.default_rng(0).standard_normal((1, 3, 2, 8))
    o, _ = onchip.ops.attention_forward(x, x, x, scale=value)
    wanted, _ = onchip.ops.attention_forward(x, x, x, scale=0.25)
    np.testing.assert_array_equal(o, wanted)
    plain, _ = onchip.ops.attention_forward(x, x, x)
    assert not np.array_equal(o, plain)


def test_options_are_keywords():
    with pytest.raises(TypeError):
        onchip.ops.attention_forward(X, X, X, 0.5)


def test_unsupported_lists_the_reasons():
    """Tensors on a GPU, of which there need not be one: only shapes are looked at."""
    shapes = {"q": (1, 8, 2, 16), "k": (1, 8, 2, 16), "v": (1, 8, 2, 16), "o": (1, 8, 2, 16)}
    tensors = {
        name: _native.shape("attention_forward", name, shape, "float32", 2, 0)
        for name, shape in (shapes | {"lse": (1, 2, 8)}).items()
    }
    call = _native.Call("attention_forward", tensors | {"backend": "reference"})
    with pytest.raises(onchip.Unsupported, match="reference: "):
        call.plan()
    spec = ArraySpec((1, 8, 2, 16), "float32", "cuda")
    text = onchip.explain("attention_forward", spec, spec, spec, backend="reference")
    assert "reference: rejected" in text


# ---- explain


def test_explain_names_the_backend_that_runs():
    text = onchip.explain("attention_forward", X, X, X, backend="reference")
    assert text.startswith("attention_forward: reference\n")
    assert re.search(r"^  reference: chosen: .*workspace \d+ bytes$", text, re.MULTILINE)
    assert "copied" not in text


def test_explain_of_shapes_is_that_of_arrays():
    q = np.zeros((2, 300, 8, 64), np.float32)
    kv = np.zeros((2, 400, 2, 64), np.float32)
    lse = np.zeros((2, 8, 300), np.float32)
    bias = np.zeros((1, 8, 1, 400), np.float32)

    def spec(x):
        return ArraySpec(x.shape, x.dtype.name)

    options = {"causal": True, "seqlens_q": [3, 300], "seqlens_kv": [400, 0]}
    for name, arrays in [
        ("attention_forward", (q, kv, kv)),
        ("attention_backward", (q, q, kv, kv, q, lse)),
    ]:
        text = onchip.explain(name, *arrays, bias=bias, **options)
        assert text == onchip.explain(name, *map(spec, arrays), bias=spec(bias), **options)
    assert onchip.explain("merge", q, lse, q, lse) == onchip.explain(
        "merge", *map(spec, (q, lse, q, lse))
    )


def test_explain_checks_the_call():
    with pytest.raises(onchip.InvalidArgument, match="explain: operator: got 'attention', wanted"):
        onchip.explain("attention", X, X, X)
    with pytest.raises(onchip.InvalidArgument, match="explain: operator: got list, wanted"):
        onchip.explain([], X, X, X)
    with pytest.raises(onchip.InvalidArgument, match=r"^attention_forward: v: "):
        onchip.explain("attention_forward", X, X, X[:, :2])
    with pytest.raises(TypeError):
        onchip.explain("attention_forward", X, X, X, colour="red")


def test_specs_of_huge_arrays():
    spec = ArraySpec((1 << 20, 1 << 20, 1 << 10, 128), "float32")
    with pytest.raises(onchip.InvalidArgument):
        onchip.explain("attention_forward", spec, spec, spec)
    spec = ArraySpec((64, 1 << 20, 128, 128), "bfloat16")
    assert "attention_forward: " in onchip.explain("attention_forward", spec, spec, spec)


def test_specs_are_not_run():
    spec = ArraySpec(X.shape, "float32")
    with pytest.raises(onchip.InvalidArgument, match=r"^attention_forward: q: got ArraySpec"):
        onchip.ops.attention_forward(spec, X, X)
    with pytest.raises(onchip.InvalidArgument, match=r"^attention_forward: k: got a shape without"):
        onchip.ops.attention_forward(X, spec, X)


def test_specs_of_integers():
    """On a GPU nobody looks at their values; in host memory a call does, and a spec has none."""
    spec = ArraySpec((300, 4, 64), "float16", "cuda")
    offsets = ArraySpec((3,), "int32", "cuda")
    text = onchip.explain("attention_forward", spec, spec, spec, cu_seqlens_q=offsets)
    assert text.startswith("attention_forward: ") and "reference: rejected" in text
    offsets = ArraySpec((3, 1), "int32", "cuda")
    with pytest.raises(onchip.InvalidArgument, match=r"cu_seqlens_q: got shape \[3, 1\]"):
        onchip.explain("attention_forward", spec, spec, spec, cu_seqlens_q=offsets)
    spec = ArraySpec((300, 4, 64), "float16")
    for name in ("cu_seqlens_q", "seqlens_kv", "dropout_rng"):
        options = {name: ArraySpec((3,), "int64")}
        with pytest.raises(onchip.InvalidArgument, match=f"{name}: got an ArraySpec in host"):
            onchip.explain("attention_forward", spec, spec, spec, **options)


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        (ArraySpec(5, "float32"), "q: got shape 5, wanted a sequence of integers"),
        (ArraySpec((1, None, 2, 3), "float32"), "q: got None, wanted an integer"),
        (ArraySpec(X.shape, np.float32), "q: got dtype float32, wanted its name"),
        (ArraySpec(X.shape, "float31"), "q: got dtype 'float31', wanted"),
    ],
    ids=["shape", "extent", "dtype", "name"],
)
def test_nonsense_in_specs(spec, message):
    with pytest.raises(onchip.InvalidArgument) as caught:
        onchip.explain("attention_forward", spec, spec, spec)
    assert str(caught.value).startswith(f"attention_forward: {message}")


DEVICES = ["gpu", "cpu:0", "cuda:", "cuda:-1", "cuda:x", "cuda:4294967296", "", None, 0]


@pytest.mark.parametrize("device", DEVICES)
def test_devices_of_specs(device):
    spec = ArraySpec(X.shape, "float32", device)
    with pytest.raises(onchip.InvalidArgument, match="q: got device"):
        onchip.explain("attention_forward", spec, spec, spec)


# ---- threads and facts


def test_threads():
    start = onchip.get_num_threads()
    assert start >= 1
    try:
        onchip.set_num_threads(3)
        assert onchip.get_num_threads() == 3
        assert onchip.describe()["threads"]["in_use"] == 3
        onchip.set_num_threads(0)
        assert onchip.get_num_threads() == start
        for bad in (-1, 1025, 2**40, 2**80, 1.5, "2", None):
            with pytest.raises(onchip.InvalidArgument, match=r"^set_num_threads: num_threads"):
                onchip.set_num_threads(bad)
        assert onchip.get_num_threads() == start
    finally:
        onchip.set_num_threads(0)


def test_describe():
    described = onchip.describe()
    names = [backend["name"] for backend in described["backends"]]
    assert names == ["cuda.sm90", "cuda.sm80", "cpu", "reference"]
    assert all(isinstance(backend["available"], bool) for backend in described["backends"])
    assert all(backend["detail"] for backend in described["backends"])
    assert {"ONCHIP_NUM_THREADS", "ONCHIP_CPU_ISA"} <= {
        row["name"] for row in described["settings"]
    }


# ---- types


def test_stub_is_what_the_extension_has(tmp_path):
    """python/README.md says how to write it anew."""
    made = tmp_path / "_native.pyi"
    for command in (
        ("nanobind.stubgen", "-q", "-m", "onchip._native", "-o", str(made)),
        ("ruff", "format", "-q", "--config", str(ROOT / "pyproject.toml"), str(made)),
    ):
        subprocess.run([sys.executable, "-m", *command], check=True)
    kept = Path(onchip.__file__).with_name("_native.pyi")
    assert made.read_text() == kept.read_text()


def test_annotations_serve_a_strict_caller(tmp_path):
    (tmp_path / "caller.py").write_text(
        "import numpy as np\n"
        "import numpy.typing as npt\n"
        "import onchip\n"
        "def f(q: npt.NDArray[np.float32]) -> npt.NDArray[np.float32]:\n"
        "    o, lse = onchip.ops.attention_forward(q, q, q, causal=True, window=(3, -1))\n"
        "    g = onchip.ops.attention_backward(o, q, q, q, o, lse)\n"
        "    reveal_type(o)\n"
        "    reveal_type(g.dbias)\n"
        "    return g.dq\n"
        "onchip.ops.attention_forward(1, 2, 3, causal='yes')\n"
    )
    place = Path(onchip.__file__).parents[1]
    # mypy finds an installed package by itself, and refuses to be told where it is.
    environment = {} if place.name == "site-packages" else {"MYPYPATH": str(place)}
    done = subprocess.run(
        [sys.executable, "-m", "mypy", "--strict", "--config-file=", "caller.py"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        env=environment,
    )
    lines = done.stdout.splitlines()
    assert sum("error" in line for line in lines[:-1]) == 1, done.stdout + done.stderr
    assert 'incompatible type "str"; expected "bool"' in done.stdout
    array = r"numpy\.ndarray\[.*floating.*\]"
    assert re.search(rf'Revealed type is "{array}"$', lines[0])
    assert re.search(rf'Revealed type is "{array} \| None"$', lines[1])
