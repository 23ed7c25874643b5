"""The key file: API keys, tenants and limits, written by `semantic keys` and editable by hand.

Each change replaces the whole file atomically, so that a server reads either the old or the new
version. The file contains hashes of the secrets, not the secrets.
"""

import contextlib
import fcntl
import json
import os
import secrets
import stat
import tempfile
from collections.abc import Callable, Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated, Literal

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationError

from semantic.adapters.validation import plain_reason
from semantic.domain.access import (
    ApiKey,
    KeyRing,
    Rate,
    TenantPolicy,
    new_secret,
    secret_digest,
)
from semantic.domain.agents import LOCAL_TENANT, MAX_WEIGHT, check_agent_id
from semantic.domain.errors import InvalidRequestError, SemanticError


def _check_tenant(name: str) -> str:
    try:
        check_agent_id(name, "tenant", "a tenant's name")
    except SemanticError as error:
        raise ValueError(error.message) from error
    return name


TenantName = Annotated[str, AfterValidator(_check_tenant)]
Count = Annotated[int, Field(ge=1, le=2**53)]
Digest = Annotated[str, Field(pattern="^sha256:[0-9a-f]{64}$")]
_MB = 2**20
# Kept in the home directory, because the key file may be elsewhere and its directory lost.
MARKER_FILE = "keys-required"


class _Entry(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class RateEntry(_Entry):
    """A rate limit; a field that is left out has no limit."""

    requests_per_minute: Count | None = None
    tokens_per_minute: Count | None = None

    def to_domain(self) -> Rate:
        return Rate(self.requests_per_minute, self.tokens_per_minute)


class TenantEntry(_Entry):
    """The limits and scheduling weight of a tenant."""

    weight: Annotated[float, Field(gt=0, le=MAX_WEIGHT)] = 1.0
    disk_quota_mb: Count | None = None
    max_concurrent: Count | None = None
    max_connections: Count | None = None
    key: RateEntry = RateEntry()
    agent: RateEntry = RateEntry()

    def to_domain(self) -> TenantPolicy:
        return TenantPolicy(
            weight=self.weight,
            disk_bytes=self.disk_quota_mb * _MB if self.disk_quota_mb else None,
            max_concurrent=self.max_concurrent,
            max_connections=self.max_connections,
            key_rate=self.key.to_domain(),
            agent_rate=self.agent.to_domain(),
        )


class KeyEntry(_Entry):
    """An issued key."""

    id: Annotated[str, Field(pattern="^[A-Za-z0-9_-]{1,64}$")]
    tenant: TenantName
    hash: Digest
    admin: bool = False
    note: str = ""
    created: datetime
    revoked: datetime | None = None
    rate: RateEntry | None = None

    def to_domain(self) -> ApiKey:
        return ApiKey(
            id=self.id,
            tenant=self.tenant,
            digest=self.hash,
            is_admin=self.admin,
            is_revoked=self.revoked is not None,
            rate=self.rate.to_domain() if self.rate else None,
        )


class KeyFile(_Entry):
    """The content of a key file; `limits` is the rate limit of all requests together."""

    version: Literal[1] = 1
    limits: RateEntry = RateEntry()
    tenants: dict[TenantName, TenantEntry] = {}
    keys: tuple[KeyEntry, ...] = ()

    def to_domain(self) -> KeyRing:
        return KeyRing(
            keys=tuple(key.to_domain() for key in self.keys),
            tenants={name: entry.to_domain() for name, entry in self.tenants.items()},
            rate=self.limits.to_domain(),
        )

    def with_key(
        self,
        tenant: str,
        limits: TenantEntry,
        *,
        is_admin: bool = False,
        note: str = "",
        rate: RateEntry | None = None,
    ) -> tuple["KeyFile", KeyEntry, str]:
        """Issue a key; returns the new file, the key, and its secret, which is not stored."""
        check_agent_id(tenant, "tenant", "a tenant's name")
        secret = new_secret()
        key = KeyEntry(
            id=f"key_{secrets.token_hex(4)}",
            tenant=tenant,
            hash=secret_digest(secret),
            admin=is_admin,
            note=note,
            created=_now(),
            rate=rate,
        )
        tenants = {**self.tenants, tenant: limits}
        return self.model_copy(update={"keys": (*self.keys, key), "tenants": tenants}), key, secret

    def without_key(self, key_id: str) -> "KeyFile":
        """Revoke a key; it stays in the list, marked as revoked."""
        if key_id not in {key.id for key in self.keys}:
            raise InvalidRequestError(
                f"no key {key_id!r}; `semantic keys ls` shows all keys.", param="id"
            )
        keys = tuple(
            key.model_copy(update={"revoked": key.revoked or _now()}) if key.id == key_id else key
            for key in self.keys
        )
        return self.model_copy(update={"keys": keys})


def _now() -> datetime:
    return datetime.now(UTC).replace(microsecond=0)


def load_key_ring(path: Path, marker: Path, api_key: str | None, admin_key: str | None) -> KeyRing:
    """Read all keys: those of the key file and those of the settings.

    Args:
        marker: A file that is created as soon as the key file has keys. From then on, a missing key
            file is an error: without it, the server would be open to everyone.
        api_key: A key of the tenant `local`, or its hash (`sha256:...`).
        admin_key: The same for an admin key.

    Raises:
        InvalidRequestError: the file is missing or invalid; the message says why.
    """
    file = _read(path)
    try:
        if file is None and marker.exists():
            raise InvalidRequestError(
                f"the key file {path} is missing, but this server had keys. Restore the file, "
                "or create keys with `semantic keys add`. To run without keys, delete "
                f"{marker}: everybody who can reach the server can then use it.",
                param="key_file",
            )
        if file is not None and file.keys and not marker.exists():
            marker.touch(0o600)
    except OSError as error:
        raise InvalidRequestError(
            f"{marker} cannot be read or created: {error.strerror}", param="home"
        ) from error
    ring = (file or KeyFile()).to_domain()
    own = tuple(
        ApiKey(f"settings.{name}", LOCAL_TENANT, _digest(secret), is_admin=name == "admin_key")
        for name, secret in (("api_key", api_key), ("admin_key", admin_key))
        if secret
    )
    return KeyRing((*ring.keys, *own), ring.tenants, ring.rate)


def _digest(secret: str) -> str:
    return secret if secret.startswith("sha256:") else secret_digest(secret)


def read_key_file(path: Path) -> KeyFile:
    """Read a key file; a missing one has no keys. Raises `InvalidRequestError` if it is invalid."""
    return _read(path) or KeyFile()


def _read(path: Path) -> KeyFile | None:
    try:
        with path.open("rb") as file:
            if os.fstat(file.fileno()).st_mode & (stat.S_IWGRP | stat.S_IWOTH):
                raise InvalidRequestError(
                    f"{path} can be written by others, who could add keys; run: chmod 600 {path}",
                    param="key_file",
                )
            content = file.read()
    except FileNotFoundError:
        return None
    except OSError as error:
        raise InvalidRequestError(
            f"the key file {path} cannot be read: {error.strerror}", param="key_file"
        ) from error
    try:
        return KeyFile.model_validate_json(content)
    except ValidationError as error:
        problem = error.errors()[0]
        place = ".".join(str(part) for part in problem["loc"]) or "the file"
        raise InvalidRequestError(
            f"the key file {path} is invalid: {place}: {plain_reason(problem)}", param="key_file"
        ) from error


def edit_key_file(path: Path, edit: Callable[[KeyFile], KeyFile]) -> None:
    """Change a key file atomically; a lock on its directory serializes changes.

    Raises:
        InvalidRequestError: the file cannot be read or written.
    """
    try:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        with _locked(path.parent) as directory:
            _replace(path, edit(read_key_file(path)))
            os.fsync(directory)  # so that the rename survives a power failure
    except OSError as error:
        raise InvalidRequestError(
            f"the key file {path} cannot be written: {error.strerror}", param="key_file"
        ) from error


@contextlib.contextmanager
def _locked(directory: Path) -> Iterator[int]:
    handle = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX)
        yield handle
    finally:
        os.close(handle)


def _replace(path: Path, content: KeyFile) -> None:
    text = json.dumps(content.model_dump(mode="json", exclude_none=True), indent=2) + "\n"
    handle, name = tempfile.mkstemp(dir=path.parent, prefix=f"{path.name}.")  # mode 0600
    try:
        with os.fdopen(handle, "w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        Path(name).replace(path)
    except BaseException:
        Path(name).unlink(missing_ok=True)
        raise
