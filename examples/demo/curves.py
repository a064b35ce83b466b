"""The plot of the third part: held-out loss over the time and over the characters of training."""

from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")

from matplotlib import pyplot as plt
from matplotlib.ticker import FuncFormatter, MaxNLocator

# Told apart by lightness and marker too, not by hue alone.
STYLES: dict[str, dict[str, Any]] = {
    "attention": {"color": "#1d4e89", "marker": "^"},
    "Gated DeltaNet": {"color": "#c2410c", "marker": "o"},
}


def draw(made: dict[str, Any], path: Path) -> None:
    figure, axes = plt.subplots(1, 2, figsize=(11, 4.8), layout="constrained", sharey=True)
    for panel, key, title in zip(
        axes,
        ("seconds", "tokens"),
        ("seconds of training", "characters trained on"),
        strict=True,
    ):
        for result in made["results"]:
            curve = result["curve"]
            panel.plot(
                [point[key] for point in curve],
                [point["held_out"] for point in curve],
                label=result["model"],
                markersize=4,
                **STYLES[result["model"]],
            )
        panel.axhline(
            made["unigram_entropy"], color="black", linestyle=":", label="frequencies alone"
        )
        panel.set_xlabel(title)
        panel.xaxis.set_major_locator(MaxNLocator(5))
        panel.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.10g}"))
        panel.grid(which="major", color="#dddddd")
        panel.spines[["top", "right"]].set_visible(False)
    axes[0].set_ylabel("held-out loss, nats a character")
    axes[0].legend(frameon=False)
    machine = made["machine"]
    cores = "1 core" if machine["cores"] == 1 else f"{machine['cores']} cores"
    figure.suptitle(
        f"Two language models of Python's language reference, on {cores} of {machine['cpu']}"
    )
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=150)
    plt.close(figure)
