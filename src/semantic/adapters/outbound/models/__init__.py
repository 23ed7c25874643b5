"""Model directories with config, weights and tokenizer, and where they come from.

1. `catalogue.py` lists the models on this machine and whether they fit into memory, and deletes
   them; `usage.py` protects those that a server uses. `description.py` says what a model's files
   tell about it. `known.py` reads the table of published
   models, and `machine.py` measures which of them suit this machine.
2. `source.py` finds a model by path, name or Hugging Face id; `hub.py` downloads it. `gguf/`
   converts a GGUF file into a model directory once, and `starter_vision/` adds a vision tower to
   the starter model.
3. `fingerprint.py` identifies the model by its files, so that stored KV cache is never used with
   another; `compute_choices.py` stores the dtype that was chosen for it on this machine;
   `generation_config.py` reads its recommended sampling parameters.
4. `tokenizer.py` converts text to token ids and back. `chat_template.py` renders a conversation
   with the model's own chat template, in a process with limits.
"""
