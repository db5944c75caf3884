"""A small causal transformer for text."""

from typing import ClassVar

import torch.nn.functional as F
from torch import Tensor, nn

from equipoise.errors import EquipoiseError
from equipoise.models.base import ModelSettings, Split
from equipoise.settings import Count


class _Block(nn.Module):
    """Attention to what came before, then a small network at every position; both add to what is there (pre-norm)."""

    def __init__(self, width: int, heads: int):
        super().__init__()
        self.heads = heads
        self.before_attention, self.before_network = nn.LayerNorm(width), nn.LayerNorm(width)
        self.query_key_value, self.mix = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.network = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x: Tensor) -> Tensor:
        x = x + self._attention(self.before_attention(x))
        out: Tensor = x + self.network(self.before_network(x))
        return out

    def _attention(self, x: Tensor) -> Tensor:
        parts = self.query_key_value(x).unflatten(-1, (3, self.heads, -1))  # (n, T, 3, heads, width of a head)
        query, key, value = parts.permute(2, 0, 3, 1, 4)
        attended = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        mixed: Tensor = self.mix(attended.transpose(1, 2).flatten(2))
        return mixed


class _Reader(nn.Module):
    """Features at every position, made from the characters up to there."""

    def __init__(self, length: int, vocabulary: int, width: int, heads: int, layers: int):
        super().__init__()
        self.characters, self.positions = nn.Embedding(vocabulary, width), nn.Embedding(length, width)
        for embedding in (self.characters, self.positions):
            nn.init.normal_(embedding.weight, std=0.1)  # from torch's 1.0, plain SGD takes long to get anywhere
        self.blocks = nn.Sequential(*(_Block(width, heads) for _ in range(layers)))
        self.last_norm = nn.LayerNorm(width)

    def forward(self, x: Tensor) -> Tensor:
        if x.is_floating_point():
            raise EquipoiseError(f"the transformer reads characters as whole numbers, and these are {x.dtype}")
        if x.shape[-1] > self.positions.num_embeddings:
            raise EquipoiseError(
                f"the transformer reads at most {self.positions.num_embeddings} characters, and these are {x.shape[-1]}"
            )
        start = self.characters(x.long()) + self.positions.weight[: x.shape[-1]]
        features: Tensor = self.last_norm(self.blocks(start))
        return features


class Transformer(ModelSettings):
    """A causal transformer for characters: at every position the head predicts the next one."""

    paper: ClassVar[str] = "Vaswani et al., 2017; with heads = 4, width = 64 and layers = 8 like FeDEQ's peers"

    width: Count = 64
    "numbers that stand for a character; a multiple of heads"
    heads: Count = 4
    "heads of the attention"
    layers: Count = 2
    "blocks of attention and a network on top of each other"

    def build(self, shape: tuple[int, ...], outputs: int) -> nn.Module:
        if self.width % self.heads:
            raise EquipoiseError(
                f"model.width = {self.width} is not a multiple of model.heads = {self.heads}; each head takes its share"
            )
        if len(shape) != 1:
            raise EquipoiseError(
                f"model.name = 'transformer' needs rows of characters; these samples have shape {shape}"
            )
        body = _Reader(shape[0], outputs, self.width, self.heads, self.layers)
        return Split(body, nn.Linear(self.width, outputs))
