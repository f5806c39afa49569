"""Checkpoints in and out, against transformers; and every way in which a directory can be wrong."""

import json
import os
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoTokenizer, GenerationConfig, Qwen2_5_VLForConditionalGeneration

from rollplex.errors import CheckpointError
from rollplex.models import load, shards
from rollplex.models.load import (
    PROCESSOR_FILES,
    load_model,
    load_plain,
    load_staged,
    named_hf_tensors,
    random_model,
    save_model,
    to_transformers,
)
from rollplex.models.shards import INDEX_FILE, SINGLE_FILE
from rollplex.models.vlm import VisionLanguageModel
from rollplex.testing import canned_prompts, hf_inputs, tiny_checkpoint, tiny_config, tiny_model

SHARD_BYTES = 60_000
"""Small enough for the tiny model to need several files."""
Q_PROJ = "model.layers.1.self_attn.q_proj.weight"


def from_transformers(directory: Path, dtype: torch.dtype | str = "auto") -> Any:
    model: Any = Qwen2_5_VLForConditionalGeneration
    return model.from_pretrained(str(directory), dtype=dtype)


def assert_same_state(actual: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert actual.keys() == expected.keys()
    for name, tensor in expected.items():
        assert actual[name].dtype == tensor.dtype, name
        assert torch.equal(actual[name], tensor), name


def rewrite(directory: Path, **changes: Tensor | None) -> None:
    """Replace, add or (None) remove tensors of a single-file checkpoint; `__` in a name stands for a dot."""
    tensors = load_file(directory / SINGLE_FILE)
    for name, tensor in changes.items():
        tensors.pop(name.replace("__", "."), None)
        if tensor is not None:
            tensors[name.replace("__", ".")] = tensor
    save_file(tensors, directory / SINGLE_FILE)


def edit_config(directory: Path, **values: Any) -> None:
    path = directory / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **values}))


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    return tiny_checkpoint(tmp_path / "checkpoint")


@pytest.fixture
def sharded(tmp_path: Path) -> Path:
    return tiny_checkpoint(tmp_path / "sharded", max_shard_bytes=SHARD_BYTES)


@pytest.mark.parametrize("tie", [False, True])
@pytest.mark.parametrize("max_shard_size", ["1GB", "60KB"])
def test_what_transformers_saved_is_loaded(tmp_path: Path, tie: bool, max_shard_size: str) -> None:
    torch.manual_seed(1)
    hf: Any = Qwen2_5_VLForConditionalGeneration(tiny_config(tie=tie))
    for parameter in hf.parameters():
        torch.nn.init.normal_(parameter)
    hf.save_pretrained(tmp_path, max_shard_size=max_shard_size)
    model = load_model(str(tmp_path), torch.float32, "cpu")
    assert (model.decoder.untied_head is None) == tie
    assert (tmp_path / INDEX_FILE).exists() == (max_shard_size == "60KB")
    assert_same_state(to_transformers(model).state_dict(), hf.state_dict())


@pytest.mark.parametrize("tie", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("max_shard_bytes", [2**30, SHARD_BYTES])
@pytest.mark.parametrize("num_kv_heads", [1, 2, 4])
def test_what_was_saved_loads_everywhere(
    tmp_path: Path, tie: bool, dtype: torch.dtype, max_shard_bytes: int, num_kv_heads: int
) -> None:
    model = tiny_model(tiny_config(tie=tie, num_kv_heads=num_kv_heads), seed=2, dtype=dtype)
    save_model(model, tmp_path, None, max_shard_bytes)
    hf = from_transformers(tmp_path)
    assert hf.dtype == dtype
    assert_same_state(hf.state_dict(), to_transformers(model).state_dict())
    again = load_model(str(tmp_path), dtype, "cpu")
    assert_same_state(again.state_dict(), model.state_dict())
    files = sorted(path.name for path in tmp_path.glob("*.safetensors"))
    if max_shard_bytes == SHARD_BYTES:
        index = json.loads((tmp_path / INDEX_FILE).read_text())
        assert len(files) > 2
        assert sorted(set(index["weight_map"].values())) == files
        assert index["metadata"]["total_size"] == sum(parameter.nbytes for parameter in model.parameters())
        held = [load_file(tmp_path / name) for name in files]
        assert all(len(tensors) == 1 or sum(t.nbytes for t in tensors.values()) <= SHARD_BYTES for tensors in held)
    else:
        assert files == [SINGLE_FILE]
    assert json.loads((tmp_path / "config.json").read_text())["dtype"] == str(dtype).removeprefix("torch.")


def test_published_names_are_written(checkpoint: Path) -> None:
    names = set(load_file(checkpoint / SINGLE_FILE))
    expected = {
        Q_PROJ,
        "model.embed_tokens.weight",
        "model.norm.weight",
        "lm_head.weight",
        "visual.patch_embed.proj.weight",
    }
    assert expected <= names
    assert names == {name for name, _ in named_hf_tensors(load_model(str(checkpoint), torch.float32, "cpu"))}


def test_the_newer_names_are_accepted(checkpoint: Path) -> None:
    expected = load_model(str(checkpoint), torch.float32, "cpu")
    tensors = load_file(checkpoint / SINGLE_FILE)
    hf = from_transformers(checkpoint)
    renamed = {name: tensor.clone() for name, tensor in hf.state_dict().items()}
    assert "model.language_model.norm.weight" in renamed
    assert renamed.keys() != tensors.keys()
    save_file(renamed, checkpoint / SINGLE_FILE)
    assert_same_state(load_model(str(checkpoint), torch.float32, "cpu").state_dict(), expected.state_dict())


def test_loading_converts_to_the_compute_dtype(checkpoint: Path) -> None:
    wide = load_model(str(checkpoint), torch.float32, "cpu")
    narrow = load_model(str(checkpoint), torch.bfloat16, "cpu")
    for (name, a), b in zip(wide.named_parameters(), narrow.parameters(), strict=True):
        assert torch.equal(a.to(torch.bfloat16), b), name
        assert b.requires_grad


def test_a_loaded_model_computes_what_transformers_computes(checkpoint: Path) -> None:
    model, hf = load_model(str(checkpoint), torch.float32, "cpu"), from_transformers(checkpoint)
    prompt = canned_prompts(hf.config, (2,))[0]
    with torch.no_grad():
        expected = hf(**hf_inputs(prompt)).logits
        assert torch.equal(to_transformers(model)(**hf_inputs(prompt)).logits, expected)
        features = [*model.encode(prompt.images)]
    inputs = hf_inputs(prompt)
    reference = hf.get_image_features(inputs["pixel_values"], inputs["image_grid_thw"]).pooler_output
    for ours, theirs in zip(features, reference, strict=True):
        torch.testing.assert_close(ours, theirs, atol=1e-5, rtol=0)


def test_a_whole_checkpoint_serves_a_tokenizer_and_generation_settings(checkpoint: Path, tmp_path: Path) -> None:
    model = load_model(str(checkpoint), torch.float32, "cpu")
    saved = tmp_path / "saved"
    save_model(model, saved, str(checkpoint))
    copied = [name for name in PROCESSOR_FILES if (checkpoint / name).exists()]
    assert {"tokenizer.json", "generation_config.json", "preprocessor_config.json", "chat_template.jinja"} <= set(
        copied
    )
    for name in copied:
        assert (saved / name).read_bytes() == (checkpoint / name).read_bytes()
    tokenizer: Any = AutoTokenizer.from_pretrained(str(saved))
    text = "the thing is in the wing\n über 漢字"
    assert tokenizer.decode(tokenizer(text).input_ids) == text
    message = {"role": "user", "content": [{"type": "image"}, {"type": "text", "text": "What is it?"}]}
    rendered = tokenizer.apply_chat_template([message], tokenize=False, add_generation_prompt=True)
    assert rendered == (
        "<|im_start|>user\n<|vision_start|><|image_pad|><|vision_end|>What is it?<|im_end|>\n<|im_start|>assistant\n"
    )
    config: Any = tiny_config()
    ids = tokenizer(rendered).input_ids
    assert ids.count(config.image_token_id) == 1
    assert tokenizer.eos_token_id in GenerationConfig.from_pretrained(str(saved)).eos_token_id


def test_saved_files_are_flushed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    flushed = set[str]()
    fsync = os.fsync

    def record(descriptor: int) -> None:
        flushed.add(os.readlink(f"/proc/self/fd/{descriptor}"))
        fsync(descriptor)

    monkeypatch.setattr(os, "fsync", record)
    save_model(tiny_model(), tmp_path, None, SHARD_BYTES)
    assert flushed == {str(path) for path in (tmp_path, *tmp_path.iterdir())}


def test_saving_over_weights_is_refused(checkpoint: Path) -> None:
    with pytest.raises(CheckpointError, match="already holds weights"):
        save_model(tiny_model(), checkpoint, None)


def test_random_models_repeat_by_seed() -> None:
    config = tiny_config()
    first, second, other = (random_model(config, seed, torch.float32, "cpu") for seed in (7, 7, 8))
    assert_same_state(first.state_dict(), second.state_dict())
    assert not torch.equal(first.decoder.embedding, other.decoder.embedding)
    for name, parameter in first.named_parameters():
        if parameter.dim() > 1:
            assert 0.08 < float(parameter.detach().std()) < 0.12, name
        else:
            assert torch.equal(parameter, torch.full_like(parameter, 0.0 if name.endswith("bias") else 1.0)), name


def test_loading_makes_no_second_copy(checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Parameters are allocated once; of the tensors read, at most the current and the previous one are alive."""
    read, make = shards.read_tensors, load._empty_model
    seen: list[weakref.ref[Tensor]] = []
    storages: list[int] = []

    def one_by_one(path: Path, names: list[str]) -> Any:
        for name, tensor in read(path, names):
            assert sum(reference() is not None for reference in seen) <= 1
            seen.append(weakref.ref(tensor))
            yield name, tensor
            del tensor

    def remember(*arguments: Any) -> VisionLanguageModel:
        model = make(*arguments)
        storages.extend(parameter.data_ptr() for parameter in model.parameters())
        return model

    monkeypatch.setattr(load, "read_tensors", one_by_one)
    monkeypatch.setattr(load, "_empty_model", remember)
    model = load_model(str(checkpoint), torch.float32, "cpu")
    assert [parameter.data_ptr() for parameter in model.parameters()] == storages
    assert len(seen) == len(load_file(checkpoint / SINGLE_FILE))


# --- what can be wrong ---------------------------------------------------------------------------------------------


def refused(directory: Path | str, *patterns: str) -> None:
    """By both ways of loading, in the same words."""
    messages = set[str]()
    for way in (load_plain, load_staged):
        with pytest.raises(CheckpointError) as caught:
            way(str(directory), torch.float32, "cpu")
        messages.add(str(caught.value))
    (message,) = messages
    for pattern in patterns:
        assert pattern in message


def test_a_missing_tensor(checkpoint: Path) -> None:
    rewrite(checkpoint, **{Q_PROJ: None, "visual.merger.ln_q.weight": None})
    refused(checkpoint, "missing tensors", Q_PROJ, "visual.merger.ln_q.weight", str(checkpoint))


def test_a_missing_head_suggests_tying(checkpoint: Path) -> None:
    rewrite(checkpoint, **{"lm_head.weight": None})
    refused(checkpoint, "missing tensors: lm_head.weight", "tie_word_embeddings")


def test_an_unmapped_tensor(checkpoint: Path) -> None:
    rewrite(checkpoint, **{"model.layers.0.self_attn.q_norm.weight": torch.ones(16)})
    refused(checkpoint, "model.layers.0.self_attn.q_norm.weight", SINGLE_FILE)


def test_a_layer_too_many(checkpoint: Path) -> None:
    edit_config(checkpoint, text_config={**json.loads((checkpoint / "config.json").read_text())["text_config"],
                                         "num_hidden_layers": 2, "layer_types": ["full_attention"] * 2})  # fmt: skip
    refused(checkpoint, "tensors that this model does not have", "model.layers.2.", "and 4 more")


def test_a_wrong_shape(checkpoint: Path) -> None:
    rewrite(checkpoint, **{Q_PROJ: torch.zeros(64, 63)})
    refused(checkpoint, Q_PROJ, SINGLE_FILE, "[64, 63]", "[64, 64]")


def test_a_transposed_row_parallel_weight(checkpoint: Path) -> None:
    name = "model.layers.0.mlp.down_proj.weight"
    rewrite(checkpoint, **{name: torch.zeros(96, 64)})
    refused(checkpoint, name, "[96, 64]", "[64, 96]")


@pytest.mark.parametrize("dtype", [torch.int8, torch.float8_e4m3fn])
def test_a_dtype_that_is_no_weights(checkpoint: Path, dtype: torch.dtype) -> None:
    rewrite(checkpoint, **{Q_PROJ: torch.zeros(64, 64).to(dtype)})
    refused(checkpoint, Q_PROJ, SINGLE_FILE, str(dtype))


def test_a_tensor_under_both_names(checkpoint: Path) -> None:
    rewrite(checkpoint, **{"model.language_model.norm.weight": torch.ones(64)})
    refused(checkpoint, "model.norm.weight is twice")


def test_a_tied_checkpoint_may_repeat_its_embedding(tmp_path: Path) -> None:
    directory = tiny_checkpoint(tmp_path / "tied", tie=True)
    embedding = load_file(directory / SINGLE_FILE)["model.embed_tokens.weight"]
    rewrite(directory, **{"lm_head.weight": embedding.clone()})
    assert torch.equal(load_model(str(directory), torch.float32, "cpu").decoder.head, embedding)


@pytest.mark.parametrize("spoil", ["number", "shape"])
def test_a_tied_checkpoint_with_another_head(tmp_path: Path, spoil: str) -> None:
    directory = tiny_checkpoint(tmp_path / "tied", tie=True)
    head = load_file(directory / SINGLE_FILE)["model.embed_tokens.weight"].clone()
    head[3, 5] += 1e-3
    rewrite(directory, **{"lm_head.weight": head if spoil == "number" else head[:-1].clone()})
    refused(directory, "lm_head.weight", SINGLE_FILE, "tie_word_embeddings")


@pytest.mark.parametrize("kept", [0, 5, 1000, -7])
def test_a_truncated_file(checkpoint: Path, kept: int) -> None:
    path = checkpoint / SINGLE_FILE
    path.write_bytes(path.read_bytes()[:kept])
    refused(checkpoint, str(path), "no whole safetensors file")


def test_a_corrupt_header(checkpoint: Path) -> None:
    path = checkpoint / SINGLE_FILE
    path.write_bytes(b"\xff" * 4096)
    refused(checkpoint, str(path), "no whole safetensors file")


def test_a_missing_shard(sharded: Path) -> None:
    victim = sorted(sharded.glob("*.safetensors"))[1]
    name = next(iter(load_file(victim)))
    victim.unlink()
    refused(sharded, INDEX_FILE, victim.name, name, "no such file")


def test_a_truncated_shard(sharded: Path) -> None:
    victim = sorted(sharded.glob("*.safetensors"))[-1]
    victim.write_bytes(victim.read_bytes()[:-1])
    refused(sharded, str(victim))


@pytest.mark.parametrize("file", ["model-elsewhere.safetensors", "../sharded/model-00001-of-00002.safetensors"])
def test_an_index_that_names_a_file_that_is_not_there(sharded: Path, file: str) -> None:
    index = json.loads((sharded / INDEX_FILE).read_text())
    index["weight_map"][Q_PROJ] = file
    (sharded / INDEX_FILE).write_text(json.dumps(index))
    refused(sharded, INDEX_FILE, Q_PROJ, file)


def test_an_index_that_disagrees_with_its_files(sharded: Path) -> None:
    index = json.loads((sharded / INDEX_FILE).read_text())
    files = sorted(set(index["weight_map"].values()))
    index["weight_map"][Q_PROJ] = next(file for file in files if file != index["weight_map"][Q_PROJ])
    (sharded / INDEX_FILE).write_text(json.dumps(index))
    refused(sharded, INDEX_FILE, Q_PROJ, "disagree")


@pytest.mark.parametrize("text", ["{", "[]", "{}", '{"weight_map": {}}', '{"weight_map": {"a": 3}}'])
def test_a_broken_index(sharded: Path, text: str) -> None:
    (sharded / INDEX_FILE).write_text(text)
    refused(sharded, INDEX_FILE)


def test_no_weights(checkpoint: Path) -> None:
    (checkpoint / SINGLE_FILE).unlink()
    refused(checkpoint, str(checkpoint), "no weights")


def test_only_pickled_weights(checkpoint: Path) -> None:
    (checkpoint / SINGLE_FILE).rename(checkpoint / "pytorch_model.bin")
    refused(checkpoint, "pytorch_model.bin", "convert")


def test_no_config(checkpoint: Path) -> None:
    (checkpoint / "config.json").unlink()
    refused(checkpoint, str(checkpoint), "no config.json")


@pytest.mark.parametrize("text", ["", "[1]", '{"model_type": "qwen2_5_vl", "text_config": {"hidden_size": "wide"}}'])
def test_a_broken_config(checkpoint: Path, text: str) -> None:
    (checkpoint / "config.json").write_text(text)
    refused(checkpoint, "config.json")


@pytest.mark.parametrize("model_type", ["llama", "no-such-model", None])
def test_another_model_type(checkpoint: Path, model_type: str | None) -> None:
    edit_config(checkpoint, model_type=model_type)
    refused(checkpoint, "config.json", f"model_type = {model_type!r}", "qwen2_5_vl")


@pytest.mark.parametrize("source", ["/no/such/place", "./missing", "missing", "a/b/c", "", "https://example.org/model"])
def test_neither_a_directory_nor_a_hub_name(source: str) -> None:
    refused(source, repr(source), "neither a directory nor a hub name")


def test_a_file_is_no_checkpoint(checkpoint: Path) -> None:
    refused(checkpoint / SINGLE_FILE, "neither a directory nor a hub name")


def test_a_hub_name_is_asked_of_the_hub(checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: dict[str, Any] = {}

    def fake(name: str, allow_patterns: list[str]) -> str:
        asked.update(name=name, patterns=allow_patterns)
        return str(checkpoint)

    monkeypatch.setattr(load, "snapshot_download", fake)
    model = load_model("owner/tiny-model", torch.float32, "cpu")
    assert model.decoder.config.num_layers == 3
    assert asked["name"] == "owner/tiny-model"
    assert {"*.safetensors", "config.json", "tokenizer.json"} <= set(asked["patterns"])


def test_a_hub_name_that_the_hub_does_not_give() -> None:
    refused("owner/no-such-model-here", "owner/no-such-model-here", "hub")
