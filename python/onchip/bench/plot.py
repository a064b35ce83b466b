"""The figures of a record as bars; needs matplotlib."""

from pathlib import Path
from typing import Any

from onchip.bench import table

_COLOURS = ("#c2410c", "#1d4e89", "#8a8a8a", "#5b8c5a", "#b8860b", "#7b4b94")


def draw(record: dict[str, Any], path: Path) -> None:
    """Rates by case and implementation; the file's ending says its format."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    panels = [
        (title, results, rate)
        for title, results, rate in (
            (table.unit(record), table.computing(record), table.speed),
            ("GB/s", table.steps(record), table.bandwidth),
        )
        if results
    ]
    impls = list(dict.fromkeys(result["impl"] for result in table.operators(record)))
    colours = dict(zip(impls, _COLOURS * len(impls), strict=False))
    heights = [len(results) + 2 for _, results, _ in panels]
    figure = Figure(figsize=(10, 1.2 + 0.32 * sum(heights)), layout="constrained")
    FigureCanvasAgg(figure)
    all_axes = figure.subplots(len(panels), 1, squeeze=False, height_ratios=heights)[:, 0]
    for axes, (title, results, rate) in zip(all_axes, panels, strict=True):
        _bars(axes, title, results, lambda result, rate=rate: rate(result, record), colours)
    machine = record["machine"]
    figure.suptitle(
        f"{machine['gpu'] or machine['cpu']}, {machine['threads']} threads,"
        f" {record['created'][:10]}"
    )
    figure.savefig(path, dpi=120)


def _bars(axes: Any, title: str, results: Any, rate: Any, colours: dict[str, str]) -> None:
    cases = list(dict.fromkeys(result["case"] for result in results))
    impls = [impl for impl in colours if any(result["impl"] == impl for result in results)]
    height = 0.8 / len(impls)
    for index, impl in enumerate(impls):
        own = [result for result in results if result["impl"] == impl]
        at = [cases.index(result["case"]) + (index + 0.5) * height - 0.4 for result in own]
        bars = axes.barh(at, [rate(result) for result in own], height, color=colours[impl])
        bars.set_label(impl)
        axes.bar_label(bars, fmt="%.3g", fontsize=7, padding=2)
    axes.set_yticks(range(len(cases)), cases, fontsize=8)
    axes.invert_yaxis()
    axes.set_xlabel(title)
    axes.margins(x=0.08)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(fontsize=8)
