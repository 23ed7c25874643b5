"""Blocks in an object store that all servers share: S3, GCS, Azure, or a directory.

An object has the bytes of a block part's file. It is created once and never changed: two writers of
the same name write the same content. The shared index determines which objects are valid.
"""

import contextlib
import datetime
from collections.abc import Iterator

import obstore
from obstore.exceptions import AlreadyExistsError, BaseError
from obstore.store import MemoryStore, ObjectStore, from_url

from semantic.domain.blocks import BlockName, PartKey
from semantic.domain.errors import (
    CacheCorruptionError,
    CachePersistenceError,
    InvalidRequestError,
)
from semantic.domain.spec import LayerKind

_BLOCKS = "blocks/"
_CLOCK = "collector-clock"
_KINDS = {kind.value: kind for kind in LayerKind}


def open_store(url: str) -> ObjectStore:
    """Open an object store: ``s3://bucket/prefix``, ``gs://…``, ``az://…``, ``file:///…``.

    Credentials and regions come from the environment, as for the vendors' own tools.

    Raises:
        InvalidRequestError: the URL does not name an object store.
    """
    try:
        if url.startswith("memory:"):
            return MemoryStore()
        if url.startswith("file:"):
            return from_url(url, mkdir=True)
        return from_url(url)
    except (BaseError, ValueError, OSError) as error:
        raise InvalidRequestError(
            f"{url} cannot be opened as an object store: {error}", param="objects_url"
        ) from error


class ObjectBlocks:
    """`ObjectsPort` over one store. Thread-safe."""

    def __init__(self, store: ObjectStore) -> None:
        self._store = store

    def put(self, key: PartKey, content: memoryview) -> None:
        with _refusal("write"), contextlib.suppress(AlreadyExistsError):
            obstore.put(self._store, _path(key), bytes(content), mode="create")

    def get(self, key: PartKey) -> memoryview:
        with _refusal("read"):
            try:
                return memoryview(obstore.get(self._store, _path(key)).bytes().to_bytes())
            except FileNotFoundError as error:
                raise CacheCorruptionError("the object is missing") from error

    def delete(self, key: PartKey) -> None:
        with _refusal("delete"), contextlib.suppress(FileNotFoundError):
            obstore.delete(self._store, _path(key))

    def older_than(self, age_s: float) -> Iterator[list[PartKey]]:
        """Write a small object to read the store's own clock, then yield keys page by page."""
        with _refusal("list"):
            obstore.put(self._store, _CLOCK, b"")
            now = obstore.head(self._store, _CLOCK)["last_modified"]
            before = now - datetime.timedelta(seconds=age_s)
            for page in obstore.list(self._store, prefix=_BLOCKS):
                old = [_key(meta["path"]) for meta in page if meta["last_modified"] <= before]
                yield [key for key in old if key is not None]


def _path(key: PartKey) -> str:
    name, kind = key
    digits = name.hex()
    return f"{_BLOCKS}{digits[:2]}/{digits}.{kind.value}"


def _key(path: str) -> PartKey | None:
    digits, _, kind = path.rpartition("/")[2].partition(".")
    try:
        return BlockName(bytes.fromhex(digits)), _KINDS[kind]
    except (ValueError, KeyError):
        return None


@contextlib.contextmanager
def _refusal(verb: str) -> Iterator[None]:
    try:
        yield
    except AlreadyExistsError:
        raise
    except (BaseError, OSError) as error:
        raise CachePersistenceError(f"could not {verb} an object: {error}") from error
