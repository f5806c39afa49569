"""Models in and out of Hugging Face directories, and models with random weights.

    load_model    config.json + *.safetensors -> VisionLanguageModel, tensor by tensor into packed parameters
    random_model  config                      -> VisionLanguageModel
    save_model    VisionLanguageModel         -> config.json, *.safetensors under the published names, processor files

Parameters are made without storage, then empty on their device, then filled: no second copy of the model exists in host
memory. A tensor that is missing, left over, of a wrong shape or unreadable is a CheckpointError that names it and its
file. This file knows no training state, and a family's names only through its `parts`. Writing is not atomic: whoever
needs a directory that is either whole or absent writes beside it and renames.
"""

import copy
import json
import os
import re
import shutil
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import snapshot_download
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor, nn
from transformers import AutoConfig, Qwen2_5_VLForConditionalGeneration

from rollplex.errors import CheckpointError
from rollplex.models.qwen_vl import SUPPORTED_MODEL_TYPES, Part, QwenVL
from rollplex.models.vlm import VisionLanguageModel

SINGLE_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"
HEAD = "lm_head.weight"
EMBEDDING = "model.embed_tokens.weight"
WEIGHT_DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
MAX_SHARD_BYTES = 5 * 2**30
"""Size of the shards that published checkpoints have."""
MAX_NAMES_IN_ERROR = 8
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


def load_model(source: str, dtype: torch.dtype, device: torch.device | str) -> VisionLanguageModel:
    """A checkpoint's model: `source` is a directory in Hugging Face format, or a hub name.

    Raises:
        CheckpointError: it is not found, not readable, of a kind not supported, or its tensors do not fit its config.
    """
    directory = checkpoint_directory(source)
    model = _empty_model(read_config(directory), dtype, torch.device(device))
    _fill(model, _tensor_files(directory))
    return model


def random_model(hf_config: Any, seed: int, dtype: torch.dtype, device: torch.device | str) -> VisionLanguageModel:
    """Random weights as the family initialises them: normal matrices, zero biases, unit norms."""
    model = _empty_model(hf_config, dtype, torch.device(device))
    generator = torch.Generator(device).manual_seed(seed)
    model.decoder.initialize(generator)
    deviation = hf_config.vision_config.initializer_range
    with torch.no_grad():
        for name, parameter in model.vision.named_parameters():
            if parameter.dim() > 1:
                parameter.normal_(0.0, deviation, generator=generator)
            else:
                parameter.fill_(0.0 if name.endswith("bias") else 1.0)
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
        origin = checkpoint_directory(source)
        for name in PROCESSOR_FILES:
            if (origin / name).is_file() and not (target / name).exists():
                shutil.copyfile(origin / name, target / name)
    _save_weights(model, target, max_shard_bytes)
    for path in (*target.iterdir(), target):
        _flush(path)


def checkpoint_directory(source: str) -> Path:
    """The local directory of a checkpoint; a hub name's files are downloaded, or found in the hub client's cache."""
    path = Path(source).expanduser()
    if source and path.is_dir():
        return path
    if path.exists() or not re.fullmatch(r"[\w.-]+/[\w.-]+", source) or source.startswith("."):
        raise CheckpointError(f"{source!r} is neither a directory nor a hub name (owner/name)")
    try:
        return Path(
            snapshot_download(source, allow_patterns=["*.safetensors", INDEX_FILE, "config.json", *PROCESSOR_FILES])
        )
    except Exception as error:  # the hub client raises its own errors and those of its HTTP library
        raise CheckpointError(f"{source!r} is not a directory, and the hub does not give it: {error}") from error


def read_config(directory: Path) -> Any:
    """The checkpoint's Hugging Face config."""
    path = directory / "config.json"
    values = _read_json(path, f"{directory} has no config.json; give a directory in Hugging Face format")
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
    """The model with uninitialised parameters of `dtype` on `device`, and its computed buffers in float32."""
    with torch.device("meta"):
        model = VisionLanguageModel(QwenVL(hf_config))
    for module in model.modules():
        for name, parameter in module.named_parameters(recurse=False):
            setattr(module, name, nn.Parameter(torch.empty(parameter.shape, dtype=dtype, device=device)))
        for name, buffer in module.named_buffers(recurse=False):
            assert not buffer.is_meta, f"buffer {name} has no values"
            setattr(module, name, buffer.to(device))
    return model


def _fill(model: VisionLanguageModel, files: dict[Path, list[str]]) -> None:
    """Read every tensor into its place; all of them, and no others, have to be there."""
    family = _family(model)
    targets = {
        part.hf_name: _Target(parameter, part)
        for name, parameter in model.named_parameters()
        for part in family.parts(name)
    }
    origins = _origins(family, files)
    tied = model.decoder.untied_head is None
    unknown = [
        f"{name} ({path.name})" for name, path in origins.items() if name not in targets and not (tied and name == HEAD)
    ]
    missing = [name for name in targets if name not in origins]
    folder = next(iter(files)).parent
    if unknown:
        raise CheckpointError(f"{folder}: tensors that this model does not have: {_listed(unknown)}")
    if missing:
        hint = "; a tied checkpoint says tie_word_embeddings = true in its config.json" if HEAD in missing else ""
        raise CheckpointError(f"{folder}: missing tensors: {_listed(missing)}{hint}")
    for path, names in files.items():
        for name, tensor in _read(path, names):
            target = targets.get(family.published_name(name))
            if target is not None:
                _write(target, name, path, tensor)
    if tied and HEAD in origins:
        _require_tied(family, files, origins)


@torch.no_grad()
def _write(target: _Target, name: str, path: Path, tensor: Tensor) -> None:
    expected = target.part.of(target.parameter.detach().to("meta")).shape
    if tensor.dtype not in WEIGHT_DTYPES:
        raise CheckpointError(f"{name} in {path}: dtype {tensor.dtype} is no weight's; use the unquantized checkpoint")
    if tensor.shape != expected:
        raise CheckpointError(f"{name} in {path} has shape {list(tensor.shape)}; its config.json says {list(expected)}")
    target.part.write(target.parameter, tensor)


def _origins(family: QwenVL, files: dict[Path, list[str]]) -> dict[str, Path]:
    """The file that holds each tensor, by published name."""
    origins: dict[str, Path] = {}
    for path, names in files.items():
        for name in names:
            published = family.published_name(name)
            if published in origins:
                raise CheckpointError(
                    f"{published} is twice in the checkpoint: in {origins[published]} and, as {name}, in {path}"
                )
            origins[published] = path
    return origins


def _require_tied(family: QwenVL, files: dict[Path, list[str]], origins: dict[str, Path]) -> None:
    """A tied checkpoint may repeat its embedding as head, but then they must be the same numbers."""
    found = {}
    for published in (EMBEDDING, HEAD):
        path = origins[published]
        names = [name for name in files[path] if family.published_name(name) == published]
        found[published] = next(_read(path, names))[1]
    embedding, head = found[EMBEDDING], found[HEAD]
    common = torch.promote_types(embedding.dtype, head.dtype)
    if not torch.equal(embedding.to(common), head.to(common)):
        raise CheckpointError(
            f"{HEAD} in {origins[HEAD]} differs from {EMBEDDING}, but config.json says that they are tied; "
            "set tie_word_embeddings to false there, or remove the tensor"
        )


def _tensor_files(directory: Path) -> dict[Path, list[str]]:
    """Weight files, each with the names of its tensors."""
    if (directory / SINGLE_FILE).is_file():
        return {directory / SINGLE_FILE: _tensor_names(directory / SINGLE_FILE)}
    index = directory / INDEX_FILE
    if not index.is_file():
        patterns = ("*.bin", "*.pt", "*.pth", "*.safetensors")
        found = sorted(path.name for pattern in patterns for path in directory.glob(pattern))
        what = (
            f"only {_listed(found)}; convert to safetensors with transformers' save_pretrained"
            if found
            else "no weights"
        )
        raise CheckpointError(f"{directory} has no {SINGLE_FILE} and no {INDEX_FILE}: {what}")
    weight_map = _read_json(index, f"{index} is missing").get("weight_map")
    if (
        not isinstance(weight_map, dict)
        or not weight_map
        or not all(isinstance(file, str) for file in weight_map.values())
    ):
        raise CheckpointError(f"{index}: has no weight_map from tensor to file")
    listed: dict[str, list[str]] = {}
    for name, file in weight_map.items():
        listed.setdefault(file, []).append(name)
    for file, names in listed.items():
        if Path(file).name != file or not (directory / file).is_file():
            missing = f"{index} names {file!r} for {_listed(names)}, but there is no such file"
            raise CheckpointError(f"{missing}; fetch the whole checkpoint")
    files = {directory / file: _tensor_names(directory / file) for file in sorted(listed)}
    for path, names in files.items():
        if differing := sorted(set(listed[path.name]) ^ set(names)):
            raise CheckpointError(f"{index} and {path.name} disagree on which tensors it holds: {_listed(differing)}")
    return files


def _tensor_names(path: Path) -> list[str]:
    try:
        with safe_open(path, framework="pt") as file:
            return list(file.keys())
    except (SafetensorError, OSError) as error:
        raise CheckpointError(f"{path} is no whole safetensors file: {error}; fetch it again") from error


def _read(path: Path, names: Iterable[str]) -> Iterator[tuple[str, Tensor]]:
    """The file's tensors, one after the other."""
    with safe_open(path, framework="pt") as file:
        for name in names:
            try:
                tensor = file.get_tensor(name)
            except (SafetensorError, OSError) as error:
                raise CheckpointError(f"{name} in {path} cannot be read: {error}; fetch the file again") from error
            yield name, tensor


def _read_json(path: Path, if_missing: str) -> dict[str, Any]:
    if not path.is_file():
        raise CheckpointError(if_missing)
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{path} is not valid JSON: {error}") from error
    if not isinstance(values, dict):
        raise CheckpointError(f"{path} holds no JSON object")
    return values


def _save_config(model: VisionLanguageModel, directory: Path) -> None:
    config: Any = copy.deepcopy(_family(model).hf_config)
    for part in (config, config.text_config, config.vision_config):
        part.dtype = model.dtype
    config.architectures = [Qwen2_5_VLForConditionalGeneration.__name__]
    config.save_pretrained(directory)


def _save_weights(model: VisionLanguageModel, directory: Path, max_shard_bytes: int) -> None:
    shards = _shards(model, max_shard_bytes)
    tensors = named_hf_tensors(model)
    weight_map: dict[str, str] = {}
    for number, names in enumerate(shards, 1):
        file = SINGLE_FILE if len(shards) == 1 else f"model-{number:05}-of-{len(shards):05}.safetensors"
        # Only one shard at a time is in host memory beside the model.
        shard = {name: next(tensors)[1].cpu().contiguous() for name in names}
        save_file(shard, directory / file, metadata={"format": "pt"})
        weight_map.update(dict.fromkeys(names, file))
    if len(shards) > 1:
        num_bytes = sum(parameter.nbytes for parameter in model.parameters())
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


def _listed(names: list[str]) -> str:
    shown = ", ".join(names[:MAX_NAMES_IN_ERROR])
    return shown if len(names) <= MAX_NAMES_IN_ERROR else f"{shown} and {len(names) - MAX_NAMES_IN_ERROR} more"
