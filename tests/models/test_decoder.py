"""The decoder and its attentions against transformers and plain autograd, on tiny random models in float32."""

from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from rollplex.errors import StaleStateError
from rollplex.models.attention import PrefixAttention, SuffixAttention
from rollplex.models.kernels.flash import (
    Segments,
    flash_backward,
    flash_forward,
    merge,
    plain_backward,
    plain_forward,
)
from rollplex.models.load import named_hf_tensors, to_transformers
from rollplex.models.prefix import PrefixState, prefix_backward, prefix_forward
from rollplex.models.qwen_vl import QwenVL
from rollplex.models.vlm import Encoded, VisionLanguageModel
from rollplex.testing import FIRST_SPECIAL_ID, canned_prompts, hf_inputs, tiny_config, tiny_model
from rollplex.types import Prompt

T = TypeVar("T")

LOGIT_TOLERANCE = 1e-4
GRADIENT_TOLERANCE = 1e-5
BF16_LOGIT_TOLERANCE = 0.03
"""Relative, root mean square: a few bfloat16 roundings (2^-8 each) per layer."""
KERNEL_TOLERANCE = 1e-4
RESPONSE_LENGTHS = (5, 1, 9, 3)

SHAPES = [
    pytest.param({"num_heads": 4, "num_kv_heads": 4, "head_dim": 16, "tie": False}, id="gqa1-d16-untied"),
    pytest.param({"num_heads": 4, "num_kv_heads": 2, "head_dim": 32, "tie": True}, id="gqa2-d32-tied"),
    pytest.param({"num_heads": 4, "num_kv_heads": 1, "head_dim": 64, "intermediate_size": 36}, id="gqa4-d64-4slots"),
    pytest.param({"num_heads": 2, "num_kv_heads": 1, "tie": True, "intermediate_size": 33}, id="gqa2-d16-1slot"),
]


@dataclass(frozen=True)
class Group:
    """One prompt and its responses."""

    prompt: Prompt
    responses: tuple[np.ndarray[Any, np.dtype[np.int64]], ...]


def finish(steps: Generator[None, None, T]) -> T:
    while True:
        try:
            next(steps)
        except StopIteration as stop:
            return stop.value  # type: ignore[no-any-return]


def make_group(prompt: Prompt, lengths: Sequence[int] = RESPONSE_LENGTHS, seed: int = 0) -> Group:
    rng = np.random.default_rng(seed)
    return Group(prompt, tuple(rng.integers(0, FIRST_SPECIAL_ID, length) for length in lengths))


def encode(model: VisionLanguageModel, prompt: Prompt) -> Encoded:
    with torch.no_grad():
        return Encoded(prompt.images, model.encode(prompt.images))


def whole_sequence_logits(model: VisionLanguageModel, prompt: Prompt, response: Sequence[int] | Any) -> Tensor:
    """Our model on one whole sequence, as a prefix is computed: causal attention, no cache."""
    inputs = hf_inputs(prompt, response)
    x_TH = model.embed(
        inputs["input_ids"][0], model.encode(prompt.images), model.image_rows(inputs["input_ids"][0].numpy())
    )
    attention = PrefixAttention(lambda layer, k, v: None)
    rope = model.decoder.rope(inputs["position_ids"][:, 0])
    hidden_TH: Tensor = model.decoder(x_TH, rope, attention)
    return hidden_TH @ model.decoder.head.t()


def suffix_hidden(model: VisionLanguageModel, state: PrefixState, group: Group) -> Tensor:
    """Hidden states of all suffixes of a group, packed."""
    ids, positions, lengths = [], [], []
    for response in group.responses:
        ids.append(np.concatenate([group.prompt.ids[-1:], response]))
        lengths.append(len(ids[-1]))
        positions.append(int(group.prompt.positions[0, -1]) + np.arange(lengths[-1]))
    x_TH = model.embed(torch.from_numpy(np.concatenate(ids)))
    positions_3T = torch.from_numpy(np.concatenate(positions)).expand(3, -1)
    prefixes = [(state.require(model.version), sum(lengths))]
    attention = SuffixAttention(prefixes, Segments(tuple(lengths), model.device))
    hidden_TH: Tensor = model.decoder(x_TH, model.decoder.rope(positions_3T), attention)
    return hidden_TH


def loss_of(logits: Tensor, targets: Tensor, weight: float) -> Tensor:
    return -weight * torch.log_softmax(logits.float(), -1).gather(1, targets[:, None]).sum()


def prefix_once_backward(model: VisionLanguageModel, group: Group, train_vision: bool = True) -> None:
    """The group's gradient with its prefix computed once; each response has its own weight in the loss."""
    state = finish(prefix_forward(model, [group.prompt], [encode(model, group.prompt)], for_training=True))[0]
    for first in range(0, len(group.responses), 2):  # microbatches add to the same prefix gradients
        part = Group(group.prompt, group.responses[first : first + 2])
        hidden = suffix_hidden(model, state, part).split([len(response) + 1 for response in part.responses])
        loss = sum(
            loss_of(rows[:-1] @ model.decoder.head.t(), torch.from_numpy(response), 1.0 + first + index)
            for index, (rows, response) in enumerate(zip(hidden, part.responses, strict=True))
        )
        assert isinstance(loss, Tensor)
        loss.backward()
    finish(prefix_backward(model, state, train_vision=train_vision))


def reference_backward(twin: Any, group: Group) -> None:
    """The same gradient by plain autograd of transformers on every full sequence by itself."""
    for index, response in enumerate(group.responses):
        logits = twin(**hf_inputs(group.prompt, response), use_cache=False).logits[0]
        rows = logits[len(group.prompt.ids) - 1 : -1]
        loss_of(rows, torch.from_numpy(response), 1.0 + index).backward()


def relative_error(actual: Tensor, expected: Tensor) -> float:
    return float((actual - expected).detach().norm() / expected.detach().norm())


@pytest.mark.parametrize("shape", SHAPES)
def test_whole_sequences_match_transformers(shape: dict[str, Any]) -> None:
    config = tiny_config(**shape)
    model = tiny_model(config)
    twin = to_transformers(model)
    for prompt in canned_prompts(config, (0, 1, 2, 3)):
        response = make_group(prompt).responses[0]
        with torch.no_grad():
            expected = twin(**hf_inputs(prompt, response)).logits[0]
            actual = whole_sequence_logits(model, prompt, response)
        assert expected.std() > 0.3, "the comparison needs logits that differ"
        assert (actual - expected).abs().max() <= LOGIT_TOLERANCE


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("num_images", [0, 2])
def test_packed_suffixes_over_a_prefix_match_whole_sequences(shape: dict[str, Any], num_images: int) -> None:
    config = tiny_config(**shape)
    model = tiny_model(config, seed=3)
    group = make_group(canned_prompts(config, (num_images,))[0])
    with torch.no_grad():
        state = finish(prefix_forward(model, [group.prompt], [encode(model, group.prompt)], for_training=False))[0]
        parts = suffix_hidden(model, state, group).split([len(response) + 1 for response in group.responses])
        for part, response in zip(parts, group.responses, strict=True):
            expected = whole_sequence_logits(model, group.prompt, response)[len(group.prompt.ids) - 1 :]
            assert (part @ model.decoder.head.t() - expected).abs().max() <= LOGIT_TOLERANCE
    assert not state.inputs
    assert state.kv.grad_k_LPKD is None


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("num_images", [0, 1, 2])
def test_the_gradient_of_prefix_once_is_that_of_whole_sequences(shape: dict[str, Any], num_images: int) -> None:
    config = tiny_config(**shape)
    assert_gradients_agree(tiny_model(config, seed=5), make_group(canned_prompts(config, (num_images,))[0]))


def test_the_gradient_of_a_one_token_prompt() -> None:
    config = tiny_config()
    prompt = canned_prompts(config, (0,), text_tokens=(1,))[0]
    assert prompt.prefix_length == 0
    assert_gradients_agree(tiny_model(config), make_group(prompt))


def test_a_group_of_one_with_one_token() -> None:
    config = tiny_config(tie=True)
    assert_gradients_agree(tiny_model(config), make_group(canned_prompts(config, (1,))[0], lengths=(1,)))


def test_gradients_of_several_groups_add_up() -> None:
    config = tiny_config()
    groups = [make_group(prompt, seed=prompt.uid) for prompt in canned_prompts(config, (2, 0, 1))]
    assert_gradients_agree(tiny_model(config), *groups)


@pytest.mark.parametrize("tie", [False, True])
def test_padding_ids_in_the_text_are_not_trained_as_transformers_does_not(tie: bool) -> None:
    config = tiny_config(tie=tie)
    model = tiny_model(config)
    padding = model.decoder.config.padding_id
    assert padding is not None
    group = make_group(canned_prompts(config, (1,))[0])
    group.prompt.ids[1] = group.prompt.ids[-1] = group.responses[0][2] = padding
    assert_gradients_agree(model, group)
    assert model.decoder.embedding.grad is not None
    assert bool(model.decoder.embedding.grad[padding].any()) == tie, "a tied head is trained there all the same"


def assert_gradients_agree(model: VisionLanguageModel, *groups: Group) -> None:
    twin = to_transformers(model)
    for group in groups:
        prefix_once_backward(model, group)
        reference_backward(twin, group)
    assert isinstance(model.family, QwenVL)
    expected = {name: parameter.grad for name, parameter in twin.named_parameters()}
    errors, compared = {}, set()
    for name, parameter in model.trained_parameters(train_vision=True):
        has_images = any(group.prompt.images for group in groups)
        if name.startswith("vision.") and not has_images:
            assert parameter.grad is None
            continue
        assert parameter.grad is not None, name
        for hf_name, gradient in model.family.unpack(name, parameter.grad):
            module_name = model.family.module_name(hf_name)
            reference = expected[module_name]
            assert reference is not None
            compared.add(module_name)
            errors[hf_name] = relative_error(gradient, reference)
    assert compared == {name for name, gradient in expected.items() if gradient is not None}
    assert max(errors.values()) <= GRADIENT_TOLERANCE, max(errors.items(), key=lambda item: item[1])


def test_a_frozen_vision_tower_gets_no_gradient_and_changes_no_other() -> None:
    config = tiny_config()
    trained, frozen = tiny_model(config), tiny_model(config)
    group = make_group(canned_prompts(config, (2,))[0])
    prefix_once_backward(trained, group)
    prefix_once_backward(frozen, group, train_vision=False)
    assert all(parameter.grad is None for parameter in frozen.vision.parameters())
    for (name, a), (_, b) in zip(trained.decoder.named_parameters(), frozen.decoder.named_parameters(), strict=True):
        assert a.grad is not None
        assert b.grad is not None
        assert torch.equal(a.grad, b.grad), name


def test_a_prefix_of_another_version_is_refused() -> None:
    config = tiny_config()
    model = tiny_model(config)
    prompt = canned_prompts(config, (0,))[0]
    state = finish(prefix_forward(model, [prompt], [encode(model, prompt)], for_training=True))[0]
    model.version += 1
    with pytest.raises(StaleStateError, match="version 0 was used at version 1"):
        state.require(model.version)
    with pytest.raises(StaleStateError):
        finish(prefix_backward(model, state, train_vision=False))


def test_bfloat16_stays_close_to_float32() -> None:
    config = tiny_config(tie=True)
    model = tiny_model(config, dtype=torch.bfloat16)
    wide = to_transformers(model).float()
    group = make_group(canned_prompts(config, (2,))[0])
    with torch.no_grad():
        state = finish(prefix_forward(model, [group.prompt], [encode(model, group.prompt)], for_training=False))[0]
        hidden = suffix_hidden(model, state, Group(group.prompt, group.responses[:1]))
        expected = wide(**hf_inputs(group.prompt, group.responses[0])).logits[0, len(group.prompt.ids) - 1 :]
    assert hidden.dtype == torch.bfloat16
    assert relative_error((hidden @ model.decoder.head.t()).float(), expected) <= BF16_LOGIT_TOLERANCE


def test_every_weight_matters_to_the_logits() -> None:
    """What makes the comparisons above mean something: no tensor could be swapped or lost unnoticed."""
    config = tiny_config()
    model = tiny_model(config)
    prompt = canned_prompts(config, (1,))[0]
    names = [name for name, _ in named_hf_tensors(model)]
    assert len(names) == len(set(names))
    logits = whole_sequence_logits(model, prompt, [1, 2, 3])
    logits.square().sum().backward()
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None, name
        assert parameter.grad.abs().max() > 0, name


# --- kernels -------------------------------------------------------------------------------------------------------


def random_qkv(
    lengths: Sequence[int], heads: int, kv_heads: int, dim: int, seed: int, keys: int | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    num_queries = sum(lengths)
    num_keys = num_queries if keys is None else keys
    return (
        torch.randn(num_queries, heads, dim, generator=generator),
        torch.randn(num_keys, kv_heads, dim, generator=generator),
        torch.randn(num_keys, kv_heads, dim, generator=generator),
    )


def segment_by_segment(
    function: Callable[..., tuple[Tensor, ...]], lengths: Sequence[int], tensors: Sequence[Tensor], dims: Sequence[int]
) -> list[Tensor]:
    """Apply a plain kernel to each segment; dims says along which dimension each result is packed."""
    pieces = zip(*(tensor.split(list(lengths)) for tensor in tensors), strict=True)
    parts = [function(*piece) for piece in pieces]
    return [torch.cat(part, dim=dim) for part, dim in zip(zip(*parts, strict=True), dims, strict=True)]


shapes = st.tuples(st.sampled_from([(4, 4), (4, 2), (4, 1), (7, 1)]), st.sampled_from([16, 32, 64]))


@settings(max_examples=25)
@given(lengths=st.lists(st.integers(1, 70), min_size=1, max_size=4), shape=shapes, seed=st.integers(0, 99))
def test_causal_packed_flash_equals_plain(lengths: list[int], shape: tuple[tuple[int, int], int], seed: int) -> None:
    (heads, kv_heads), dim = shape
    q, k, v = random_qkv(lengths, heads, kv_heads, dim, seed)
    segments = Segments(tuple(lengths), q.device)
    o, lse = flash_forward(q, k, v, causal=True, segments=segments)
    plain_o, plain_lse = segment_by_segment(
        lambda q, k, v: plain_forward(q, k, v, causal=True), lengths, (q, k, v), (0, 1)
    )
    torch.testing.assert_close(o, plain_o, atol=KERNEL_TOLERANCE, rtol=0)
    torch.testing.assert_close(lse, plain_lse, atol=KERNEL_TOLERANCE, rtol=0)
    grad = torch.randn(o.shape, generator=torch.Generator().manual_seed(seed + 1))
    actual = flash_backward(grad, q, k, v, o, lse, causal=True, segments=segments)
    expected = segment_by_segment(
        lambda g, q, k, v, o, lse: plain_backward(g, q, k, v, o, lse.t(), True),
        lengths, (grad, q, k, v, plain_o, plain_lse.t()), (0, 0, 0),
    )  # fmt: skip
    for a, b in zip(actual, expected, strict=True):
        torch.testing.assert_close(a, b, atol=KERNEL_TOLERANCE, rtol=KERNEL_TOLERANCE)


@settings(max_examples=25)
@given(
    num_queries=st.integers(1, 40),
    num_prefix=st.integers(1, 90),
    num_own=st.integers(1, 40),
    shape=shapes,
    seed=st.integers(0, 99),
)
def test_merged_parts_and_their_gradients_are_those_of_attention_over_all_keys(
    num_queries: int, num_prefix: int, num_own: int, shape: tuple[tuple[int, int], int], seed: int
) -> None:
    (heads, kv_heads), dim = shape
    q, k, v = random_qkv([num_queries], heads, kv_heads, dim, seed, keys=num_prefix + num_own)
    grad = torch.randn(q.shape, generator=torch.Generator().manual_seed(seed + 1))
    whole = [x.clone().requires_grad_() for x in (q, k, v)]
    whole_q, whole_k, whole_v = (x.transpose(0, 1)[None] for x in whole)
    expected = F.scaled_dot_product_attention(whole_q, whole_k, whole_v, enable_gqa=True)[0].transpose(0, 1)
    expected.backward(grad)
    parts = [(k[:num_prefix], v[:num_prefix]), (k[num_prefix:], v[num_prefix:])]
    (o_a, lse_a), (o_b, lse_b) = [flash_forward(q, *part, causal=False) for part in parts]
    o, lse = merge(o_a, lse_a, o_b, lse_b)
    torch.testing.assert_close(o, expected.detach(), atol=KERNEL_TOLERANCE, rtol=0)
    gradients = [flash_backward(grad, q, *part, o, lse, causal=False) for part in parts]
    combined = (
        gradients[0][0] + gradients[1][0],
        torch.cat([gradients[0][1], gradients[1][1]]),
        torch.cat([gradients[0][2], gradients[1][2]]),
    )
    for actual, original in zip(combined, whole, strict=True):
        assert original.grad is not None
        torch.testing.assert_close(actual, original.grad, atol=KERNEL_TOLERANCE, rtol=KERNEL_TOLERANCE)
