"""Every kind of image value opens to the same picture; every other value has a reason."""

import base64
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import PIL.Image
import pytest

from rollplex.data.images import decode_image, find_image, image_size, list_images
from rollplex.errors import DataError

Encode = Callable[..., bytes]


def test_every_kind_of_value_is_the_same_picture(tmp_path: Path, encoded: Encode, picture: Any) -> None:
    path = tmp_path / "a b.png"
    path.write_bytes(encoded())
    values = [
        "a b.png",
        str(path),
        path,
        path.as_uri(),
        encoded(),
        bytearray(encoded()),
        {"bytes": encoded(), "path": "elsewhere.png"},
        {"bytes": None, "path": "a b.png"},
        "data:image/png;base64," + base64.b64encode(encoded()).decode(),
        picture(),
        np.asarray(picture()),
    ]
    for value in values:
        stored = find_image(value, str(tmp_path))
        np.testing.assert_array_equal(np.asarray(decode_image(stored)), np.asarray(picture()))
        assert image_size(stored, decode=False) == image_size(stored, decode=True) == (60, 50)


def test_paths_are_relative_to_the_folder_then_to_the_current_directory(
    tmp_path: Path, encoded: Encode, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "data").mkdir()
    (tmp_path / "x.png").write_bytes(encoded(10, 10))
    monkeypatch.chdir(tmp_path)
    assert find_image("x.png", "data") == "x.png"
    (tmp_path / "data" / "x.png").write_bytes(encoded(20, 20))
    assert find_image("x.png", "data") == "data/x.png"


@pytest.mark.parametrize(
    ("value", "reason"),
    [
        ("gone.png", "no such file"),
        ("x\0y", "no such file"),
        ("y" * 5000, "no such file"),
        ("https://example.org/a.png", "remote"),
        ({}, "neither bytes nor path"),
        (3, "of type int"),
        (None, "of type NoneType"),
        ("data:image/png,abc", "not base64"),
        ("data:image/png;base64,a", "broken base64"),
        (np.zeros((4, 4)), "must be uint8"),
        (np.zeros((4, 4, 2), dtype=np.uint8), "must be uint8"),
    ],
)
def test_other_values_have_a_reason(value: Any, reason: str, tmp_path: Path) -> None:
    with pytest.raises(DataError, match=reason):
        find_image(value, str(tmp_path))


@pytest.mark.parametrize("kind", ["PNG", "JPEG", "GIF", "WEBP"])
def test_a_truncated_image_is_found_when_decoded(kind: str, encoded: Encode) -> None:
    whole = encoded(200, 200, kind=kind)
    with pytest.raises(DataError):
        decode_image(whole[: len(whole) * 2 // 3])
    assert decode_image(whole).size == (200, 200)


def test_garbage_is_no_image() -> None:
    with pytest.raises(DataError, match="unknown or broken format"):
        image_size(b"garbage", decode=False)


def test_one_image_or_a_list(picture: Any) -> None:
    assert list_images(None) == list_images([None]) == []
    assert list_images([None, "a", None]) == ["a"]
    assert list_images("a.png") == ["a.png"]
    assert list_images(("a", "b")) == ["a", "b"]
    objects = np.empty(2, dtype=object)
    objects[:] = ["a", "b"]
    assert list_images(objects) == ["a", "b"]
    assert len(list_images(np.asarray(picture()))) == 1
    assert isinstance(list_images(picture())[0], PIL.Image.Image)
