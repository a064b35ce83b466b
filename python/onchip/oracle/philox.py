"""Philox4x32-10 and the dropout mask read out of it.

Source: Salmon, Moraes, Dror, Shaw, "Parallel Random Numbers: As Easy as 1, 2, 3", SC11; the layout
of the mask is section 2 of docs/semantics.md.
"""

import numpy as np

_MULTIPLIERS = (np.uint64(0xD2511F53), np.uint64(0xCD9E8D57))
_WEYL = (np.uint64(0x9E3779B9), np.uint64(0xBB67AE85))
_LOW = np.uint64(0xFFFFFFFF)
_WORD_BITS = np.uint64(32)


def philox4x32_10(counter, key):
    """Four output words (uint32 arrays) for four counter words and two key words, all broadcast."""
    c0, c1, c2, c3 = (np.asarray(word, np.uint64) for word in counter)
    k0, k1 = (np.asarray(word, np.uint64) for word in key)
    for _ in range(10):
        product0 = _MULTIPLIERS[0] * c0
        product1 = _MULTIPLIERS[1] * c2
        c0, c1, c2, c3 = (
            (product1 >> _WORD_BITS) ^ c1 ^ k0,
            product1 & _LOW,
            (product0 >> _WORD_BITS) ^ c3 ^ k1,
            product0 & _LOW,
        )
        k0 = (k0 + _WEYL[0]) & _LOW
        k1 = (k1 + _WEYL[1]) & _LOW
    return tuple(word.astype(np.uint32) for word in np.broadcast_arrays(c0, c1, c2, c3))


def dropout_threshold(p):
    """t: a field below it is dropped; kept entries are scaled by 65536 / (65536 - t)."""
    return int(np.floor(65536.0 * p + 0.5))


def dropout_keep(p, rng, sequence, num_heads_q, seqlen_q, seqlen_kv):
    """Boolean [num_heads_q, seqlen_q, seqlen_kv]: True where the probability is kept."""
    seed, offset = (int(value) for value in np.asarray(rng))
    seed &= 0xFFFFFFFFFFFFFFFF
    h = np.arange(num_heads_q)[:, None, None]
    i = np.arange(seqlen_q)[None, :, None]
    j = np.arange(seqlen_kv)[None, None, :]
    counter = (
        offset,
        sequence * num_heads_q + h,
        8 * (i // 16) + i % 8,
        4 * (j // 16) + (j % 8) // 2,
    )
    words = philox4x32_10(counter, (seed & 0xFFFFFFFF, seed >> 32))
    fields = np.stack([half for word in words for half in (word & 0xFFFF, word >> 16)])
    field = 4 * (i // 8 % 2) + 2 * (j // 8 % 2) + j % 2
    drawn = np.take_along_axis(fields, np.broadcast_to(field, fields.shape[1:])[None], axis=0)[0]
    return drawn >= dropout_threshold(p)
