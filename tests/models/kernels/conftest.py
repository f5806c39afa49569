"""Kernels run where there is a GPU, and in Triton's interpreter where there is none; chosen before Triton is loaded.

Three things that the interpreter of Triton 3.6 gets wrong are put right here.
"""

import os
from typing import Any

import numpy as np
import pytest
import torch

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"

    import triton.language as tl
    from triton.runtime import interpreter

    _patch_lang_tensor = interpreter._patch_lang_tensor
    _convert_float = interpreter._convert_float
    _create_dot = interpreter.InterpreterBuilder.create_dot

    def _patch_index_too(tensor: Any, scope: Any) -> None:
        """Loop bounds are arrays of one element, which NumPy 2.4 no longer takes for integers."""
        _patch_lang_tensor(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.item()))

    def _widened(handle: Any) -> Any:
        if handle.dtype.scalar != tl.bfloat16:
            return handle
        return interpreter.TensorHandle((handle.data.astype(np.uint32) << 16).view(np.float32), tl.float32)

    def _dot_of_bfloat16_too(builder: Any, a: Any, b: Any, *others: Any) -> Any:
        """bfloat16 is held as 16 bits, which the interpreter's dot multiplies as integers."""
        return _create_dot(builder, _widened(a), _widened(b), *others)

    def _rounding(data: Any, source: Any, target: Any, mode: Any) -> Any:
        """A cast to bfloat16 cuts, where the GPU rounds to the nearest."""
        if (source, target) != (tl.float32, tl.bfloat16):
            return _convert_float(data, source, target, mode)
        rounded = torch.from_numpy(np.ascontiguousarray(data).view(np.float32)).to(torch.bfloat16)
        return rounded.view(torch.int16).numpy().view(np.uint16).reshape(data.shape)

    interpreter._convert_float = _rounding
    interpreter._patch_lang_tensor = _patch_index_too
    interpreter.InterpreterBuilder.create_dot = _dot_of_bfloat16_too


@pytest.fixture
def device() -> torch.device:
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")
