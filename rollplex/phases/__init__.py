"""The step as a graph of phases, and what executes it. No model code, no torch."""
