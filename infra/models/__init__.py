"""Models, tokenizers and LoRA adapters, from Hugging Face folders."""

from infra.models.load import build_meta_model, load_model, load_tokenizer
from infra.models.lora import add_adapter

__all__ = ["add_adapter", "build_meta_model", "load_model", "load_tokenizer"]
