"""Each distinct image and each prompt of a step, computed once per model, and several of them in one pass.

    images of one group         one pass of the vision tower   (an image belongs to the first group that has it)
    prefixes of some neighbours one pass of the decoder        (as many as fit into a budget of tokens)

What is computed together follows from the batch alone, never from who asks first: a GPU's matrix products may differ in
their last bits when they have other rows. This file knows no phase; whoever asks for one member of a pass computes all
of it, and the others find theirs done.
"""

from collections.abc import Collection, Generator, Sequence

from torch import Tensor

from rollplex.models.prefix import PrefixState
from rollplex.models.vlm import Encoded
from rollplex.trace import Trace
from rollplex.train.policy import Scorer
from rollplex.types import Image, Prompt


class PromptPasses:
    """The vision and prefix passes over one batch of prompts.

    max_tokens: prefix tokens of one pass; a longer prefix is alone. 0: every prefix is alone.
    """

    def __init__(self, prompts: Sequence[Prompt], max_tokens: int, trace: Trace) -> None:
        self._prompts, self._trace = prompts, trace
        self._packs = pack_neighbours([prompt.prefix_length for prompt in prompts], max_tokens)
        self._images_with: dict[str, list[Image]] = {}
        for prompt in prompts:
            new = {image.key: image for image in prompt.images if image.key not in self._images_with}
            together = list(new.values())
            self._images_with.update((key, together) for key in new)
        self._features: dict[tuple[tuple[int, int], str], Tensor] = {}
        self._states: dict[tuple[Scorer, int], PrefixState] = {}

    def encode(self, scorer: Scorer, group: int) -> Encoded:
        """Features of a prompt's images; what they are a function of is the scorer's vision_key."""
        images, tower = self._prompts[group].images, scorer.vision_key
        for image in images:
            if (tower, image.key) not in self._features:
                together = self._images_with[image.key]
                self._trace.count("tokens.vision", sum(len(each.patches) for each in together))
                features = scorer.encode(together)
                self._features.update(zip([(tower, each.key) for each in together], features, strict=True))
        return Encoded(images, tuple(self._features[tower, image.key] for image in images))

    def prefix(
        self, scorer: Scorer, group: int, among: Collection[int], *, for_training: bool = False
    ) -> Generator[None, None, PrefixState]:
        """A prompt's prefix, handed out once. among: groups whose prefixes are wanted in the same way."""
        if (scorer, group) not in self._states:
            pack = [index for index in next(pack for pack in self._packs if group in pack) if index in among]
            prompts = [self._prompts[index] for index in pack]
            self._trace.count("tokens.prefix", sum(prompt.prefix_length for prompt in prompts))
            encoded = [self.encode(scorer, index) for index in pack]
            states = yield from scorer.prefixes(prompts, encoded, for_training=for_training)
            self._states.update(zip([(scorer, index) for index in pack], states, strict=True))
        return self._states.pop((scorer, group))

    def release(self) -> None:
        """Drop all features: nothing of this batch is computed any more."""
        self._features.clear()


def pack_neighbours(lengths: Sequence[int], max_tokens: int) -> list[range]:
    """Divide prompts, in their order, into runs of at most max_tokens; a longer one is alone."""
    packs: list[range] = []
    start, total = 0, 0
    for index, length in enumerate(lengths):
        if index > start and total + length > max_tokens:
            packs.append(range(start, index))
            start, total = index, 0
        total += length
    return [*packs, range(start, len(lengths))]
