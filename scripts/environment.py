"""Where a result was measured: written beside every committed number."""

import datetime
import os
import platform
import subprocess

import torch
import transformers


def environment() -> dict[str, object]:
    """Device, versions, commit and date."""
    device = torch.cuda.get_device_name() if torch.cuda.is_available() else f"CPU, {os.cpu_count()} cores"
    commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=False)
    return {
        "device": device,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "commit": os.environ.get("ROLLPLEX_COMMIT") or commit.stdout.strip() or "unknown",
        "date": datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%d"),
    }
