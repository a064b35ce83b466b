"""Second part: causal attention from 512 to 16,384 tokens, plain, by onchip, by torch if there."""

from pathlib import Path

from rich import box
from rich.console import Console
from rich.table import Table

from examples.demo import plot
from examples.demo.show import CheckFailed, bytes_text, ms_text, progress
from onchip.bench import measure, record
from onchip.bench.cases import AttentionCase
from onchip.bench.implementations import IMPLEMENTATIONS

SEQLENS = (512, 1024, 2048, 4096, 8192, 16384)
QUICK_SEQLENS = (512, 1024)
NUM_HEADS = 4
HEAD_DIM = 64
# Accuracy that fp32 attention owes (docs/semantics.md, section 5), relative to the largest output.
TIMES_PLAIN_ERROR = 2
FP32_BOUND = 1e-5

ROOT = Path(__file__).resolve().parents[2]
PLAIN, ONCHIP = "numpy:plain", "onchip:cpu"
TITLES = {PLAIN: "plain formula", ONCHIP: "onchip", "torch:sdpa": "torch sdpa"}


def case_of(seqlen: int) -> AttentionCase:
    return AttentionCase.parse(f"attention/fwd/fp32/h{NUM_HEADS}d{HEAD_DIM}/causal/b1s{seqlen}")


def run(console: Console, folder: Path, quick: bool) -> None:
    seqlens = QUICK_SEQLENS if quick else SEQLENS
    names = [name for name in TITLES if IMPLEMENTATIONS[name].installed]
    results: list[measure.Result] = []
    skipped: list[record.Record] = []
    with progress(console, "measuring", total=len(seqlens) * len(names)) as step:
        for seqlen in seqlens:
            for name in names:
                case = case_of(seqlen)
                try:
                    budget_s = 0.3 if quick else 4.0
                    results.append(measure.measure_in_own_process(case, name, budget_s))
                except measure.Skipped as reason:
                    skipped.append({"case": case.name, "impl": name, "reason": str(reason)})
                step()

    print_table(console, results)
    for entry in skipped:
        console.print(f"Not measured: {TITLES[entry['impl']]}, {entry['case']}: {entry['reason']}.")
    if "torch:sdpa" not in names:
        console.print("torch is not installed: not measured (tools/setup --with-torch adds it).")

    made = record.build(results, skipped, **record.checkout(ROOT))
    record_path, plot_path = folder / "attention_cpu.json", folder / "attention_cpu.png"
    record.write(made, record_path)
    plot.draw(made, TITLES, plot_path)
    console.print(f"Plot:   {plot_path}\nRecord: {record_path}", soft_wrap=True)
    check_accuracy(results)


def print_table(console: Console, results: list[measure.Result]) -> None:
    table = Table(
        title=f"Causal attention, fp32, {NUM_HEADS} heads, head_dim {HEAD_DIM}",
        box=box.SIMPLE_HEAD,
        pad_edge=False,
        collapse_padding=True,
        caption="time: best of the samples, after a warm-up. extra memory: peak resident memory "
        "of a call beyond its inputs and results. error: the largest against fp64, over sampled "
        "rows of every head.",
        caption_justify="left",
    )
    table.add_column("tokens", justify="right", no_wrap=True)
    table.add_column("", no_wrap=True)
    for heading in ("time", "GFLOP/s", "x plain", "extra memory", "error"):
        table.add_column(heading, justify="right", no_wrap=True)
    for seqlen in sorted({AttentionCase.parse(result["case"]).seqlen for result in results}):
        rows = {r["impl"]: r for r in results if r["case"] == case_of(seqlen).name}
        for index, (name, result) in enumerate(rows.items()):
            best_ms = min(result["samples_ms"])
            ratio = f"{min(rows[PLAIN]['samples_ms']) / best_ms:.2f}" if PLAIN in rows else "-"
            table.add_row(
                f"{seqlen:,}" if index == 0 else "",
                TITLES[name],
                ms_text(best_ms),
                f"{case_of(seqlen).flops / best_ms / 1e6:,.0f}",
                ratio,
                bytes_text(result["peak_bytes"]),
                f"{result['error']['max']:.1e}",
                end_section=index == len(rows) - 1,
            )
    console.print(table)


def check_accuracy(results: list[measure.Result]) -> None:
    for result in results:
        if result["impl"] != ONCHIP:
            continue
        plain = [r for r in results if r["impl"] == PLAIN and r["case"] == result["case"]]
        allowed = FP32_BOUND * result["error"]["max_ref"]
        allowed += TIMES_PLAIN_ERROR * max((r["error"]["max"] for r in plain), default=0.0)
        # Written so that a NaN fails, too.
        if not result["error"]["max"] <= allowed:
            raise CheckFailed(
                f"{result['case']}: onchip's error against fp64 is {result['error']['max']}, "
                f"allowed {allowed}"
            )
