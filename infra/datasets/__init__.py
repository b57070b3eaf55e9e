"""Prompt data in verl's columns: files and folders, their rows, and the order in which steps take them."""

from infra.datasets.load import load_prompts, load_run_prompts, load_train_prompts
from infra.datasets.prompts import PromptDataset, PromptRow

__all__ = ["PromptDataset", "PromptRow", "load_prompts", "load_run_prompts", "load_train_prompts"]
