"""Where models come from: a directory with config, weights and tokenizer.

1. `catalogue.py` lists the models on this machine, and says which fit.
2. `source.py` finds one by path, name or Hugging Face id. `gguf.py` converts a GGUF file into such
   a directory once: `gguf_file.py` reads its configuration, `gguf_weights.py` its weights,
   `gguf_tokenizer.py` its tokenizer.
3. `fingerprint.py` identifies the model by its files, so that saved state is never used with
   another; `generation_config.py` reads the sampling that its authors advise.
4. `tokenizer.py` turns text into ids and back, and a conversation into text with the model's own
   chat template.
"""
