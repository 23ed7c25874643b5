"""Models, tokenizers and files that the application drives."""
