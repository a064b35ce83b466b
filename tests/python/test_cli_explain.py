"""`onchip explain`, as argparse and as typer read it."""

import inspect

import numpy as np
import pytest

import onchip
from onchip import ArraySpec
from onchip.cli import commands
from onchip.cli.signature import parameters

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
        "retention_backward --q 9,2,4 --v 9,4,3 --cu-seqlens 0,5,9 --scale 0.5 --backend reference",
        lambda: onchip.explain(
            "retention_backward",
            ArraySpec((9, 4, 3), "float32"),
            *[ArraySpec((9, 2, 4), "float32")] * 2,
            ArraySpec((9, 4, 3), "float32"),
            cu_seqlens=[0, 5, 9],
            scale=0.5,
            backend="reference",
        ),
    ),
    (
        [
            *("attention_forward", "--k", "2,1024,4,128", "--dtype", "bf16"),
            *("--arrays", "q=2,1024,16,128 sink=16:fp32", "--options", "causal=true window=64,-1"),
        ],
        lambda: onchip.explain(
            "attention_forward",
            *(BF16, BF16_KV, BF16_KV),
            sink=ArraySpec((16,), "float32"),
            causal=True,
            window=[64, -1],
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
        "linear flags",
        "attention by names",
        "merge",
    ],
)
def test_explain(run, words, wanted):
    words = words.split() if isinstance(words, str) else words
    status, out, err = run("explain", *words)
    assert (status, err) == (0, "")
    assert out == wanted()


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


@pytest.mark.parametrize(
    ("word", "meant"),
    [
        ("attention_forwrd", "attention_forward, "),
        (
            "gated_delta_rule",
            "gated_delta_rule_forward, gated_delta_rule_backward, gated_delta_rule_step;",
        ),
        ("attention_merge", "attention_decode"),
        ("flux", None),
    ],
)
def test_a_name_that_may_have_been_meant(run, word, meant):
    _, _, err = run("explain", word)
    said, _, where = err.rpartition("; all of them: ")
    assert where == "onchip.ops.__all__, docs/operators.md\n"
    start = f"onchip: explain: operator: got '{word}', wanted a function of onchip.ops"
    assert (
        said == start
        if meant is None
        else f"{said};".startswith(f"{start}; nearest legal: {meant}")
    )
