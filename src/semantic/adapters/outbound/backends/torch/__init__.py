"""Hugging Face's models by PyTorch.

`loading` chooses device, number format and threads, and puts our attention into the library's
model; `grouped` loads weights that stay in 4 or 8 bits, `shares` a rank's share of a model; on a
CPU that computes in bfloat16, `cpu` replaces slow and inexact modules. In a step `threads` says how
many cores are free, and `backend` packs all chunks into one row; in each layer `attention` appends
the row's keys and values to each sequence's buffers and attends within it; `backend` draws the
tokens, and copies buffers to the host and back, on CUDA by `copies`. On an ARM CPU with a compiler,
`native` builds a small C library, and `decoding` runs whole steps of Llama-like models in one call
of it; `plain` builds these from their files, without the library, whose import takes most of a
start.
"""
