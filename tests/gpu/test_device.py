"""The choice of a device."""

import pytest

from rollplex.errors import ConfigError
from rollplex.gpu.device import select_device


def test_a_device_that_is_none_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"run\.device = 'gpu': use \"auto\", \"cpu\" or \"cuda\""):
        select_device("gpu")
