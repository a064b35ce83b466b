"""A greedy decode loop over a paged cache: two prompts of different lengths that share a page.

A toy model of one attention layer with rotary embedding picks tokens; the same tokens come out when
every step recomputes attention over the whole sequence.

    python examples/decode_paged.py
"""

import numpy as np

import onchip

VOCABULARY, HEADS, HEADS_KV, DIM = 50, 4, 2, 32
PAGE_SIZE, STEPS = 16, 24


class Model:
    def __init__(self, rng):
        draw = lambda *shape: rng.standard_normal(shape, dtype=np.float32)  # noqa: E731
        self.embedding = draw(VOCABULARY, 64)
        self.to_q, self.to_k, self.to_v = (
            draw(64, heads, DIM) / 8 for heads in (HEADS, HEADS_KV, HEADS_KV)
        )
        self.to_logits = draw(HEADS * DIM, VOCABULARY)
        angles = np.arange(256)[:, None] * 100.0 ** -np.linspace(0, 1, DIM // 2)
        self.cos, self.sin = np.cos(angles).astype("f4"), np.sin(angles).astype("f4")

    def project(self, tokens):
        """[batch, seqlen] to q, k, v [batch, seqlen, heads, dim]."""
        x = self.embedding[tokens]
        return [np.einsum("bsc,chd->bshd", x, w) for w in (self.to_q, self.to_k, self.to_v)]

    def next_tokens(self, o):
        return (o[:, -1].reshape(len(o), -1) @ self.to_logits).argmax(axis=-1)


class Pages:
    """One pool of pages; a sequence takes a page when its last one is full."""

    def __init__(self, count, max_pages):
        shape = (count, PAGE_SIZE, HEADS_KV, DIM)
        self.k, self.v = np.zeros(shape, np.float32), np.zeros(shape, np.float32)
        self.free = list(range(count))
        self.table = np.full((2, max_pages), -1, np.int32)
        self.lengths = np.zeros(2, np.int32)

    def make_room(self, row, count):
        for page in range((self.lengths[row] + count - 1) // PAGE_SIZE + 1):
            if self.table[row, page] < 0:
                self.table[row, page] = self.free.pop()


def forward(model, pages, rows, tokens):
    """Appends the tokens' keys and values, attends to all before and among them."""
    q, k, v = model.project(tokens)
    for row in rows:
        pages.make_room(row, tokens.shape[1])
    o, _ = onchip.ops.attention_decode(
        q,
        pages.k,
        pages.v,
        cache_seqlens=pages.lengths[rows],
        page_table=pages.table[rows],
        k_new=k,
        v_new=v,
        rotary_cos=model.cos,
        rotary_sin=model.sin,
        causal=True,
    )
    pages.lengths[rows] += tokens.shape[1]
    return model.next_tokens(o)


def whole(model, tokens):
    """The next token by one call over everything: a cache that is used once."""
    q, k, v = model.project(np.asarray([tokens]))
    empty = np.zeros((1, len(tokens), HEADS_KV, DIM), np.float32)
    o, _ = onchip.ops.attention_decode(
        q,
        empty,
        empty.copy(),
        cache_seqlens=[0],
        k_new=k,
        v_new=v,
        rotary_cos=model.cos,
        rotary_sin=model.sin,
        causal=True,
    )
    return int(model.next_tokens(o)[0])


def main():
    rng = np.random.default_rng(3)
    model = Model(rng)
    pages = Pages(count=12, max_pages=6)
    common = rng.integers(0, VOCABULARY, PAGE_SIZE)
    prompts = [np.concatenate([common, rng.integers(0, VOCABULARY, length)]) for length in (5, 11)]

    # The common beginning fills one page, which both sequences then read.
    forward(model, pages, [0], common[None])
    pages.table[1, 0], pages.lengths[1] = pages.table[0, 0], PAGE_SIZE
    tokens = [
        int(forward(model, pages, [row], prompt[None, PAGE_SIZE:])[0])
        for row, prompt in enumerate(prompts)
    ]

    generated = [list(prompt) for prompt in prompts]
    for _ in range(STEPS):
        for row, token in enumerate(tokens):
            assert token == whole(model, generated[row])
            generated[row].append(token)
        tokens = forward(model, pages, [0, 1], np.array(tokens)[:, None]).tolist()

    for row, prompt in enumerate(prompts):
        text = " ".join(str(token) for token in generated[row][len(prompt) :][:12])
        print(f"sequence {row}: prompt of {len(prompt)}, {STEPS} tokens: {text} ..")
    print(f"{12 - len(pages.free)} of 12 pages in use, lengths {pages.lengths.tolist()}")


if __name__ == "__main__":
    main()
