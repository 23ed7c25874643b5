"""Every setting of the server, its bounds and its description.

`Settings` has the fields of `RuntimeSettings`, which the application defines, and its own.
"""

import re
from dataclasses import fields
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal, Self

from pydantic import Field, ValidationInfo, create_model, field_validator, model_validator
from pydantic_settings import BaseSettings, NoDecode, SettingsConfigDict

from semantic.adapters.validation import pydantic_fields
from semantic.application.settings import RuntimeSettings
from semantic.domain.access import MIN_SECRET_CHARS

ENV_PREFIX = "SEMANTIC_"
STARTER_MODEL = "smollm2-135m-instruct"
STARTER_NOTE = (
    "This is a demonstration model: it is fast, but its answers are poor. "
    "`semantic models recommend` lists better ones for this machine."
)
_LISTED = {
    "allowed_media_domains": (
        re.compile(r"(\*\.)?[\w.-]+(:\d{1,5})?|\[[0-9A-Fa-f:.]+\](:\d{1,5})?"),
        "a domain such as img.example or *.img.example, with a port unless it is 80 or 443",
    ),
    "allowed_hosts": (re.compile(r"[\w.-]+|\[[0-9A-Fa-f:.]+\]"), "a host name without a port"),
    "cors_origins": (
        re.compile(r"\*|null|[a-z][a-z0-9+.-]*://[^/\s]+"),
        "an origin such as https://a.example, or *",
    ),
}
_DIGEST = re.compile(r"sha256:[0-9a-f]{64}")
_LOCAL_HOSTS = frozenset({"127.0.0.1", "::1", "localhost"})

# 32 bytes in hexadecimal; `semantic cache export-key` prints one.
ExportKey = Annotated[str, Field(pattern="^[0-9a-f]{64}$")]


if TYPE_CHECKING:
    _RuntimeFields = BaseSettings  # read the fields through `Settings.runtime`
else:
    _RuntimeFields = create_model(
        "_RuntimeFields", __base__=BaseSettings, **pydantic_fields(fields(RuntimeSettings))
    )


class Settings(_RuntimeFields):
    """The server's settings; construct them with `load_settings`."""

    model_config = SettingsConfigDict(env_prefix=ENV_PREFIX, extra="forbid", frozen=True)

    host: str = Field("127.0.0.1", description="address to listen on")
    port: int = Field(8000, ge=0, le=65535, description="port to listen on; 0 selects a free port")
    allow_remote: bool = Field(False, description="allow connections from other machines")
    allowed_hosts: Annotated[tuple[str, ...] | None, NoDecode] = Field(
        None,
        description="accepted host names besides localhost, such as the public name of a proxy",
    )
    cors_origins: Annotated[tuple[str, ...] | None, NoDecode] = Field(
        None,
        description="origins of web pages that may use the server, besides those of this machine",
    )
    ollama: bool = Field(
        False, description="also listen on Ollama's port of this machine, for clients made for it"
    )
    ollama_port: int = Field(11434, ge=1, le=65535, description="the port for `ollama`")
    key_file: Path | None = Field(
        None, description="file of API keys; see `semantic keys` (default: HOME/keys.json)"
    )
    api_key: str | None = Field(
        None,
        repr=False,
        description="one key for all clients, or its sha256:..., besides those in key_file",
    )
    admin_key: str | None = Field(
        None, repr=False, description="a key for /admin, /v1/cache and /metrics, or its sha256:..."
    )
    tls_cert: Path | None = Field(None, description="certificate chain (PEM); enables HTTPS")
    tls_key: Path | None = Field(None, description="private key (PEM) of the certificate")
    max_body_mb: float = Field(32, gt=0, description="maximum size of a request body")
    max_image_mb: float = Field(20, gt=0, description="maximum size of an image file")
    max_image_mpixels: float = Field(
        40, gt=0, le=1000, description="maximum size of an image in million pixels"
    )
    max_images: int = Field(100, ge=0, description="maximum number of images in a request")
    allowed_media_domains: Annotated[tuple[str, ...] | None, NoDecode] = Field(
        None, description="domains from which images may be downloaded; others are refused"
    )
    ocr: Literal["auto", "off"] = Field(
        "auto",
        description="auto: a model that accepts only text gets the text recognised in images, if "
        "the extra ocr is installed",
    )
    max_connections: int = Field(
        1024, ge=1, description="maximum open connections; lower if the limit on open files is low"
    )
    read_timeout_s: float = Field(
        30, gt=0, description="maximum wait for a request's headers, or for more of its body"
    )
    write_timeout_s: float = Field(
        60, gt=0, description="disconnect a client that reads nothing for this long"
    )
    keep_alive_s: int = Field(
        60, ge=1, description="maximum idle time of a connection between requests"
    )
    shutdown_timeout_s: float = Field(
        3, gt=0, description="maximum duration of each phase of a stop"
    )

    model: str = Field(
        STARTER_MODEL,
        description="model to serve: a name, a directory, a GGUF file, a Hugging Face id",
    )
    draft_model: str = Field(
        "off",
        description="smaller model with the same tokenizer that drafts tokens: a name as for "
        "model; auto: the model's own MTP head, or one on this machine that fits and pays; "
        "off: none",
    )
    model_aliases: Annotated[list[str], NoDecode] = Field(
        [], description="other model names: gpt-* for the served model, name=model for another"
    )
    model_dirs: Annotated[list[Path], NoDecode] = Field(
        [], description="additional directories in which to look for models"
    )
    model_budget_mb: int = Field(
        0, ge=0, description="maximum size of a model's weights; 0: memory minus memory_budget_mb"
    )
    device_memory_mb: int = Field(
        0,
        ge=0,
        description="memory of the device that weights and running requests may use (mlx backend); "
        "0: all of a GPU's",
    )
    backend: Literal["auto", "torch", "mlx", "fake"] = Field(
        "auto",
        description="inference backend; auto: mlx on Apple Silicon or with its CUDA build",
    )
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = Field(
        "auto", description="number format of weights and the KV cache"
    )

    device: Literal["auto", "cpu", "cuda"] = Field(
        "auto", description="where the model runs; cuda needs the mlx backend"
    )
    weights: Literal["auto", "full", "int8", "int4"] = Field(
        "auto",
        description="auto keeps quantised weights; full expands them; int8 and int4 quantise",
    )
    native: Literal["auto", "off", "avx512vnni", "avxvnni", "avx2", "i8mm", "dotprod", "scalar"] = (
        Field(
            "auto",
            description="CPU kernels of torch; auto: the fastest supported; off: PyTorch's own",
        )
    )
    threads: int = Field(
        0,
        ge=0,
        le=1024,
        description="maximum CPU threads; PyTorch uses fewer while cores are busy; "
        "0: OMP_NUM_THREADS, else all",
    )
    shards: int = Field(
        1,
        ge=1,
        le=64,
        description="processes that each hold a part of the model, on their own devices",
    )
    shard_listen: str | None = Field(
        None, description="HOST:PORT where shards on other machines join with `semantic shard`"
    )
    shard_key: str | None = Field(
        None, repr=False, description="secret that shards on other machines must present"
    )
    pinned_copies: bool = Field(
        True, description="CUDA: copy KV cache and weights through pinned host memory"
    )

    home: Path = Field(
        Path("~/.semantic"), description="directory for everything the server writes"
    )
    cache_dir: Path | None = Field(
        None, description="directory of agents and their KV cache (default: HOME/cache)"
    )

    store: Literal["local", "shared"] = Field(
        "local", description="shared: several servers share a database and an object store"
    )
    database_url: str | None = Field(
        None, repr=False, description="PostgreSQL database of agents and turns, for store = shared"
    )
    objects_url: str | None = Field(
        None,
        description="object store of blocks (s3://, gs://, az://, file://), for store = shared",
    )
    lease_s: float = Field(
        15, gt=0, le=3600, description="how long an agent stays locked if its server crashes"
    )
    replicas: int = Field(
        1, ge=1, le=1000, description="semantic cluster: minimum number of servers"
    )
    max_replicas: int = Field(
        0,
        ge=0,
        le=1000,
        description="semantic cluster: maximum number of servers; 0: same as replicas",
    )
    replica_cpus: float = Field(
        1, ge=0, description="semantic cluster: CPUs that Ray reserves for each server"
    )
    replica_gpus: float = Field(
        0, ge=0, description="semantic cluster: GPUs for each server; may be a fraction"
    )
    upscale_delay_s: float = Field(
        10, ge=0, description="semantic cluster: how long load must last before servers are added"
    )
    downscale_delay_s: float = Field(
        300,
        ge=0,
        description="semantic cluster: how long servers must be idle before some are stopped",
    )
    ray_address: str | None = Field(
        None,
        description="semantic cluster: HOST:PORT of a running Ray, or auto; if not set, starts Ray",
    )
    durability: Literal["none", "write_behind", "sync"] = Field(
        "write_behind",
        description="none keeps nothing on disk; sync answers after a turn or change is on disk",
    )
    tenant_disk_quota_mb: int = Field(
        0, ge=0, description="maximum size of a tenant's agents, turns and KV cache; 0: no limit"
    )
    kv_bits: Literal[16, 8, 4] = Field(
        16, description="KV cache on disk: 16 as computed (32 bits in float32), or 8 or 4 bits"
    )
    orphan_ttl_h: float = Field(
        168,
        ge=0,
        description="delete orphans (unused blocks and turns that no agent reaches) after this",
    )
    upkeep_interval_s: float = Field(
        60, gt=0, description="how often expired agents are deleted and the ledger is backed up"
    )
    trusted_export_keys: dict[str, ExportKey] = Field(
        {},
        repr=False,
        description="export keys of other servers, by name; their exports keep their KV cache",
    )

    encryption_key_file: Path | None = Field(
        None, description="file with 64 hexadecimal digits; encrypts conversations and the KV cache"
    )
    encryption_key_command: str | None = Field(
        None,
        description="command that prints those digits, such as a keyring's; run without a shell",
    )

    repairs: Path | None = Field(
        None, description="TOML file of rules that repair volatile prompts; see docs/volatile.md"
    )
    request_timeout_s: float = Field(600, gt=0, description="maximum duration of a request")
    hang_timeout_s: float = Field(
        120, gt=0, description="a device call that takes this long counts as hung"
    )

    log_format: Literal["auto", "json", "pretty"] = Field(
        "auto", description="pretty on a terminal, JSON elsewhere"
    )
    log_file_mb: float = Field(10, gt=0, description="a log file is rotated at this size")
    log_files: int = Field(5, ge=1, description="rotated log files to keep")
    log_prompts: bool = Field(
        False, description="log request bodies; without it no log contains a prompt's text"
    )
    otel_endpoint: str | None = Field(
        None,
        pattern="^https?://",
        description="OpenTelemetry collector that receives traces, such as http://localhost:4318",
    )
    mcp_max_branches: int = Field(
        16, ge=0, le=10_000, description="forks of one agent that models may make through MCP"
    )
    mcp_max_depth: int = Field(
        4, ge=0, le=100, description="longest chain of forks of forks made through MCP"
    )
    compaction_instructions: str = Field(
        "", description="message that asks for a summary; empty: the server's own text"
    )
    compaction_keep_turns: int = Field(
        2, ge=0, le=1000, description="latest turns that compaction keeps as they are"
    )
    compaction_max_tokens: int = Field(
        2048, ge=1, le=131_072, description="longest summary, in tokens"
    )
    otel_sample_ratio: float = Field(
        1.0,
        ge=0,
        le=1,
        description="share of requests to trace, among those that arrive without a trace",
    )

    @field_validator("kv_bits", mode="before")
    @classmethod
    def _read_number(cls, value: object) -> object:
        # The environment and the command line provide text only.
        return int(value) if isinstance(value, str) and value.isdecimal() else value

    @field_validator(*_LISTED, "model_aliases", "model_dirs", mode="before")
    @classmethod
    def _read_list(cls, value: object) -> object:
        # The environment provides text only: a comma-separated list.
        return [part.strip() for part in value.split(",")] if isinstance(value, str) else value

    @field_validator(*_LISTED)
    @classmethod
    def _require_listed(
        cls, value: tuple[str, ...] | None, info: ValidationInfo
    ) -> tuple[str, ...] | None:
        pattern, noun = _LISTED[info.field_name or ""]
        for one in value or ():
            if not pattern.fullmatch(one):
                raise ValueError(f"{one!r} is not {noun}")
        return value

    @field_validator("api_key", "admin_key", "shard_key")
    @classmethod
    def _require_secret(cls, value: str | None) -> str | None:
        if value is None or _DIGEST.fullmatch(value):
            return value
        if len(value) < MIN_SECRET_CHARS or not value.isascii() or not value.isprintable():
            raise ValueError(
                f"a key has at least {MIN_SECRET_CHARS} printable ASCII characters; "
                "`semantic keys add` creates one. A client's key belongs in "
                "SEMANTIC_CLIENT_KEY"
            )
        return value

    @field_validator("home", "cache_dir", mode="before")
    @classmethod
    def _require_name(cls, value: object) -> object:
        # An empty path would mean the current directory.
        if isinstance(value, str) and not value.strip():
            raise ValueError("it must name a directory")
        return value

    @model_validator(mode="after")
    def _require_consent(self) -> Self:
        if self.is_remote and not self.allow_remote:
            raise ValueError(
                f"host {self.host} can be reached from other machines; add --allow-remote to "
                "permit it, and create a key for each user: semantic keys add --tenant NAME"
            )
        if (self.tls_cert is None) != (self.tls_key is None):
            raise ValueError("tls_cert and tls_key must be set together")
        if self.ollama and self.tls_cert is not None:
            raise ValueError("ollama needs plain HTTP: leave tls_cert out, or ollama")
        if (self.shard_listen is None) != (self.shard_key is None):
            raise ValueError("shard_listen and shard_key must be set together")
        if self.encryption_key_file is not None and self.encryption_key_command is not None:
            raise ValueError("set encryption_key_file or encryption_key_command, not both")
        if 0 < self.max_replicas < self.replicas:
            raise ValueError("max_replicas must be 0 or at least replicas")
        return self

    @model_validator(mode="after")
    def _require_shared_places(self) -> Self:
        has_places = self.database_url is not None and self.objects_url is not None
        if self.store == "local":
            if self.database_url is not None or self.objects_url is not None:
                raise ValueError("database_url and objects_url need store = shared")
            return self
        if not has_places:
            raise ValueError("store = shared needs database_url and objects_url")
        if self.durability == "none":
            raise ValueError("store = shared keeps copies on disk: durability must not be none")
        if self.encryption_key_file is not None or self.encryption_key_command is not None:
            raise ValueError(
                "store = shared does not encrypt what it shares: let the database and the object "
                "store do so, and leave encryption_key_file and encryption_key_command out"
            )
        return self

    @property
    def runtime(self) -> RuntimeSettings:
        return RuntimeSettings(
            **{entry.name: getattr(self, entry.name) for entry in fields(RuntimeSettings)}
        )

    @property
    def is_remote(self) -> bool:
        """Whether other machines can reach the address."""
        return self.host not in _LOCAL_HOSTS

    @property
    def effective_key_file(self) -> Path:
        return self.key_file.expanduser() if self.key_file else self.home_dir / "keys.json"

    @property
    def home_dir(self) -> Path:
        return self.home.expanduser()

    @property
    def effective_cache_dir(self) -> Path:
        return self.cache_dir.expanduser() if self.cache_dir else self.home_dir / "cache"

    @property
    def export_key_file(self) -> Path:
        """The file with the key that signs agents exported by this installation."""
        return self.home_dir / "export.key"

    @property
    def pack_key_files(self) -> tuple[Path, Path]:
        """The file with the key that signs cache packs, and the file of trusted public keys."""
        return self.home_dir / "pack.key", self.home_dir / "pack_keys"
