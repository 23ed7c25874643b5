"""Where models come from: a directory with config, weights and tokenizer.

`catalogue` lists those on this machine, and says which fit. `source` finds one: a path, a name, a
Hugging Face id, or a GGUF file, which `gguf` turns into such a directory once: its configuration by
`gguf_file`, its weights by `gguf_weights`, its tokenizer by `gguf_tokenizer`. `fingerprint` names
the model by its files, so that saved state is never used with another. `generation_config` reads
how its authors advise to sample it. `tokenizer` turns text into ids and back, and a conversation
into text by the model's own chat template.
"""
