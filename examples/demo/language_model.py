"""A language model of characters: the same blocks around attention or around Gated DeltaNet."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

import onchip.torch

DIM = 128
NUM_HEADS = 4
NUM_BLOCKS = 2


@dataclass
class KeyValueCache:
    """Where attention's sequences stand: every key and value so far."""

    keys: Tensor
    values: Tensor
    length: Tensor


class CausalAttention(nn.Module):  # type: ignore[misc, unused-ignore]
    """Causal attention with ALiBi: scores fall linearly with distance, so that no position has to
    be learned."""

    def __init__(self, capacity: int) -> None:
        super().__init__()
        self.capacity = capacity
        self.qkv = nn.Linear(DIM, 3 * DIM, bias=False)
        self.out = nn.Linear(DIM, DIM, bias=False)
        slopes = 2.0 ** (-8 * torch.arange(1, NUM_HEADS + 1) / NUM_HEADS)
        self.register_buffer("slopes", slopes)

    def new_state(self, num_seqs: int) -> KeyValueCache:
        shape = (num_seqs, self.capacity, NUM_HEADS, DIM // NUM_HEADS)
        length = torch.zeros(num_seqs, dtype=torch.int32)
        return KeyValueCache(torch.zeros(shape), torch.zeros(shape), length)

    def forward(self, x: Tensor, state: KeyValueCache | None = None) -> Tensor:
        q, k, v = self.qkv(x).unflatten(-1, (3, NUM_HEADS, -1)).unbind(-3)
        options: dict[str, Any] = dict(causal=True, alibi_slopes=self.slopes)
        if state is None:
            o = onchip.torch.attention(q, k, v, **options)
        else:
            o = onchip.torch.attention_decode(
                q,
                state.keys,
                state.values,
                cache_seqlens=state.length,
                k_new=k,
                v_new=v,
                **options,
            )
            state.length += x.shape[1]
        assert isinstance(o, Tensor)
        y: Tensor = self.out(o.flatten(-2))
        return y


def gated_delta_net(_capacity: int) -> nn.Module:
    """It remembers in a state of one size, whatever the length."""
    return onchip.torch.nn.GatedDeltaNet(DIM, NUM_HEADS, head_dim=24)


class Block(nn.Module):  # type: ignore[misc, unused-ignore]
    def __init__(self, mixer: nn.Module) -> None:
        super().__init__()
        self.norm, self.mixer = nn.RMSNorm(DIM), mixer
        self.norm_mlp = nn.RMSNorm(DIM)
        self.mlp = nn.Sequential(nn.Linear(DIM, 4 * DIM), nn.GELU(), nn.Linear(4 * DIM, DIM))

    def forward(self, x: Tensor, state: Any = None) -> Tensor:
        x = x + self.mixer(self.norm(x), state=state)
        mixed: Tensor = x + self.mlp(self.norm_mlp(x))
        return mixed


class LanguageModel(nn.Module):  # type: ignore[misc, unused-ignore]
    """Logits of the next character at every position."""

    def __init__(self, vocabulary: int, mixer: Callable[[int], nn.Module], capacity: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, DIM)
        nn.init.normal_(self.embedding.weight, std=DIM**-0.5)
        self.blocks = nn.ModuleList(Block(mixer(capacity)) for _ in range(NUM_BLOCKS))
        self.norm = nn.RMSNorm(DIM)

    def new_state(self, num_seqs: int) -> list[Any]:
        return [block.mixer.new_state(num_seqs) for block in self.blocks]

    def forward(self, tokens: Tensor, states: list[Any] | None = None) -> Tensor:
        x = self.embedding(tokens)
        for index, block in enumerate(self.blocks):
            x = block(x, None if states is None else states[index])
        logits: Tensor = functional.linear(self.norm(x), self.embedding.weight)
        return logits


@torch.no_grad()  # type: ignore[untyped-decorator, unused-ignore]
def generate(
    model: LanguageModel, prompt: Tensor, noise: Tensor, *, carried: bool
) -> tuple[Tensor, Tensor]:
    """Characters after the prompt, one for each row of the noise, and the logits they were drawn
    from: by single steps from a carried state, or by the whole text anew for every character.

    The noise (Gumbel) decides which likely character comes, so that both ways draw alike.
    """
    text = prompt
    states = model.new_state(1) if carried else None
    rows, given = [], prompt
    for row in noise:
        logits = model(given[None], states)[0, -1]
        rows.append(logits)
        text = torch.cat([text, (logits + row).argmax()[None]])
        given = text[-1:] if carried else text
    return text[len(prompt) :], torch.stack(rows)
