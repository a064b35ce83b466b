"""Arrays of libraries that nobody knows, by `__dlpack__` and by the C exchange interface: what is
asked of a producer, what is refused, what is given back."""

import numpy as np
import pytest
from producers import (
    BFLOAT,
    COMPLEX,
    CPU,
    CUDA,
    CUDA_HOST,
    READ_ONLY,
    ROCM,
    Look,
    OldProducer,
    Producer,
    contents,
    exchange_producer,
    qkv,
    read,
)

import onchip

# ---- __dlpack__


LOOKS = [
    Look(),
    Look(versioned=False),
    Look(flags=READ_ONLY),
    Look(device=(CUDA_HOST, 0)),
    Look(strides=False),
    Look(offset=24),
]


@pytest.mark.parametrize("look", LOOKS, ids=str)
@pytest.mark.parametrize("kind", [Producer, OldProducer])
def test_dlpack_producers(kind, look):
    values = np.arange(24, dtype=np.float32).reshape(2, 3, 4)
    producer = kind(values, look)
    tensor = read(producer)
    assert (tensor.shape, tensor.dtype, tensor.device) == ((2, 3, 4), "float32", (CPU, 0))
    assert tensor.byte_strides == values.strides
    np.testing.assert_array_equal(contents(tensor, np.float32), values)
    assert len(producer.exports.alive) == 1
    del tensor
    assert producer.exports.made == 1 and not producer.exports.alive


def test_producers_as_inputs_of_an_operator():
    q, k, v = qkv()
    wanted = onchip.ops.attention_forward(q, k, v)
    producers = [Producer(k), OldProducer(v, Look(versioned=False))]
    got = onchip.ops.attention_forward(q, *producers)
    for a, b in zip(got, wanted, strict=True):
        np.testing.assert_array_equal(a, b)
    assert [p.exports.made for p in producers] == [1, 1]
    assert not any(p.exports.alive for p in producers)


def test_versions_and_streams_asked_for():
    values = np.zeros(3, np.float32)
    on_cpu = Producer(values)
    read(on_cpu, stream=7)
    assert on_cpu.calls == [{"max_version": (1, 3)}]
    old = OldProducer(values)
    read(old)
    assert old.calls == [{"stream": None}]
    for given, asked in [(0, 1), (7, 7), (2**48, 2**48)]:
        on_gpu = Producer(values, Look(device=(CUDA, 3)))
        tensor = read(on_gpu, stream=given)
        assert tensor.device == (CUDA, 3)
        assert on_gpu.calls == [{"max_version": (1, 3), "stream": asked}]


REFUSED = {
    "read-only": (Look(flags=READ_ONLY), True, "got a read-only array, wanted memory that may be"),
    "major": (Look(major=2), False, r"got DLPack version 2\.x, wanted version 1\.x"),
    "device": (Look(device=(ROCM, 0)), False, "got memory of DLPack device type 10"),
    "dtype": (Look(code=COMPLEX), False, "got dtype complex32, wanted float64"),
    "lanes": (Look(lanes=4), False, "got dtype float32 x 4, wanted"),
    "bfloat32": (Look(code=BFLOAT), False, "got dtype bfloat32, wanted"),
    "unknown": (Look(code=99), False, "got dtype DLPack code 99 with bits 32, wanted"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_refused_exports_are_given_back(name):
    look, writable, message = REFUSED[name]
    producer = Producer(np.zeros((2, 3), np.float32), look)
    with pytest.raises(onchip.InvalidArgument, match="^op: x: " + message):
        read(producer, writable=writable)
    assert producer.exports.made == 1 and not producer.exports.alive


def test_rank_is_bounded():
    producer = Producer(np.zeros((1,) * 7, np.float32))
    with pytest.raises(onchip.InvalidArgument, match="got rank 7, wanted rank 6 at most"):
        read(producer)
    assert not producer.exports.alive
    assert read(np.zeros((1,) * 6)).shape == (1,) * 6
    assert read(np.float32(3) * np.ones(())).shape == ()


def test_bytes_as_another_dtype():
    values = np.array([0x3F80, 0x4000], np.uint16)
    assert read(values, dtype="bfloat16").dtype == "bfloat16"
    with pytest.raises(onchip.InvalidArgument, match="got elements of 2 bytes, wanted the 4 bytes"):
        read(values, dtype="float32")
    with pytest.raises(onchip.InvalidArgument, match="got dtype uint16, wanted float64, float32"):
        read(values)


def test_what_is_no_array():
    for value, named in [([1.0], "list"), (None, "None"), (3.5, "3.5"), ("abc", "'abc'")]:
        with pytest.raises(onchip.InvalidArgument, match=rf"^op: x: got {named}, wanted an array"):
            read(value)


class NoCapsule(Producer):
    def __dlpack__(self, **keywords):
        return "text"


def test_producer_without_a_capsule():
    with pytest.raises(
        onchip.InvalidArgument,
        match="got an array whose __dlpack__ returned 'text', wanted a DLPack capsule",
    ):
        read(NoCapsule(np.zeros(3)))


def test_errors_of_a_producer():
    broken = Producer(np.zeros(3), raises=BufferError("no memory of that kind"))
    with pytest.raises(
        onchip.InvalidArgument,
        match=r"got Producer that does not export its memory \(BufferError: no memory of that kind",
    ):
        read(broken)
    for error in (KeyboardInterrupt(), MemoryError()):
        with pytest.raises(type(error)):
            read(Producer(np.zeros(3), raises=error))

    class AlsoBuffer(Producer, bytes):
        def __new__(cls, *arguments):
            return bytes.__new__(cls, 8)

    with pytest.raises(onchip.InvalidArgument, match="got dtype uint8"):
        read(AlsoBuffer(np.zeros(3), None, BufferError()))


# ---- the C exchange interface


def test_exchange_interface_comes_first_and_is_looked_up_once():
    kind = exchange_producer()
    values = np.arange(6, dtype=np.float32).reshape(2, 3)
    for _ in range(5):
        producer = kind(values)
        tensor = read(producer)
        np.testing.assert_array_equal(contents(tensor, np.float32), values)
        assert len(producer.exports.alive) == 1
        del tensor
        assert not producer.exports.alive and not producer.calls
    assert kind.exchanged == 5 and kind.looked_up == 1


def test_exchange_interface_of_another_major_version():
    values = np.zeros(3, np.float32)
    newer = exchange_producer(major=2)(values)
    read(newer)
    assert newer.calls and type(newer).exchanged == 0
    both = exchange_producer(major=2, previous_major=1)(values)
    read(both)
    assert not both.calls and type(both).exchanged == 1


def test_exchange_interface_on_a_gpu_keeps_to_its_stream():
    values = np.zeros(3, np.float32)
    kind = exchange_producer(current_stream=5)
    same = kind(values, Look(device=(CUDA, 0)))
    read(same, stream=5)
    assert not same.calls
    # Its pending work is on stream 5: the producer has to order it before stream 6.
    other = kind(values, Look(device=(CUDA, 0)))
    read(other, stream=6)
    assert other.calls == [{"max_version": (1, 3), "stream": 6}]
    assert not same.exports.alive and not other.exports.alive


def test_exchange_interface_that_fails():
    producer = exchange_producer(fails=True)(np.zeros(3, np.float32))
    read(producer)
    assert producer.calls and not producer.exports.alive


def test_more_array_types_than_the_cache_holds():
    values = np.zeros(3, np.float32)
    kinds = [exchange_producer() for _ in range(30)]
    for kind in kinds * 2:
        read(kind(values))
    assert all(kind.exchanged == 2 for kind in kinds)
