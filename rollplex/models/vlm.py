"""A vision-language model: the decoder, the family's vision tower, and the family's few facts.

    encode   images            -> one feature tensor per image
    embed    token ids (+ features at image placeholders) -> decoder input

It does not know prompts, groups or losses. The tower is the one of transformers; it runs image by image, so that an
image's features do not depend on which other images it is computed with.

Legend: T tokens, H hidden, F features of one image (merged patches), I image placeholder tokens.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from rollplex.models.decoder import Decoder, DecoderConfig
from rollplex.types import Image


class Family(Protocol):
    """What differs between model families; `models/qwen_vl.py` is one."""

    @property
    def decoder_config(self) -> DecoderConfig: ...

    @property
    def image_token_id(self) -> int: ...

    @property
    def placeholder_ids(self) -> tuple[int, ...]:
        """Ids that stand for media or enclose it: never sampled."""
        ...

    def build_vision(self) -> nn.Module:
        """The vision tower, on the current default device."""
        ...

    def run_vision(self, tower: nn.Module, patches: Tensor, grid_13: Tensor) -> Tensor:
        """Features [F, H] of one image."""
        ...


@dataclass(eq=False)
class Encoded:
    """Images as the decoder sees them: features in placeholder order, and the images they came from."""

    images: tuple[Image, ...]
    features: tuple[Tensor, ...]


class VisionLanguageModel(nn.Module):
    """Weights of one model, and their version: the number of updates they have seen."""

    def __init__(self, family: Family) -> None:
        super().__init__()
        self.family = family
        self.decoder = Decoder(family.decoder_config)
        self.vision = family.build_vision()
        self.version = 0

    @property
    def device(self) -> torch.device:
        return self.decoder.embedding.device

    @property
    def dtype(self) -> torch.dtype:
        return self.decoder.embedding.dtype

    def trained_parameters(self, train_vision: bool) -> Iterator[tuple[str, nn.Parameter]]:
        """(name, parameter) of what an update changes, in a fixed order."""
        yield from ((f"decoder.{name}", parameter) for name, parameter in self.decoder.named_parameters())
        if train_vision:
            yield from ((f"vision.{name}", parameter) for name, parameter in self.vision.named_parameters())

    def encode(self, images: Sequence[Image]) -> tuple[Tensor, ...]:
        """Features of each image [F, H], in the compute dtype. Differentiable when gradients are enabled."""
        return tuple(
            self.family.run_vision(
                self.vision, torch.from_numpy(image.patches).to(self.device, self.dtype), torch.tensor([image.grid])
            )
            for image in images
        )

    def embed(self, ids_T: Tensor, features: Sequence[Tensor] = ()) -> Tensor:
        """Decoder input [T, H]: token embeddings, with image features at the placeholders, in order."""
        x_TH = F.embedding(ids_T, self.decoder.embedding, padding_idx=self.decoder.config.padding_id)
        if not features:
            return x_TH
        rows_I = (ids_T == self.family.image_token_id).nonzero().squeeze(1)
        return x_TH.index_copy(0, rows_I, torch.cat(list(features)))
