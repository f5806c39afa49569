"""Every error that Rollplex raises on purpose.

    RollplexError
     +- ConfigError       a recipe or an override is wrong: names field, value and remedy   (also a ValueError)
     +- DataError         a row of the user's data is wrong: names file, row and reason     (also a ValueError)
     +- CheckpointError   weights or a run directory cannot be read, or do not fit the model
     +- RewardError       a reward function failed: names the function and the sample
     +- WorkerError       a worker process died or exceeded its time limit
     +- StaleStateError   something made with one policy version was used with another
     +- NumericsError     the model's numbers are not finite
     +- CapacityError     the work cannot fit into the given budget (blocks, tokens, bytes)

Whatever else is raised is a defect of Rollplex itself.
"""


class RollplexError(Exception):
    """Base of every error raised on purpose."""


class ConfigError(RollplexError, ValueError):
    """A recipe, an override or an argument is wrong."""


class DataError(RollplexError, ValueError):
    """A row of the user's data is wrong."""


class CheckpointError(RollplexError):
    """Weights or a run directory cannot be read, or do not fit the model."""


class RewardError(RollplexError):
    """A reward function failed, or returned something that is no reward."""


class WorkerError(RollplexError):
    """A worker process died or exceeded its time limit."""


class StaleStateError(RollplexError):
    """Something made with one policy version was used with another."""


class NumericsError(RollplexError):
    """The model's numbers are not finite."""


class CapacityError(RollplexError):
    """The work cannot fit into the given budget."""
