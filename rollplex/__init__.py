"""Rollplex: a GPU runtime for RL post-training of vision-language models. START HERE: rollplex/step.py."""

from rollplex.config import Config, load_config
from rollplex.errors import RollplexError

__version__ = "0.1.0"
__all__ = ["Config", "RollplexError", "__version__", "load_config"]
