"""Mechanism of the device: which one, what it can do, how much memory was used. Knows nothing of RL."""
