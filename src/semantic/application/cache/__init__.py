"""The KV cache as content-addressed blocks, comparable to git's objects.

The modules, in reading order:

1. `store.py`: the public interface. The engine seals blocks here and plans restores.
2. `index.py`: the tree of all known blocks, searched by a prompt's tokens. The web page's map lists
   its nodes.
3. `tiers.py`: where the parts of a block are (one part per kind of layer): in memory, within the
   budget of `domain/pool.py`, and on disk. Parts that are not on disk yet are dirty.
4. `writer.py`: one thread writes files from a queue, several threads read. `row_writer.py` writes
   ledger rows and marks a turn as durable when its row and all its blocks are on disk.
5. `restore_plan.py`: chooses the parts that restore the longest known prefix of a prompt.
6. `loader.py`: reads parts from disk through `writer.py` and holds them in memory until the engine
   has loaded them.
7. `formats.py`: records which model and format computed the blocks of each root, and explains why
   the served model cannot use them.

`eviction.py` chooses the blocks to evict when the disk is full and those that are no longer needed;
memory is evicted in LRU order by `domain/pool.py`. The lock of `tiers.py` guards store, index and
loader. Store and loader are thread-safe.
"""
