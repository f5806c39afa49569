"""One text decoder with attention as an argument, and what surrounds it. Knows no phase, reward or loss."""
