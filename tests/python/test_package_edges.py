"""The package where callers seldom go: other interpreters, an interpreter that ends, objects made
past their constructor, names and dtypes that say nothing."""

import subprocess
import sys

import numpy as np
import pytest

import onchip
from onchip import _native

X = np.ones((1, 4, 2, 8), np.float32)


def run_script(script, *arguments):
    return subprocess.run(
        [sys.executable, "-c", script, *arguments], capture_output=True, text=True, timeout=120
    )


SUBINTERPRETER = """
import sys
try:
    import _interpreters as interpreters
except ImportError:
    import _xxsubinterpreters as interpreters

def use():
    import numpy, onchip
    x = numpy.ones((1, 4, 1, 4), "float32")
    assert "cpu" in onchip.explain("attention_forward", x, x, x)
    try:
        onchip.ops.attention_forward(x, x, x, causal=3)
    except onchip.InvalidArgument:
        print("used")

if sys.argv[1] == "before":
    use()
other = interpreters.create()
interpreters.run_string(other, '''
try:
    import onchip
except ImportError as error:
    print(error, flush=True)
''')
interpreters.destroy(other)
use()
"""


@pytest.mark.parametrize("order", ["before", "after"])
def test_a_sub_interpreter_is_refused_and_harms_nobody(order):
    done = run_script(SUBINTERPRETER, order)
    assert done.returncode == 0, done.stderr
    lines = [line for line in done.stdout.splitlines() if line]
    assert lines.count("used") == (2 if order == "before" else 1)
    assert any("got a sub-interpreter, wanted the main interpreter" in line for line in lines)


AT_EXIT = """
import builtins
import numpy, onchip

class Late:
    def __init__(self):
        self.function = onchip.ops.attention_forward
        self.x = numpy.ones((1, 4, 1, 4), "float32")
        self.function(self.x, self.x, self.x)

    def __del__(self):
        o, lse = self.function(self.x, self.x, self.x)
        print(o.shape, float(o[0, 3, 0, 3]))

builtins.late = Late()
"""


def test_a_call_when_the_interpreter_ends():
    done = run_script(AT_EXIT)
    assert done.returncode == 0 and not done.stderr, done.stderr
    assert done.stdout == "(1, 4, 1, 4) 1.0\n"


def test_objects_past_their_constructor_are_no_tensors():
    empty = _native.Tensor.__new__(_native.Tensor)
    whole = _native.tensor("op", "x", X, None, False, 0)
    with pytest.raises(TypeError, match="q: wanted a Tensor"):
        _native.Call("attention_forward", {"q": empty, "k": whole, "v": whole})
    call = _native.Call("attention_forward", {"q": whole, "k": whole, "v": whole})
    with pytest.raises(TypeError, match="o: wanted a Tensor"):
        call.bind({"o": empty})


FORWARD = "attention_forward"


@pytest.mark.parametrize("window", [{1, 2}, {1: 2, 3: 4}, "12", 3, (1,), (1, 2, 3)])
def test_a_window_is_a_pair_in_order(window):
    for call in (onchip.ops.attention_forward, lambda *x, **o: onchip.explain(FORWARD, *x, **o)):
        with pytest.raises(onchip.InvalidArgument, match=r"window: got .*wanted"):
            call(X, X, X, window=window)


def test_an_empty_name_is_no_backend():
    for call in (onchip.ops.attention_forward, lambda *x, **o: onchip.explain(FORWARD, *x, **o)):
        with pytest.raises(onchip.InvalidArgument, match="backend: got '', wanted a name or None"):
            call(X, X, X, backend="")


DTYPES = {
    "mask": ("uint8", (1, 1, 4, 4), "bool"),
    "bias": ("int16", (1, 1, 4, 4), "float64, float32, float16 or bfloat16"),
    "sink": ("uint32", (2,), "float64, float32, float16 or bfloat16"),
    "alibi_slopes": ("int8", (2,), "float64, float32, float16 or bfloat16"),
    "q_segment_ids": ("uint8", (1, 4), "int32"),
    "kv_segment_ids": ("int16", (1, 4), "int32"),
    "dropout_rng": ("uint64", (2,), "int64"),
    "cu_seqlens_q": ("uint32", (2,), "int32 or int64"),
    "cu_seqlens_kv": ("int16", (2,), "int32 or int64"),
    "seqlens_q": ("uint8", (1,), "int32 or int64"),
    "seqlens_kv": ("int16", (1,), "int32 or int64"),
}


@pytest.mark.parametrize("name", DTYPES)
def test_a_dtype_that_onchip_has_not_names_those_wanted(name):
    dtype, shape, wanted = DTYPES[name]
    given = {name: np.zeros(shape, dtype)}
    with pytest.raises(
        onchip.InvalidArgument, match=f"{name}: got dtype {dtype}, wanted {wanted}$"
    ):
        onchip.ops.attention_forward(X, X, X, **given)


class Raises:
    def __init__(self, error):
        self.error = error

    def __index__(self):
        raise self.error

    __float__ = __index__


@pytest.mark.parametrize("name", ["window", "max_seqlen_q", "scale", "softcap"])
def test_an_interrupt_while_an_option_is_read(name):
    """It reaches the caller; an ordinary error of the value is a refusal."""

    def call(error):
        value = Raises(error)
        given = {name: (value, 0) if name == "window" else value}
        onchip.ops.attention_forward(X, X, X, **given)

    with pytest.raises(KeyboardInterrupt):
        call(KeyboardInterrupt())
    with pytest.raises(onchip.InvalidArgument, match=f"{name}.*: got Raises, wanted"):
        call(KeyError("none"))


def test_numbers_of_other_libraries_are_options():
    given = dict(window=(np.int64(2), np.int8(0)), scale=np.float32(0.5), max_seqlen_q=np.uint8(4))
    o, _ = onchip.ops.attention_forward(X, X, X, **given, causal=np.bool_(True))
    assert o.shape == X.shape
    for name, value in (("scale", "1"), ("max_seqlen_q", 4.0), ("max_seqlen_q", 2**64)):
        with pytest.raises(onchip.InvalidArgument, match=f"{name}: got"):
            onchip.ops.attention_forward(X, X, X, **{name: value})


@pytest.mark.parametrize(
    ("names", "message"),
    [
        (("attention_forward", ("q", "scale"), (), ()), "attention_forward has no tensor scale"),
        (("attention_forward", ("q",), ("dq",), ()), "attention_forward has no tensor dq"),
        (("attention_forward", ("q",), (), ("bias",)), "attention_forward has no value bias"),
        (("attention", (), (), ()), "no operator is named 'attention'"),
    ],
)
def test_torch_calls_know_their_names(names, message):
    with pytest.raises(ValueError, match=message):
        _native.TorchCall(*names, 0, ())


class Plain:
    requires_grad = False


class Leaf(Plain):
    requires_grad = True


def test_torch_calls_look_at_what_they_are_given():
    types = (Plain, Leaf)
    call = _native.TorchCall("attention_forward", ("q", "k"), ("o",), ("scale",), 1, types)
    for given in (((1,), (1,), (1,)), ((1, 2), (), (1,)), ((1, 2), (1,), (1, 2))):
        with pytest.raises(ValueError, match="wanted"):
            call.run(*given, bytearray)
    with pytest.raises(ValueError, match="3 given, 2 wanted"):
        call.examine((Plain(), None, None))
    assert call.examine((Plain(), None)) is False
    assert call.examine((Plain(), Leaf())) is True
    assert call.examine((Plain(), 1.0)) is None
    assert call.examine((None, Plain())) is None  # the first one has to be there
