"""One module per claim; each run prints one JSON object as its last line."""
