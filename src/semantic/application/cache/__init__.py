"""The KV cache as content-addressed blocks, comparable to git's objects.

The modules, in reading order:

1. `store.py`: the public interface. The engine seals blocks here and plans restores.
2. `index.py`: the tree of all known blocks, searched by a prompt's tokens.
3. `tiers.py`: where the parts of a block are (one part per kind of layer): in memory, within the
   budget of `domain/pool.py`, and on disk. Parts that are not on disk yet are dirty. It owns the
   lock that guards store, index and itself, and it reads parts back for a restore.
4. `writer.py`: one thread writes files and then the ledger rows that refer to them; several threads
   read. A turn is durable when its row and all its blocks are on disk.
5. `restore_plan.py`: chooses the parts that restore the longest known prefix of a prompt, without
   those that are slower to read than to compute.
6. `eviction.py`: chooses the blocks to evict when the disk is full and those that are no longer
   needed, which `collector.py` drops. `domain/pool.py` evicts memory in LRU order.
7. `formats.py`: records which model and format computed the blocks of each root, and explains why
   the served model cannot use them.
8. `watch.py`: lists the blocks for the web page's map.
9. `pace.py`: pauses background work, so that requests do not wait for it.

All classes are thread-safe except the index.
"""
