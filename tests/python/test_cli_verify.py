"""`onchip verify`, as argparse and as typer read it."""

import importlib.util
import re

import numpy as np
import pytest

import onchip
from onchip import _kinds
from onchip.cli.verify import SUBJECTS


def rows_of(out):
    """(operator, backend): the other cells of verify's table."""
    lines = [re.split(r"  +", line) for line in out.splitlines()]
    return {tuple(cells[:2]): cells[2:] for cells in lines if len(cells) > 4}


def test_verify(run, monkeypatch):
    # However slow the machine, no line of progress.
    monkeypatch.setattr("onchip.cli.progress._SECONDS_BETWEEN_LINES", 3600.0)
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
    missing = [row for row in onchip.describe()["backends"] if not row["available"]]
    for row in missing:
        assert f"\nnot verified: {row['name']}: {row['detail']}\n" in out
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


@pytest.mark.parametrize("what", ["o", "state[0]", "state[2]", "a slot of no row", "a skipped row"])
def test_verify_finds_a_wrong_step(run, monkeypatch, what):
    """What a step returns, what it leaves in the pool, and what it may not touch."""
    right, spoiled = onchip.ops.rwkv4_step, []

    def wrong(**call):
        o = right(**call)
        indices = call["state_indices"]
        given = np.arange(len(o)) if indices is None else indices
        live = np.flatnonzero(given >= 0)
        state = call["state"]
        spare = np.setdiff1d(np.arange(len(state[0])), given[live])
        skipped = np.flatnonzero(given < 0)
        rows, array = {
            "o": (live, o),
            "a skipped row": (skipped, o),
            "a slot of no row": (spare, state[1]),
            "state[0]": (given[live], state[0]),
            "state[2]": (given[live], state[2]),
        }[what]
        if len(rows):
            array[rows[0], -1] += 5
            spoiled.append(rows[0])
        return o

    monkeypatch.setattr(onchip.ops, "rwkv4_step", wrong)
    status, out, err = run(
        *("verify", "rwkv4_step", "--backend", "reference", "--count", "20", "--seed", "5")
    )
    assert (status, err) == (1, "") and spoiled
    assert rows_of(out)["rwkv4_step", "reference"][2] == str(len(spoiled))
    words = {
        "a slot of no row": "state[1]: a slot of no row was written",
        "a skipped row": "o: a row that was skipped is not 0",
    }
    assert words.get(what, f"{what}: RMS error ") in out
    assert "slots of float" in out


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


def test_verify_says_once_why_operators_are_refused(run, monkeypatch):
    def refused(*arrays, **options):
        raise onchip.Unsupported(f"{options['backend']}: not today")

    for operator in ("gla_forward", "merge", "hgrn_forward"):
        monkeypatch.setattr(onchip.ops, operator, refused)
    _, out, _ = run("verify", "--backend", "reference", "--count", "1", "--seed", "3")
    said = [line for line in out.splitlines() if "nothing compared" in line]
    assert said == ["gla_forward, hgrn_forward, merge on reference: nothing compared: not today"]


def test_verify_needs_its_packages(run, monkeypatch):
    found = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name: None if name == "ml_dtypes" else found(name)
    )
    status, out, err = run("verify")
    assert (status, out) == (1, "")
    assert err == "onchip: verify: not installed: ml_dtypes (pip install 'onchip[cli]')\n"
