"""Models: one text decoder with attention as an argument, and what surrounds it. Knows nothing of phases, rewards or losses."""
