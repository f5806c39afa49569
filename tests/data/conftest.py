"""A checkpoint, pictures and a recipe for the data tests."""

import io
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import PIL.Image
import pytest

from rollplex.config import Config, parse_config
from tests.data.pools import InlinePool
from tests.models.processor_checkpoint import write_processor_checkpoint


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_processor_checkpoint(tmp_path_factory.mktemp("checkpoint"))


@pytest.fixture
def recipe(checkpoint: Path) -> Callable[..., Config]:
    def make(train: str | Path, **data: Any) -> Config:
        return parse_config({"model": {"path": str(checkpoint)}, "data": {"train": str(train), **data}})

    return make


@pytest.fixture
def pool() -> InlinePool:
    return InlinePool()


@pytest.fixture
def picture() -> Callable[..., PIL.Image.Image]:
    def make(width: int = 60, height: int = 50, seed: int = 0) -> PIL.Image.Image:
        values = np.random.default_rng(seed).integers(0, 256, (height, width, 3), dtype=np.uint8)
        return PIL.Image.fromarray(values)

    return make


@pytest.fixture
def encoded(picture: Callable[..., PIL.Image.Image]) -> Callable[..., bytes]:
    def make(width: int = 60, height: int = 50, seed: int = 0, kind: str = "PNG") -> bytes:
        buffer = io.BytesIO()
        picture(width, height, seed).save(buffer, kind)
        return buffer.getvalue()

    return make
