"""Counted bytes and operations against numbers worked out by hand, for the published shapes."""

import pytest
from torch.utils.flop_counter import FlopCounterMode

from rollplex.bench.roofline import decode_bytes, kv_bytes_per_token, layer_matrix_elements, prefill_flops
from rollplex.bench.work import text_prompt
from rollplex.models.decoder import DecoderConfig
from rollplex.models.prefix import prefix_forward
from rollplex.models.presets import preset_config
from rollplex.models.qwen_vl import QwenVL
from rollplex.models.vlm import Encoded
from rollplex.phases.run import finish
from rollplex.testing import tiny_config, tiny_model


def config(name: str) -> DecoderConfig:
    return QwenVL(preset_config(name)).decoder_config


def test_weights_and_kv_of_7b() -> None:
    c = config("7b")
    # qkv (28 + 8) * 128, out 28 * 128, gate and up 2 * 18944, down 18944: rows of 3584
    assert layer_matrix_elements(c) == 3584 * (4608 + 3584 + 37888 + 18944)
    assert kv_bytes_per_token(c) == 2 * 28 * 4 * 128 * 2 == 57344
    step = decode_bytes(c, batch=8, group=8, prefix=8192, suffix=1024)
    assert step.weights == 2 * (28 * layer_matrix_elements(c) + 152064 * 3584)
    assert step.weights / 1e9 == pytest.approx(13.05 + 1.09, abs=0.01)
    assert (step.prefix, step.suffix) == (8192 * 57344, 8 * 1024 * 57344)
    assert step.total == step.weights + step.prefix + step.suffix


def test_a_tied_head_is_read_once() -> None:
    c = config("3b")
    assert c.tied_embeddings
    step = decode_bytes(c, batch=8, group=8, prefix=0, suffix=0)
    assert step.total == 2 * (36 * 2048 * (2560 + 2048 + 3 * 11008) + 151936 * 2048)


def test_sharing_reads_a_prefix_once_per_group() -> None:
    c = config("3b")
    shared, own = (decode_bytes(c, 64, 8, 8192, 100, shared=shared) for shared in (True, False))
    assert own.prefix == 8 * shared.prefix and own.suffix == shared.suffix and own.weights == shared.weights
    assert decode_bytes(c, 32, 1, 8192, 1).prefix == decode_bytes(c, 32, 1, 8192, 1, shared=False).prefix


def test_prefill_of_7b() -> None:
    c, tokens = config("7b"), 8192
    linear, attention = 2 * tokens * layer_matrix_elements(c), 2 * tokens**2 * 28 * 128
    last = 2 * tokens * 3584 * 2 * 4 * 128
    assert prefill_flops(c, tokens) == 27 * (linear + attention) + last
    assert prefill_flops(c, tokens) / 1e12 == pytest.approx(116.1, abs=0.1)


@pytest.mark.parametrize("tie", [False, True])
def test_bytes_are_those_of_the_weights_that_a_step_reads(tie: bool) -> None:
    decoder = tiny_model(tiny_config(tie=tie)).decoder
    matrices = {weight.data_ptr(): weight.nbytes for weight in decoder.parameters() if weight.dim() > 1}
    table = 0 if tie else decoder.embedding.nbytes
    counted = decode_bytes(decoder.config, 4, 4, 0, 0, element_bytes=4).weights
    assert counted == sum(matrices.values()) - table


def test_products_of_a_prefix_are_those_that_are_computed() -> None:
    model, tokens = tiny_model(), 40
    with FlopCounterMode(display=False) as counter:
        finish(prefix_forward(model, [text_prompt(model, tokens)], [Encoded((), ())], for_training=False))
    counts = {str(operator): count for operator, count in counter.get_flop_counts()["Global"].items()}
    linear = sum(count for operator, count in counts.items() if "attention" not in operator)
    c = model.decoder.config
    queries = c.num_heads * c.head_dim
    attention = (c.num_layers - 1) * 2 * tokens**2 * queries
    unneeded = 2 * tokens * c.hidden * queries  # of the last layer, from the packed product; no work that counts
    assert prefill_flops(c, tokens) == linear + attention - unneeded
