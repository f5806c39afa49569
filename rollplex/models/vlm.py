"""A vision-language model: the decoder, the family's vision tower, and the family's few facts.

    encode   images            -> one feature tensor per image
    embed    token ids (+ features at image placeholders) -> decoder input

It does not know prompts, groups or losses. On a CPU the tower runs image by image, so that an image's features do not
depend on which other images it is computed with; on CUDA one pass takes many images, and their features may differ in
the last bits with the images beside them.

Legend: T tokens (in `_patches`, patches), H hidden, C values of a patch, F features of one image (merged patches), I
image placeholder tokens.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from rollplex.gpu.device import upload
from rollplex.models.decoder import Decoder, DecoderConfig
from rollplex.types import Image

MAX_PATCHES_OF_PASS = 2**16
"""Of the vision tower on CUDA: 16 images of 896 x 896 pixels fill the GPU, and their temporary values some 4 GB."""


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

    def run_vision(
        self, tower: nn.Module, patches_TC: Tensor, grids: Sequence[tuple[int, int, int]]
    ) -> tuple[Tensor, ...]:
        """Features [F, H] of each image, computed in one pass over all images' patches."""
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
            feature
            for together in self.vision_passes(images)
            for feature in self.family.run_vision(
                self.vision, self._patches(together), [image.grid for image in together]
            )
        )

    def vision_passes(self, images: Sequence[Image]) -> list[Sequence[Image]]:
        """The images in order, divided into those that `encode` computes together; decided by their sizes alone."""
        limit = 0 if self.device.type == "cpu" else MAX_PATCHES_OF_PASS
        passes: list[list[Image]] = []
        num_patches = 0
        for image in images:
            num_patches += len(image.patches)
            if not passes or num_patches > limit:
                passes.append([])
                num_patches = len(image.patches)
            passes[-1].append(image)
        return [*passes]

    def _patches(self, images: Sequence[Image]) -> Tensor:
        """Patches of all images [T, C]. To CUDA they go in the compute dtype, and the host does not wait for them."""
        lengths = [len(image.patches) for image in images]
        shape = sum(lengths), images[0].patches.shape[1]
        host_TC = torch.empty(shape, dtype=self.dtype, pin_memory=self.device.type == "cuda")
        for image, rows_TC in zip(images, host_TC.split(lengths), strict=True):
            rows_TC.copy_(torch.from_numpy(image.patches))
        return host_TC.to(self.device, non_blocking=True)

    def image_rows(self, ids_T: npt.NDArray[np.int64]) -> Tensor:
        """Places of image features among these tokens, int64 [I] on the device; the host finds them."""
        return upload(np.flatnonzero(ids_T == self.family.image_token_id), self.device)

    def embed(self, ids_T: Tensor, features: Sequence[Tensor] = (), rows_I: Tensor | None = None) -> Tensor:
        """Decoder input [T, H]: token embeddings, with image features, in order, at rows_I (`image_rows`)."""
        x_TH = F.embedding(ids_T, self.decoder.embedding, padding_idx=self.decoder.config.padding_id)
        if not features:
            return x_TH
        assert rows_I is not None, "features need their places"
        return x_TH.index_copy(0, rows_I, torch.cat(list(features)))
