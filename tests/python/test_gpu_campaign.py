"""The tools that run a campaign on a GPU, as far as they need none: stages, which sources a record
was made with, what racecheck reports."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "tools/gpu"))

import racecheck  # noqa: E402
import tree_state  # noqa: E402

# ---- stages

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
    run.Stage("long", py(note), 500, together=True, least_s=200),
    run.Stage("table", py("print('a | b'); print('1 | 2')"), 30, together=True, shows=True),
]
for again in (False, False, True):
    campaign = run.Campaign(state, {"fingerprint": sys.argv[3]}, again)
    campaign.run(chosen, time.time() + 100)
print(json.dumps({name: o["code"] for name, o in campaign.outcomes.items()}))
assert campaign.outcomes["table"]["shown"] == ["a | b", "1 | 2"]
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
    assert codes == {"good": 0, "bad": 3, "late": 124, "answer": 0, "table": 0}
    # What takes times runs alone and first; what cannot end in time does not begin.
    assert answer.startswith("answer ")
    assert "out of time before: long" in answer
    assert found == {"a": 1}
    assert ran == "xx"  # once, not again, and again because it was asked for
    assert "TIME LIMIT" in answer and "FAILED (3)" in answer and "    broken" in answer
    assert campaign("one")[2][1] == "xxx"
    assert campaign("two")[2][1] == "xxxxx"  # other sources


# ---- sources


@pytest.fixture
def tree(tmp_path):
    def write(name, text="1"):
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)

    for name in ("CMakeLists.txt", "src/a.cpp", "tests/a.py", "bench/b.py", "tools/gpu/run"):
        write(name)
    write("src/a.md")
    write(".gitignore", "__pycache__/\n.mypy_cache/\n")
    for command in (
        ("init", "-q"),
        ("add", "-A"),
        ("-c", "user.name=a", "-c", "user.email=a@b", "commit", "-qm", "x"),
    ):
        tree_state.git(*command, root=tmp_path)
    return tmp_path, write


def test_only_what_figures_depend_on_makes_a_record_dirty(tree):
    root, write = tree
    # Caches and documents do not travel, or say nothing: neither begins nor ends in the state.
    for name in ("python/.mypy_cache/x.db", "src/__pycache__/a.pyc", "bench/records/r.json"):
        write(name)
    write("src/a.md", "2")
    state = tree_state.describe(root)
    assert state["dirty"] == []
    assert state["commit"] == tree_state.git("rev-parse", "HEAD", root=root).strip()
    assert set(state["files"]) == {
        *("CMakeLists.txt", "src/a.cpp", "tests/a.py", "bench/b.py", "tools/gpu/run")
    }
    assert tree_state.changed(state["files"], root) == []

    write("tests/a.py", "2")
    changed = tree_state.changed(state["files"], root)
    assert changed == ["tests/a.py"]
    assert tree_state.with_changes(state, changed)["dirty"] == []
    assert tree_state.fingerprint(tree_state.hashes(root)) != tree_state.fingerprint(state["files"])

    write("src/a.cpp", "2")
    write("python/new.py")
    (root / "bench/b.py").unlink()
    changed = tree_state.changed(state["files"], root)
    assert changed == ["bench/b.py", "python/new.py", "src/a.cpp", "tests/a.py"]
    wanted = ["bench/b.py", "python/new.py", "src/a.cpp"]
    assert tree_state.with_changes(state, changed)["dirty"] == wanted
    assert tree_state.describe(root)["dirty"] == wanted


# ---- racecheck

EXPLAINED = ROOT / "src/gpu/kernels/sm90/attention_forward_races.txt"
BLOCK = "attention_forward.cuh"
KERNEL = "onchip_attention_forward(TensorMap, TensorMap, Params)"


def numbered(file, text):
    """A place as the sanitizer names it, by the line's text."""
    (path,) = (ROOT / "src/gpu").rglob(file)
    lines = [line.strip() for line in path.read_text().splitlines()]
    return f"{KERNEL}+0x{hash(text) % 65536:x} in {file}:{lines.index(text) + 1}"


def report(first, *others):
    words = [f"========= Error: Race reported between {first[0]} access at {first[1]}"]
    words += [f"=========     and {kind} access at {at} [{n} hazards]" for kind, at, n in others]
    return "\n".join([*words, "========= "])


def log(*reports, displayed=None):
    """As compute-sanitizer 2025 prints it, the program's own words between."""
    count = len(reports) if displayed is None else displayed
    errors = f"({count} errors, 0 warnings)"
    body = ["========= COMPUTE-SANITIZER", *reports, "small: 36 done, 0 failures"]
    return "\n".join([*body, f"========= RACECHECK SUMMARY: {count} hazards displayed {errors}"])


WRITE = ("Write", numbered("attention_forward_schedule.cuh", "block.tile(n) = tile;"))
READ = numbered(BLOCK, "const Tile t = block.tile(n);")
OTHER_READ = numbered(BLOCK, "if (uniform(tile.parts) != 0) {")
UNKNOWN = "onchip_attention_forward+0x59b0"


@pytest.fixture(scope="module")
def reasons():
    return racecheck.explained(EXPLAINED.read_text())


def test_reports_are_grouped_by_lines(reasons):
    text = log(
        report(WRITE, ("Read", READ, 12), ("Read", OTHER_READ, 20)),
        report(("Read", READ), ("Write", WRITE[1], 28)),
    )
    reports, displayed = racecheck.parse(text)
    assert displayed == 2 and [len(r) for r in reports] == [2, 1]
    problems, table, summary = racecheck.judge(text, 0, reasons)
    assert problems == []
    assert summary == "2 reports of 2 pairs"
    write = "write attention_forward_schedule.cuh: block.tile(n) = tile;"
    assert [" ".join(line.split()) for line in table] == [
        "hazards reports explained",
        f"40 2 yes {write}",
        "read attention_forward.cuh: const Tile t = block.tile(n);",
        f"20 1 yes {write}",
        "read attention_forward.cuh: if (uniform(tile.parts) != 0) {",
    ]


@pytest.mark.parametrize(
    "other",
    [
        ("Read", numbered(BLOCK, "const i64 begin = clock64();"), 4),  # another line
        ("Write", WRITE[1], 4),  # twice written
        ("Write", READ, 4),  # a write where a read is explained
        ("Read", UNKNOWN, 4),  # no line
    ],
)
def test_a_new_pair_fails(other, reasons):
    text = log(report(WRITE, ("Read", READ, 12), other))
    problems, table, summary = racecheck.judge(text, 0, reasons)
    assert problems == ["1 pairs are not explained"]
    assert sum(" NO " in line for line in table) == 1
    assert summary == "1 reports of 2 pairs: 1 pairs are not explained"


def test_what_is_not_whole_fails(reasons):
    whole = report(WRITE, ("Read", READ, 12))
    for text, code, problem in (
        (log(whole, displayed=24), 0, "24 reports were counted, 1 are here"),
        (whole, 0, "there is no RACECHECK SUMMARY"),
        (log(whole), 1, "the program ended with 1"),
        (log(report(WRITE)), 0, "a report names one access only"),
    ):
        assert racecheck.judge(text, code, reasons)[0] == [problem]
    assert racecheck.judge(log(), 0, reasons) == ([], [], "0 reports of 0 pairs")


def test_other_forms_of_a_place():
    for place in (
        "0x6360 in /a/b/attention_forward.cuh:1:kernel(pixel const*, int)",
        "kernel(int*)+0x90 in attention_forward.cuh:1",
    ):
        ((hazards,),), _ = racecheck.parse(report(("Read", place), ("Write", UNKNOWN, 1)))
        first = (ROOT / "src/gpu/kernels/sm90" / BLOCK).read_text().splitlines()[0]
        assert racecheck.Access("read", f"{BLOCK}: {first}") in hazards.pair
    ((hazards,),), _ = racecheck.parse(report(("Read", "k+0x1 in a.cuh:7"), ("Write", "k", 1)))
    assert racecheck.Access("read", "a.cuh:7") in hazards.pair


def test_explained_lines_are_there(reasons):
    assert reasons
    for access in set().union(*reasons):
        file, _, text = access.place.partition(": ")
        (path,) = (ROOT / "src/gpu").rglob(file)
        assert text in [line.strip() for line in path.read_text().splitlines()], access


@pytest.mark.parametrize(
    "text",
    [
        "write a: b\nread c: d\n",
        "write a: b\n    why\n",
        "write a: b\nreads c: d\n    why\n",
        "write a: b\n\nread c: d\n    why\n",
    ],
)
def test_explanations_are_whole(text):
    with pytest.raises(racecheck.Malformed):
        racecheck.explained(text)
