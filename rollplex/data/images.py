"""What an image value may be, and how to open it.

    path, file:// URL            relative to the data file's folder, then to the current directory
    bytes, {"bytes", "path"}     an encoded image (bytes win where both are given)
    data:...;base64,...          an encoded image
    PIL image, numpy array       decoded already; arrays are uint8 [H, W] or [H, W, 3 or 4]

An image is opened from its header, and decoded only when its pixels are wanted. Nothing is fetched from a network.
"""

import base64
import binascii
import io
from collections.abc import Mapping
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlparse

import numpy as np
import PIL.Image

from rollplex.errors import DataError
from rollplex.models.processor import upright_rgb

Stored = str | bytes | PIL.Image.Image
"""An image as found: the path of an existing file, encoded bytes, or a decoded picture."""


def list_images(value: Any) -> list[Any]:
    """A column's value as a list of image values; None is no image, in a list neither."""
    if value is None:
        return []
    if isinstance(value, np.ndarray) and value.dtype == object:
        value = value.tolist()
    return [item for item in value if item is not None] if isinstance(value, (list, tuple)) else [value]


def find_image(value: Any, folder: str) -> Stored:
    """Turn an image value into a path that exists, bytes, or a picture.

    Raises:
        DataError: the value is of no known kind, or there is no such file (reason only).
    """
    if isinstance(value, Mapping):
        content, path = value.get("bytes"), value.get("path")
        if content is None and path is None:
            raise DataError("is a struct with neither bytes nor path")
        value = path if content is None else content
    if isinstance(value, (bytes, bytearray, memoryview)):
        return bytes(value)
    if isinstance(value, PIL.Image.Image):
        return value
    if isinstance(value, np.ndarray):
        return _from_array(value)
    if isinstance(value, Path):
        value = str(value)
    if not isinstance(value, str):
        raise DataError(f"is of type {type(value).__name__}; use a path, bytes, a data URL, a PIL image or an array")
    if value.startswith("data:"):
        return _from_data_url(value)
    return _from_path(value, folder)


def open_image(stored: Stored) -> PIL.Image.Image:
    """Open an image from its header; a decoded picture is returned as it is. Raises DataError (reason only)."""
    if isinstance(stored, PIL.Image.Image):
        return stored
    try:
        return PIL.Image.open(io.BytesIO(stored) if isinstance(stored, bytes) else stored)
    except Exception as error:  # Pillow's readers raise whatever a broken file provokes
        raise DataError(f"cannot be read as an image: {_without_address(error)}") from error


def decode_image(stored: Stored) -> PIL.Image.Image:
    """Open an image and decode it wholly, upright and RGB. Raises DataError (reason only)."""
    with open_image(stored) as picture:
        try:
            return upright_rgb(picture)
        except Exception as error:  # as above
            raise DataError(f"cannot be decoded: {_without_address(error)}") from error


def image_size(stored: Stored, decode: bool) -> tuple[int, int]:
    """(width, height) in pixels. `decode` reads the whole image, which finds a truncated file."""
    if decode:
        return decode_image(stored).size
    if isinstance(stored, PIL.Image.Image):
        return stored.size
    with open_image(stored) as picture:
        return picture.size


def _from_array(value: "np.ndarray[Any, Any]") -> PIL.Image.Image:
    if value.dtype != np.uint8 or not (value.ndim == 2 or (value.ndim == 3 and value.shape[2] in (3, 4))):
        raise DataError(f"is an array {value.dtype}{list(value.shape)}; arrays must be uint8 [H, W] or [H, W, 3 or 4]")
    return PIL.Image.fromarray(value)


def _from_data_url(value: str) -> bytes:
    header, separator, content = value.partition(",")
    if not separator or not header.endswith(";base64"):
        raise DataError(f"is a data URL that is not base64 ({header[:40]!r})")
    try:
        return base64.b64decode(content, validate=True)
    except binascii.Error as error:
        raise DataError(f"is a data URL with broken base64: {error}") from error


def _from_path(value: str, folder: str) -> str:
    scheme = value.partition("://")[0].lower()
    if scheme in ("http", "https", "s3", "gs", "hf", "ftp"):
        raise DataError(f"{value!r} is remote; download it and give its path")
    path = Path(unquote(urlparse(value).path)) if scheme == "file" else Path(value)
    for candidate in (Path(folder) / path, path):
        try:
            if candidate.is_file():
                return str(candidate)
        except (OSError, ValueError):  # too long for a path, or holds a null character
            break
    places = "" if path.is_absolute() else f" in {folder!r} or in the current directory"
    raise DataError(f"{value[:200]!r}: there is no such file{places}")


def _without_address(error: Exception) -> str:
    if isinstance(error, PIL.UnidentifiedImageError):
        return "unknown or broken format"
    return str(error) or type(error).__name__
