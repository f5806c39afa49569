"""Models in and out of Hugging Face directories, and models with random weights.

    load_model    config.json + *.safetensors -> VisionLanguageModel; on a GPU load_staged, elsewhere load_plain
    random_model  config                      -> VisionLanguageModel
    save_model    VisionLanguageModel         -> config.json, *.safetensors under the published names, processor files

Parameters are made without storage, then empty on their device, then filled: no second copy of the model exists in host
memory. A tensor that is missing, left over, of a wrong shape or unreadable is a CheckpointError that names it and its
file; all but the last is found before a weight is written. This file knows no training state, and a family's names only
through its `parts`. Writing is not atomic: whoever needs a directory that is whole or absent writes beside it and
renames.
"""

import copy
import json
import os
import re
import shutil
from collections.abc import Iterator, Mapping
from contextlib import closing
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import snapshot_download
from safetensors.torch import save_file
from torch import Tensor, nn
from transformers import AutoConfig, Qwen2_5_VLForConditionalGeneration

from rollplex.errors import CheckpointError
from rollplex.models.qwen_vl import SUPPORTED_MODEL_TYPES, Part, QwenVL
from rollplex.models.shards import (
    INDEX_FILE,
    SINGLE_FILE,
    Staging,
    StoredTensor,
    listed,
    read_json,
    read_tensors,
    staged_rows,
    weight_files,
)
from rollplex.models.vlm import VisionLanguageModel

HEAD = "lm_head.weight"
EMBEDDING = "model.embed_tokens.weight"
WEIGHT_DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
MAX_SHARD_BYTES = 5 * 2**30
"""Size of the shards that published checkpoints have."""
DEFAULT_STAGING = Staging()
PROCESSOR_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "vocab.json",
    "merges.txt",
    "special_tokens_map.json",
    "added_tokens.json",
    "chat_template.json",
    "chat_template.jinja",
    "preprocessor_config.json",
    "video_preprocessor_config.json",
    "processor_config.json",
    "generation_config.json",
)
"""What a checkpoint holds besides weights and config; each is copied when it is there."""


@dataclass(frozen=True)
class _Target:
    """Where one checkpoint tensor goes."""

    parameter: nn.Parameter
    part: Part

    @property
    def shape(self) -> tuple[int, ...]:
        """As the checkpoint has it."""
        return tuple(self.part.of(self.parameter.detach().to("meta")).shape)

    def write(self, tensor: Tensor) -> None:
        """Put the whole tensor into its place."""
        if self.part.transposed and self.parameter.device.type == "cpu":
            # Converted first, and both sides in two dimensions: torch's copy then goes through blocks that fit a cache.
            self.part.of(self.parameter.detach()).t().copy_(tensor.to(self.parameter.dtype).t())
        else:
            self.part.write(self.parameter.detach(), tensor)

    def write_rows(self, first: int, rows: Tensor) -> None:
        """Put the tensor's rows from `first` on into their place: a part of one slot, or of several."""
        packed, one_slot = self.parameter.detach(), replace(self.part, num_slots=1)
        slots = [one_slot.of(slot) for slot in packed.view(self.part.num_slots, -1, *packed.shape[1:])]
        length, stop = len(slots[0]), first + len(rows)
        for index in range(first // length, -(-stop // length)):
            start, end = max(first, index * length), min(stop, (index + 1) * length)
            slots[index][start - index * length : end - index * length].copy_(rows[start - first : end - first])


def load_model(source: str, dtype: torch.dtype, device: torch.device | str) -> VisionLanguageModel:
    """A checkpoint's model: `source` is a directory in Hugging Face format, or a hub name.

    Raises:
        CheckpointError: it is not found, not readable, of a kind not supported, or its tensors do not fit its config.
    """
    load = load_staged if torch.device(device).type == "cuda" else load_plain
    return load(source, dtype, device)


@torch.no_grad()
def load_plain(source: str, dtype: torch.dtype, device: torch.device | str) -> VisionLanguageModel:
    """The same tensor by tensor, through safetensors' own reader: for a CPU, and the oracle of the other way."""
    model, targets = _prepare(source, dtype, torch.device(device))
    by_name = {(tensor.path, tensor.name): target for tensor, target in targets.items()}
    for path in {tensor.path: None for tensor in targets}:
        names = [name for file, name in by_name if file == path]
        for name, tensor in read_tensors(path, names):
            by_name[path, name].write(tensor)
    return model


@torch.no_grad()
def load_staged(
    source: str, dtype: torch.dtype, device: torch.device | str, staging: Staging = DEFAULT_STAGING
) -> VisionLanguageModel:
    """The same bits, read by several threads and converted, transposed and packed on the device."""
    model, targets = _prepare(source, dtype, torch.device(device))
    with closing(staged_rows(targets, model.device, staging)) as pieces:
        for rows, values in pieces:
            targets[rows.tensor].write_rows(rows.first, values)
    if model.device.type == "cuda":  # other streams may use the weights next
        torch.cuda.current_stream(model.device).synchronize()
    return model


def random_model(hf_config: Any, seed: int, dtype: torch.dtype, device: torch.device | str) -> VisionLanguageModel:
    """Random weights as the family initialises them: normal matrices, zero biases, unit norms."""
    model = _empty_model(hf_config, dtype, torch.device(device))
    generator = torch.Generator(device).manual_seed(seed)
    model.decoder.initialize(generator)
    deviation = hf_config.vision_config.initializer_range
    with torch.no_grad():
        for name, parameter in model.vision.named_parameters():
            for part in _family(model).parts(f"vision.{name}"):  # padding is no part, and stays zero
                values = torch.empty_like(part.of(parameter), memory_format=torch.contiguous_format)
                if values.dim() > 1:
                    values.normal_(0.0, deviation, generator=generator)
                else:
                    values.fill_(0.0 if name.endswith("bias") else 1.0)
                part.write(parameter, values)
    return model


def named_hf_tensors(model: VisionLanguageModel) -> Iterator[tuple[str, Tensor]]:
    """Every weight under its published name and in its published shape; a tied head is not repeated."""
    family = _family(model)
    for name, parameter in model.named_parameters():
        yield from family.unpack(name, parameter.detach())


def to_transformers(model: VisionLanguageModel) -> Qwen2_5_VLForConditionalGeneration:
    """The same weights in transformers' own module: the oracle of tests and benches."""
    family = _family(model)
    with torch.device("meta"):
        twin = Qwen2_5_VLForConditionalGeneration(copy.deepcopy(family.hf_config))
    head = {} if model.decoder.untied_head is not None else {HEAD: model.decoder.head.detach()}
    tensors = {**dict(named_hf_tensors(model)), **head}
    state = {family.module_name(name): tensor.clone() for name, tensor in tensors.items()}
    twin.load_state_dict(state, assign=True)
    twin.tie_weights()
    rotary = (twin.model.visual, "rotary_pos_emb"), (twin.model.language_model, "rotary_emb")
    for owner, name in rotary:  # computed, never loaded
        setattr(owner, name, type(getattr(owner, name))(owner.config).to(model.device))
    twin.train(False)
    return twin


def save_model(
    model: VisionLanguageModel, directory: str | Path, source: str | None, max_shard_bytes: int = MAX_SHARD_BYTES
) -> None:
    """Write a directory that load_model and transformers' from_pretrained read; every file is flushed to the disk.

    Args:
        directory: made if it does not exist; must not hold weights yet.
        source: the checkpoint whose tokenizer, processor, chat template and generation settings to copy; None: none.
        max_shard_bytes: largest weight file, unless a single tensor is larger.
    """
    target = Path(directory)
    target.mkdir(parents=True, exist_ok=True)
    if any(target.glob("*.safetensors*")):
        raise CheckpointError(f"{target} already holds weights; save into an empty directory")
    _save_config(model, target)
    if source is not None:
        origin = checkpoint_directory(source, weights=False)
        for name in PROCESSOR_FILES:
            if (origin / name).is_file() and not (target / name).exists():
                shutil.copyfile(origin / name, target / name)
    _save_weights(model, target, max_shard_bytes)
    for path in (*target.iterdir(), target):
        _flush(path)


def checkpoint_directory(source: str, weights: bool = True) -> Path:
    """The local directory of a checkpoint; a hub name's files are downloaded, or found in the hub client's cache.

    Args:
        weights: whether they are wanted too; the small files always are.
    """
    path = Path(source).expanduser()
    if source and path.is_dir():
        return path
    if path.exists() or not re.fullmatch(r"[\w.-]+/[\w.-]+", source) or source.startswith("."):
        raise CheckpointError(f"{source!r} is neither a directory nor a hub name (owner/name)")
    patterns = ["config.json", *PROCESSOR_FILES, *(["*.safetensors", INDEX_FILE] if weights else [])]
    try:
        return Path(snapshot_download(source, allow_patterns=patterns))
    except Exception as error:  # the hub client raises its own errors and those of its HTTP library
        raise CheckpointError(f"{source!r} is not a directory, and the hub does not give it: {error}") from error


def read_config(directory: Path) -> Any:
    """The checkpoint's Hugging Face config."""
    path = directory / "config.json"
    values = read_json(path, f"{directory} has no config.json; give a directory in Hugging Face format")
    if values.get("model_type") not in SUPPORTED_MODEL_TYPES:
        supported = ", ".join(SUPPORTED_MODEL_TYPES)
        raise CheckpointError(
            f"{path}: model_type = {values.get('model_type')!r} is not supported; supported: {supported}"
        )
    try:
        return AutoConfig.from_pretrained(str(directory), local_files_only=True)
    except Exception as error:  # transformers' config classes raise whatever their checks happen to meet
        raise CheckpointError(f"{path} is not a valid config: {error}") from error


def _family(model: VisionLanguageModel) -> QwenVL:
    assert isinstance(model.family, QwenVL)
    return model.family


def _empty_model(hf_config: Any, dtype: torch.dtype, device: torch.device) -> VisionLanguageModel:
    """The model with parameters of `dtype` on `device`: zeros, which is what padding rows have to be."""
    with torch.device("meta"):
        model = VisionLanguageModel(QwenVL(hf_config))
    for module in model.modules():
        for name, parameter in module.named_parameters(recurse=False):
            setattr(module, name, nn.Parameter(torch.zeros(parameter.shape, dtype=dtype, device=device)))
    return model


def _prepare(
    source: str, dtype: torch.dtype, device: torch.device
) -> tuple[VisionLanguageModel, dict[StoredTensor, _Target]]:
    """The empty model, and what goes where in it: every tensor's name, type and shape has been checked."""
    directory = checkpoint_directory(source)
    model = _empty_model(read_config(directory), dtype, device)
    family, tied = _family(model), model.decoder.untied_head is None
    places = {
        part.hf_name: _Target(parameter, part)
        for name, parameter in model.named_parameters()
        for part in family.parts(name)
    }
    stored = _by_published_name(family, weight_files(directory))
    if unknown := [
        f"{name} ({tensor.path.name})"
        for name, tensor in stored.items()
        if name not in places and not (tied and name == HEAD)
    ]:
        raise CheckpointError(f"{directory}: tensors that this model does not have: {listed(unknown)}")
    if missing := [name for name in places if name not in stored]:
        hint = "; a tied checkpoint says tie_word_embeddings = true in its config.json" if HEAD in missing else ""
        raise CheckpointError(f"{directory}: missing tensors: {listed(missing)}{hint}")
    for name, target in places.items():
        _require_fit(stored[name], target.shape)
    if tied and HEAD in stored:
        _require_tied(stored[EMBEDDING], stored[HEAD])
    return model, {tensor: places[name] for name, tensor in stored.items() if name in places}


def _require_fit(tensor: StoredTensor, shape: tuple[int, ...]) -> None:
    where = f"{tensor.name} in {tensor.path}"
    if tensor.dtype not in WEIGHT_DTYPES:
        raise CheckpointError(f"{where}: dtype {tensor.dtype} is no weight's; use the unquantized checkpoint")
    if tensor.shape != shape:
        raise CheckpointError(f"{where} has shape {list(tensor.shape)}; its config.json says {list(shape)}")


def _by_published_name(family: QwenVL, files: Mapping[Path, list[StoredTensor]]) -> dict[str, StoredTensor]:
    stored: dict[str, StoredTensor] = {}
    for tensor in (tensor for tensors in files.values() for tensor in tensors):
        published = family.published_name(tensor.name)
        if published in stored:
            raise CheckpointError(
                f"{published} is twice in the checkpoint: in {stored[published].path} and, as {tensor.name}, "
                f"in {tensor.path}"
            )
        stored[published] = tensor
    return stored


def _require_tied(embedding: StoredTensor, head: StoredTensor) -> None:
    """A tied checkpoint may repeat its embedding as head, but then they must be the same numbers."""
    (_, table), (_, repeated) = (next(read_tensors(stored.path, [stored.name])) for stored in (embedding, head))
    common = torch.promote_types(table.dtype, repeated.dtype)
    if not torch.equal(table.to(common), repeated.to(common)):
        raise CheckpointError(
            f"{HEAD} in {head.path} differs from {EMBEDDING}, but config.json says that they are tied; "
            "set tie_word_embeddings to false there, or remove the tensor"
        )


def _save_config(model: VisionLanguageModel, directory: Path) -> None:
    config: Any = copy.deepcopy(_family(model).hf_config)
    for part in (config, config.text_config, config.vision_config):
        part.dtype = model.dtype
    config.architectures = [Qwen2_5_VLForConditionalGeneration.__name__]
    config.save_pretrained(directory)


def _save_weights(model: VisionLanguageModel, directory: Path, max_shard_bytes: int) -> None:
    shards = _shards(model, max_shard_bytes)
    tensors = named_hf_tensors(model)
    weight_map, num_bytes = dict[str, str](), 0
    for number, names in enumerate(shards, 1):
        file = SINGLE_FILE if len(shards) == 1 else f"model-{number:05}-of-{len(shards):05}.safetensors"
        # Only one shard at a time is in host memory beside the model.
        shard = {name: next(tensors)[1].cpu().contiguous() for name in names}
        save_file(shard, directory / file, metadata={"format": "pt"})
        weight_map.update(dict.fromkeys(names, file))
        num_bytes += sum(tensor.nbytes for tensor in shard.values())
    if len(shards) > 1:
        index = {"metadata": {"total_size": num_bytes}, "weight_map": weight_map}
        (directory / INDEX_FILE).write_text(json.dumps(index, indent=2, sort_keys=True) + "\n", encoding="utf-8")


def _shards(model: VisionLanguageModel, max_shard_bytes: int) -> list[list[str]]:
    """Names of each weight file's tensors, in the order of named_hf_tensors."""
    family, shards, shard_bytes = _family(model), [list[str]()], 0
    for parameter_name, parameter in model.named_parameters():
        for name, tensor in family.unpack(parameter_name, torch.empty_like(parameter, device="meta")):
            if shards[-1] and shard_bytes + tensor.nbytes > max_shard_bytes:
                shards.append([])
                shard_bytes = 0
            shards[-1].append(name)
            shard_bytes += tensor.nbytes
    return shards


def _flush(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
