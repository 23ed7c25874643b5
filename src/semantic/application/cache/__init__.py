"""Blocks of attention state: git's objects. A block's way, in order.

The engine seals a block in the `store`, which knows it from then on by its content: the `index` is
a tree of all blocks, walked along a prompt's tokens. The block's parts, one for each kind of
layers, have their place in the `tiers`: in memory, within the budget of `domain/pool.py`, and on
disk, where the `writer` puts them from a queue, in a thread of its own; its `row_writer` puts rows
into the ledger, and marks turns whose row and blocks are all there as durable. When a prompt comes
that begins alike, the `restore_plan` says which parts bring a sequence how far; the `loader` reads
those that are on disk alone into memory, and holds them until the engine has them. Where several
machines share an object store, `remote` uploads what was written and brings what others uploaded.
What goes when memory or disk is full, and what nobody will need again, is all decided in
`eviction`. Only the store and the loader are asked from outside, on any thread; one lock guards
what they have.
"""
