"""The plot of the second part: time and extra memory over the sequence length, log-log."""

from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")

from matplotlib import pyplot as plt
from matplotlib.axes import Axes
from matplotlib.ticker import FixedLocator, FuncFormatter, NullFormatter, NullLocator

from onchip.bench.cases import AttentionCase
from onchip.bench.memory import RESOLUTION_BYTES

# Told apart by lightness and marker too, not by hue alone.
STYLES: dict[str, dict[str, Any]] = {
    "numpy:plain": {"color": "#8a8a8a", "marker": "s"},
    "onchip:cpu": {"color": "#c2410c", "marker": "o", "linewidth": 2.5, "zorder": 3},
    "torch:sdpa": {"color": "#1d4e89", "marker": "^"},
}


def draw(record: dict[str, Any], titles: dict[str, str], path: Path) -> None:
    results = record["results"]
    cases = sorted({AttentionCase.parse(r["case"]) for r in results}, key=lambda c: c.seqlen)
    figure, (time_axes, memory_axes) = plt.subplots(1, 2, figsize=(11, 4.8), layout="constrained")
    for name, title in titles.items():
        rows = {r["case"]: r for r in results if r["impl"] == name}
        measured = [case for case in cases if case.name in rows]
        if not measured:
            continue
        times = [min(rows[case.name]["samples_ms"]) for case in measured]
        _line(time_axes, measured, times, title, STYLES[name])
        with_memory = [c for c in measured if rows[c.name]["peak_bytes"] is not None]
        peaks = [max(RESOLUTION_BYTES, rows[c.name]["peak_bytes"]) / 2**20 for c in with_memory]
        at_floor = bool(peaks) and peaks[-1] == RESOLUTION_BYTES / 2**20
        _line(memory_axes, with_memory, peaks, title, STYLES[name], "< " if at_floor else "")

    tensors = [case.tensor_bytes / 2**20 for case in cases]
    dotted = {"color": "black", "linestyle": ":"}
    _line(memory_axes, cases, tensors, "q, k, v and o themselves", dotted)
    _label(time_axes, cases, "time of a call", "ms")
    _label(memory_axes, cases, "memory beyond inputs and results", "MiB")
    machine = record["machine"]
    case = cases[0]
    figure.suptitle(
        f"Causal attention forward, fp32, {case.num_heads} heads, head_dim {case.head_dim}, on "
        f"{machine['cores']} cores of {machine['cpu']}"
    )
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=150)
    plt.close(figure)


def _line(
    axes: Axes,
    cases: list[AttentionCase],
    values: list[float],
    title: str,
    style: dict[str, Any],
    bound: str = "",
) -> None:
    """A line whose last value is written beside it, after `bound` where that is only a bound."""
    axes.plot([case.seqlen for case in cases], values, label=title, **style)
    if cases:
        axes.annotate(
            bound + (f"{values[-1]:,.0f}" if values[-1] >= 10 else f"{values[-1]:.2g}"),
            (cases[-1].seqlen, values[-1]),
            xytext=(8, 0),
            textcoords="offset points",
            verticalalignment="center",
            color=style["color"],
        )


def _label(axes: Axes, cases: list[AttentionCase], title: str, unit: str) -> None:
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    axes.margins(x=0.11)
    axes.xaxis.set_major_locator(FixedLocator([case.seqlen for case in cases]))
    axes.xaxis.set_minor_locator(NullLocator())
    plain_number = FuncFormatter(lambda value, _: f"{value:,.10g}")
    axes.xaxis.set_major_formatter(plain_number)
    axes.yaxis.set_major_formatter(plain_number)
    axes.yaxis.set_minor_formatter(NullFormatter())
    axes.set_xlabel("tokens")
    axes.set_ylabel(unit)
    axes.set_title(title)
    axes.grid(which="major", color="#dddddd")
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False)
