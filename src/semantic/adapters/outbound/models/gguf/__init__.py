"""Converts a GGUF file, once, into an ordinary Hugging Face model directory.

1. `importing.py` builds the directory: atomically, and never over a directory of the user's.
2. `header.py` opens the file, or the parts of a split one, and reads metadata.
3. `architectures.py` lists what can be imported, and `hybrids.py` the architectures with recurrent
   layers. Both consist of the parts and keys in `layers.py`.
4. `config.py` builds the config, and `rope.py` its values about RoPE.
5. `tensors.py` finds the tensors of each layer and writes them: `weights.py` reads them, quantised
   matrices stay quantised, and `restoring.py` undoes what llama.cpp's conversion did to them.
6. `vocabulary.py` rebuilds the tokenizer, which splits text as `splitting.py` says.
"""
