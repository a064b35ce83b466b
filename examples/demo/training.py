"""Third part: two language models, of attention and of Gated DeltaNet, learn the same text for the
same time; then each writes, by steps from a carried state and by the whole text anew."""

import json
import math
import time
from collections import Counter
from pathlib import Path
from pydoc_data import topics
from typing import Any

import torch
from rich import box
from rich.console import Console
from rich.table import Table
from torch import Tensor
from torch.nn import functional

import onchip
from examples.demo import curves
from examples.demo.language_model import (
    CausalAttention,
    LanguageModel,
    gated_delta_net,
    generate,
)
from examples.demo.show import CheckFailed, progress
from onchip.bench import record

ROOT = Path(__file__).resolve().parents[2]
MODELS = {"attention": CausalAttention, "Gated DeltaNet": gated_delta_net}
BATCH = 8
CONTEXT = 128
PROMPT = 64
SECONDS = 60.0
QUICK_SECONDS = 2.0
WRITTEN = 240
QUICK_WRITTEN = 24
HIGHEST_RATE = 3e-3
TEMPERATURE = 0.7
# Two ways to one result in float32; logits here are below 50.
LOGIT_BOUND = 1e-3


class Text:
    """Python's own language reference, as `help()` shows it: it comes with every Python. The last
    tenth is held out."""

    def __init__(self) -> None:
        whole = "\n\n".join(topics.topics[name] for name in sorted(topics.topics))
        letters = sorted(letter for letter, count in Counter(whole).items() if count > 20)
        self.letters = ["\N{REPLACEMENT CHARACTER}", *letters]
        index = {letter: number for number, letter in enumerate(self.letters)}
        tokens = torch.tensor([index.get(letter, 0) for letter in whole])
        cut = len(tokens) * 9 // 10
        self.seen, self.held_out = tokens[:cut], tokens[cut:]

    def written(self, tokens: Tensor) -> str:
        return "".join(self.letters[token] for token in tokens.tolist())

    def unigram_entropy(self) -> float:
        """What a model that knows frequencies alone would reach, in nats a character."""
        counts = torch.bincount(self.seen, minlength=len(self.letters)).double() + 1
        frequencies = counts / counts.sum()
        return float(-frequencies[self.held_out].log().mean())


def batches(tokens: Tensor, count: int, seed: int) -> Any:
    """The same ones for every model."""
    generator = torch.Generator().manual_seed(seed)
    for _ in range(count):
        begins = torch.randint(len(tokens) - CONTEXT - 1, (BATCH,), generator=generator)
        yield tokens[begins[:, None] + torch.arange(CONTEXT + 1)]


def loss_of(model: LanguageModel, rows: Tensor) -> Tensor:
    logits = model(rows[:, :-1])
    return functional.cross_entropy(logits.flatten(0, 1), rows[:, 1:].flatten())


@torch.no_grad()  # type: ignore[untyped-decorator, unused-ignore]
def held_out_loss(model: LanguageModel, text: Text, count: int) -> float:
    return sum(float(loss_of(model, rows)) for rows in batches(text.held_out, count, 1)) / count


def optimizer_of(model: LanguageModel) -> torch.optim.Optimizer:
    decayed: list[Tensor] = []
    kept: list[Tensor] = []
    for parameter in model.parameters():
        plain = parameter.dim() < 2 or hasattr(parameter, "_no_weight_decay")
        (kept if plain else decayed).append(parameter)
    groups = [{"params": decayed, "weight_decay": 0.1}, {"params": kept, "weight_decay": 0.0}]
    return torch.optim.AdamW(groups, lr=HIGHEST_RATE, betas=(0.9, 0.95))


def rate_at(done: float) -> float:
    """A short rise, then half a cosine, over the share of the time that is over."""
    return HIGHEST_RATE * min(done / 0.03, 0.55 + 0.45 * math.cos(math.pi * min(done, 1.0)))


def train(
    console: Console, name: str, model: LanguageModel, text: Text, seconds: float
) -> list[dict[str, float]]:
    """The curve: every few seconds of training the held-out loss, which is measured outside of
    them."""
    optimizer = optimizer_of(model)
    curve: list[dict[str, float]] = []
    trained_s, tokens, last_losses = 0.0, 0, [math.nan]

    def note(count: int) -> None:
        held_out = held_out_loss(model, text, count)
        training = sum(last_losses) / len(last_losses)
        curve.append(dict(seconds=trained_s, tokens=tokens, held_out=held_out, training=training))

    with progress(console, f"training {name}, seconds", total=math.ceil(seconds)) as step:
        note(2)
        for rows in batches(text.seen, 10**9, 0):
            start = time.perf_counter()
            for group in optimizer.param_groups:
                group["lr"] = rate_at(trained_s / seconds)
            loss = loss_of(model, rows)
            optimizer.zero_grad()
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            before, trained_s = trained_s, trained_s + time.perf_counter() - start
            tokens += BATCH * CONTEXT
            last_losses = [*last_losses[-19:], float(loss.detach())]
            for _ in range(math.floor(min(trained_s, seconds)) - math.floor(before)):
                step()
            if trained_s >= seconds:
                break
            if trained_s - curve[-1]["seconds"] >= seconds / 20:
                note(2)
        note(16)
    return curve


def write_both_ways(
    name: str, model: LanguageModel, text: Text, count: int
) -> tuple[str, dict[str, float]]:
    """What the model writes after a held-out prompt, which both ways have to agree on, and how
    fast each is."""
    prompt = text.held_out[:PROMPT]
    generator = torch.Generator().manual_seed(2)
    uniform = torch.rand((count, len(text.letters)), generator=generator)
    noise = -TEMPERATURE * torch.log(-torch.log(uniform))
    speeds, written, logits = {}, [], []
    for way in (True, False):
        start = time.perf_counter()
        tokens, rows = generate(model, prompt, noise, carried=way)
        speeds["steps" if way else "anew"] = count / (time.perf_counter() - start)
        written.append(text.written(tokens))
        logits.append(rows)
    difference = float((logits[0] - logits[1]).abs().max())
    if written[0] != written[1] or not difference <= LOGIT_BOUND:
        raise CheckFailed(
            f"{name}: steps from the carried state wrote {written[0]!r}, the whole text anew "
            f"{written[1]!r}; logits differ by {difference:.2g}, wanted the same text and at most "
            f"{LOGIT_BOUND:g}"
        )
    return written[0], speeds | {"logit_difference": difference}


def run(console: Console, folder: Path, quick: bool) -> None:
    torch.set_num_threads(onchip.get_num_threads())
    text = Text()
    entropy = text.unigram_entropy()
    seconds, count = (QUICK_SECONDS, QUICK_WRITTEN) if quick else (SECONDS, WRITTEN)
    results: list[dict[str, Any]] = []
    for name, mixer in MODELS.items():
        torch.manual_seed(0)
        model = LanguageModel(len(text.letters), mixer, PROMPT + count)
        curve = train(console, name, model, text, seconds)
        written, facts = write_both_ways(name, model, text, count)
        parameters = sum(x.numel() for x in model.parameters())
        results.append(dict(model=name, parameters=parameters, curve=curve, text=written, **facts))
    print_table(console, results, entropy)
    prompt = text.written(text.held_out[:PROMPT])
    for result in results:
        console.print(f"\n{result['model']} continues:", markup=False)
        console.print(f"{prompt}|{result['text']}", markup=False)

    made = {
        "what": "two language models of characters trained for the same time on the same text",
        "text": "pydoc_data.topics",
        "characters_seen": len(text.seen),
        "characters_held_out": len(text.held_out),
        "unigram_entropy": entropy,
        "seconds": seconds,
        "batch": BATCH,
        "context": CONTEXT,
        "torch": torch.__version__,
        "machine": record.machine(),
        **record.checkout(ROOT),
        "results": results,
    }
    record_path, plot_path = folder / "training_cpu.json", folder / "training_cpu.png"
    folder.mkdir(parents=True, exist_ok=True)
    record_path.write_text(json.dumps(made, indent=1) + "\n", encoding="utf-8")
    curves.draw(made, plot_path)
    console.print(f"\nPlot:   {plot_path}\nRecord: {record_path}", soft_wrap=True)
    check_learning(results, entropy, quick)


def print_table(console: Console, results: list[dict[str, Any]], entropy: float) -> None:
    table = Table(
        title=f"{results[0]['curve'][-1]['seconds']:.0f} s of training each",
        box=box.SIMPLE_HEAD,
        pad_edge=False,
        collapse_padding=True,
        caption="loss: held out, nats a character; frequencies alone would reach "
        f"{entropy:.2f}. written: characters a second by steps from the carried state, and by the "
        "whole text anew for each. difference: the largest between the logits of both.",
        caption_justify="left",
    )
    table.add_column("model", no_wrap=True)
    for heading in ("parameters", "trained on", "loss", "steps", "anew", "difference"):
        table.add_column(heading, justify="right", no_wrap=True)
    for result in results:
        last = result["curve"][-1]
        table.add_row(
            result["model"],
            f"{result['parameters']:,}",
            f"{last['tokens']:,.0f}",
            f"{last['held_out']:.3f}",
            f"{result['steps']:,.0f}/s",
            f"{result['anew']:,.0f}/s",
            f"{result['logit_difference']:.1g}",
        )
    console.print(table)


def check_learning(results: list[dict[str, Any]], entropy: float, quick: bool) -> None:
    """A model that learned knows more than frequencies; one that learned for seconds, something."""
    for result in results:
        first, last = (result["curve"][index]["held_out"] for index in (0, -1))
        wanted = first - 0.1 if quick else entropy - 0.2
        if not last < wanted:
            raise CheckFailed(
                f"{result['model']}: held-out loss {last:.3f}, wanted below {wanted:.3f}"
            )
