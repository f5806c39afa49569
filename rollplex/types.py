"""The values that cross layers: typed, frozen, and free of torch.

    Image   one processed image                 made by data workers, read by the vision tower
    Prompt  one prompt, tokenized, with images  made by data, read by every phase
    Sample  one response to one prompt          made by the rollout, read by rewards and training

Arrays are numpy: they travel between processes, and a machine without torch can read them.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

FinishReason = Literal["stop", "length"]
Message = dict[str, Any]
"""One chat message, as Hugging Face chat templates take it: {"role": ..., "content": ...}."""


@dataclass(frozen=True, eq=False)
class Image:
    """One image, cut into patches as the family's image processor does.

    key: digest of what the vision tower sees (patches and grid); equal keys mean equal features.
    patches: float32 [t*h*w, patch_dim].
    grid: (t, h, w), in patches.
    """

    key: str
    patches: npt.NDArray[np.float32]
    grid: tuple[int, int, int]


@dataclass(frozen=True, eq=False)
class Prompt:
    """One prompt, tokenized, with every image placeholder already expanded.

    uid: unique within a run (epoch * rows + row): the prompt's key for sampling noise.
    ids: int64 [P + 1]; the prefix is ids[:-1], and ids[-1] begins every suffix.
    positions: int64 [3, P + 1], rotary positions (temporal, height, width).
    images: in the order of their placeholders.
    content: the prompt as reward functions see it: a string, or a list of chat messages.
    columns: the row's other columns, by name, passed to reward functions (media left out).
    source: "file, row N" for messages.
    """

    uid: int
    ids: npt.NDArray[np.int64]
    positions: npt.NDArray[np.int64]
    images: tuple[Image, ...]
    content: str | Sequence[Message]
    columns: Mapping[str, Any]
    source: str

    @property
    def prefix_length(self) -> int:
        """Tokens of the prefix, P: the prompt without its last token."""
        return len(self.ids) - 1


@dataclass(frozen=True, eq=False)
class Sample:
    """One sampled response. All arrays have the response's length n >= 1.

    group, sample: which prompt of the batch, and which of its responses.
    ids: int64 [n], the stop token included when there was one.
    raw_logprobs: float32 [n], log-probability under the model at temperature 1.
    tempered_logprobs: float32 [n], under the model at the rollout's temperature, before any filter: what training sees.
    sampling_logprobs: float32 [n], under the distribution sampled from (temperature, top-k, top-p, min-p, banned ids).
    text: the decoded response without special tokens.
    version: the policy version that produced it.
    decode_step: the decode step at which it finished; orders the groups (DESIGN: exactness).
    """

    group: int
    sample: int
    ids: npt.NDArray[np.int64]
    raw_logprobs: npt.NDArray[np.float32]
    tempered_logprobs: npt.NDArray[np.float32]
    sampling_logprobs: npt.NDArray[np.float32]
    finish_reason: FinishReason
    text: str
    version: int
    decode_step: int

    @property
    def length(self) -> int:
        """Response tokens, n."""
        return len(self.ids)
