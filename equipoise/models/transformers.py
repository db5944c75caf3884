"""Causal transformers for text: several blocks, or one block in equilibrium."""

from typing import Annotated, ClassVar

import torch.nn.functional as F
from pydantic import Field
from torch import Tensor, nn

from equipoise.errors import EquipoiseError
from equipoise.models.base import BodyAndHead, ModelSettings
from equipoise.models.fedeq import FedeqModel
from equipoise.settings import Count, Depth


class _Block(nn.Module):
    """A pre-norm transformer block: causal attention, then a small network at every position."""

    def __init__(self, width: int, heads: int):
        super().__init__()
        self.heads = heads
        self.before_attention, self.before_network = nn.LayerNorm(width), nn.LayerNorm(width)
        self.query_key_value, self.mix = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.widen, self.narrow = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self._attention(self.before_attention(x))
        out: Tensor = x + self.narrow(F.gelu(self.widen(self.before_network(x))))
        return out

    def _attention(self, x: Tensor) -> Tensor:
        parts = self.query_key_value(x).unflatten(-1, (3, self.heads, -1))  # (n, T, 3, heads, width of a head)
        query, key, value = parts.permute(2, 0, 3, 1, 4)
        attended = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        mixed: Tensor = self.mix(attended.transpose(1, 2).flatten(2))
        return mixed


class _Embedding(nn.Module):
    """Characters and their positions as vectors."""

    def __init__(self, length: int, vocabulary: int, width: int):
        super().__init__()
        self.characters, self.positions = nn.Embedding(vocabulary, width), nn.Embedding(length, width)
        for embedding in (self.characters, self.positions):
            nn.init.normal_(embedding.weight, std=0.1)  # with torch's 1.0, plain SGD makes slow progress

    def forward(self, x: Tensor) -> Tensor:
        if x.is_floating_point():
            raise EquipoiseError(f"the transformer reads characters as whole numbers, not {x.dtype}")
        if x.shape[-1] > self.positions.num_embeddings:
            raise EquipoiseError(
                f"the transformer reads at most {self.positions.num_embeddings} characters, not {x.shape[-1]}"
            )
        start: Tensor = self.characters(x.long()) + self.positions.weight[: x.shape[-1]]
        return start


class _TransformerSettings(ModelSettings):
    """Common settings of the transformers."""

    width: Count = 64
    "length of the vector of a character; a multiple of heads"
    heads: Count = 4
    "number of attention heads"

    def embedding(self, name: str, shape: tuple[int, ...], outputs: int) -> _Embedding:
        """Return the embedding of the characters.

        Args:
            name: the name of the model.
            shape: the shape of a sample.
            outputs: the number of characters in the vocabulary.
        """
        if self.width % self.heads:
            raise EquipoiseError(
                f"model.width = {self.width} is not a multiple of model.heads = {self.heads}; heads share it equally"
            )
        if len(shape) != 1:
            raise EquipoiseError(f"model.name = {name!r} needs rows of characters; these samples have shape {shape}")
        return _Embedding(shape[0], outputs, self.width)

    def personal_block(self, outputs: int) -> nn.Module:
        """Return the head of FeDEQ's text models: a block and a linear layer."""
        return nn.Sequential(_Block(self.width, self.heads), nn.LayerNorm(self.width), nn.Linear(self.width, outputs))


class Transformer(_TransformerSettings):
    """A causal transformer for characters: at every position the head predicts the next one."""

    paper: ClassVar[str] = "Vaswani et al., 2017"

    layers: Depth = 2
    "number of blocks"

    def build(self, shape: tuple[int, ...], outputs: int) -> nn.Module:
        embedding = self.embedding("transformer", shape, outputs)
        blocks = [_Block(self.width, self.heads) for _ in range(self.layers)]
        body = nn.Sequential(embedding, *blocks, nn.LayerNorm(self.width))
        return BodyAndHead(body, nn.Linear(self.width, outputs))


class Transformer8(_TransformerSettings):
    """A causal transformer of eight blocks, the last of which belongs to the head."""

    paper: ClassVar[str] = "FeDEQ's Transformer-8, the explicit counterpart of its DEQ-Transformer"

    layers: Annotated[int, Field(ge=2, le=1000)] = 8
    "number of blocks, including the one that belongs to the head"

    def build(self, shape: tuple[int, ...], outputs: int) -> nn.Module:
        embedding = self.embedding("transformer-8", shape, outputs)
        blocks = [_Block(self.width, self.heads) for _ in range(self.layers - 1)]
        return BodyAndHead(nn.Sequential(embedding, *blocks), self.personal_block(outputs))


class _UniversalBlock(nn.Module):
    """f(z, x): a block with normalised output that gets the text x in every iteration (Dehghani et al., 2019)."""

    def __init__(self, width: int, heads: int):
        super().__init__()
        self.block = _Block(width, heads)
        self.after = nn.LayerNorm(width)
        for layer in (self.block.mix, self.block.narrow):  # so small that f is a contraction at first
            nn.init.normal_(layer.weight, std=0.01)

    def forward(self, z: Tensor, x: Tensor) -> Tensor:
        out: Tensor = self.after(self.block(z + x))
        return out


class DeqTransformer(_TransformerSettings, FedeqModel):
    """A causal transformer whose only shared block is in equilibrium; a second block belongs to the head."""

    paper: ClassVar[str] = "FeDEQ's DEQ-Transformer: an equilibrium universal-transformer block, 4 heads, width 64"

    def build(self, shape: tuple[int, ...], outputs: int) -> nn.Module:
        embedding = self.embedding("deq-transformer", shape, outputs)
        # If x is as long as z, every iteration of z ← norm(z + x) halves the error.
        equilibrium = self.equilibrium(_UniversalBlock(self.width, self.heads))
        body = nn.Sequential(embedding, nn.LayerNorm(self.width), equilibrium)
        return BodyAndHead(body, self.personal_block(outputs))
