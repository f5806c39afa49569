"""Attention arithmetic on plain tensors: no model, no state, no module."""
