"""Prompts from the user's files: JSONL, parquet, or a Python function that returns rows.

    rows     where rows are, and how to get one                       open_rows
    images   what an image value may be, and how to open it
    prompts  one row -> conversation, images, columns -> `Prompt`     runs in worker processes
    loader   every row checked once; batches prepared ahead of need   load_dataset, PromptLoader, eval_prompts

It knows no model, no reward and no step: what a prompt becomes in tokens is `rollplex.models.processor`'s.
"""

from rollplex.data.loader import BadRow, Dataset, PromptLoader, eval_prompts, load_dataset

__all__ = ["BadRow", "Dataset", "PromptLoader", "eval_prompts", "load_dataset"]
