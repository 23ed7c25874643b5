"""Blocks of KV cache: git's objects. A block's way, in order.

1. `store.py`: the engine seals a block here, and from then on it is known by its content.
2. `index.py`: the tree of all blocks, walked along a prompt's tokens; the page's map lists it.
3. `tiers.py`: where a block's parts are, one for each kind of layer: in memory, within the budget
   of `domain/pool.py`, and on disk. What is not written yet is dirty.
4. `writer.py`: one thread writes them to disk from a queue, a few read; `row_writer.py` writes rows
   to the ledger, and marks turns whose row and blocks are all on disk as durable.
5. `restore_plan.py`: for a prompt that begins alike, which parts restore how many of its tokens.
6. `loader.py`: has `writer.py` read those that are only on disk, and holds them in memory until the
   engine has loaded them.
7. `remote.py`: the object store that several machines share: uploads, and reads of others' blocks.

`eviction.py` decides what goes when the disk is full, and what nobody will need again; memory is
LRU, in `domain/pool.py`. One lock, of `tiers.py`, guards store, index and loader; store and loader
may be called on any thread.
"""
