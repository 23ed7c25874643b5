"""Where models come from: files, tokenizers, templates."""
