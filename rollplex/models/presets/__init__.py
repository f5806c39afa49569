"""The published configurations of Qwen2.5-VL, by size: real shapes where no checkpoint is at hand.

Each file beside this one holds one and says where it is from. Left out is only what nothing computes with, such as the
version of transformers that wrote it. This module knows no weights; a directory's config.json is models/load.py's.
"""

import json
from collections.abc import Mapping
from importlib.resources import files
from types import MappingProxyType

from transformers import Qwen2_5_VLConfig

from rollplex.errors import ConfigError

PRESETS: Mapping[str, str] = MappingProxyType({size: f"qwen2_5_vl_{size}.json" for size in ("3b", "7b", "32b", "72b")})
"""Name -> file of this package."""


def preset_config(name: str) -> Qwen2_5_VLConfig:
    """The published config of Qwen2.5-VL-3B, 7B, 32B or 72B-Instruct.

    Raises:
        ConfigError: there is no preset of this name.
    """
    if name not in PRESETS:
        raise ConfigError(f"{name!r} is no preset; presets: {', '.join(PRESETS)}")
    text = files(__name__).joinpath(PRESETS[name]).read_text(encoding="utf-8")
    return Qwen2_5_VLConfig.from_dict(json.loads(text)["config"])
