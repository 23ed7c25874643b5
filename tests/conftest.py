"""Fixtures of all tests: the starter model, imported once, and Hypothesis profiles."""

import fcntl
import gc
import logging
import os
import random
import shutil
import signal
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from hypothesis import HealthCheck, settings

from tests.native_cache import NATIVE_DIRECTORY, share_native

if TYPE_CHECKING:
    from semantic.adapters.outbound.backends.torch.native.library import Library
    from semantic.adapters.outbound.backends.torch.native.variants import NativeBuild

# As in the server: idle OpenMP threads must sleep, since test processes share few cores.
os.environ.setdefault("GOMP_SPINCOUNT", "2000")
# With several processes per core, OpenMP threads would wait for each other at every barrier.
if int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1")) > 1:
    os.environ.setdefault("OMP_NUM_THREADS", "1")

# Other processes share the machine, so durations are meaningless. Every run tries the same
# examples, so that a change does not fail for a bug of an earlier one; nightly runs draw new ones.
settings.register_profile(
    "default",
    deadline=None,
    derandomize=True,
    max_examples=50,
    suppress_health_check=[HealthCheck.too_slow],
)
settings.register_profile(
    "nightly", settings.get_profile("default"), derandomize=False, max_examples=1000
)
settings.load_profile("default")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--shuffle", type=int, metavar="SEED", help="run the tests in random order")
    parser.addoption("--release", action="store_true", help="also check what a release needs")


def pytest_report_header(config: pytest.Config) -> list[str]:
    seed = config.getoption("--shuffle")
    return [] if seed is None else [f"shuffled: repeat with --shuffle {seed}"]


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Shuffles modules, then the tests of each, so that fixtures of a module are made once."""
    seed = config.getoption("--shuffle")
    if seed is None:
        return
    generator = random.Random(seed)  # noqa: S311 - an order, not a secret
    modules: dict[Path, list[pytest.Item]] = {}
    for item in items:
        modules.setdefault(item.path, []).append(item)
    order = list(modules.values())
    generator.shuffle(order)
    for tests in order:
        generator.shuffle(tests)
    items[:] = [item for tests in order for item in tests]


def pytest_collection_finish() -> None:
    """Keeps later garbage collections from scanning modules and collected tests again."""
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True)
def _usual_process() -> Iterator[None]:
    """Restores the umask and the signal handlers, which commands change for their process."""
    mask = os.umask(0o022)
    os.umask(mask)
    numbers = (signal.SIGHUP, signal.SIGINT, signal.SIGTERM)
    handlers = {number: signal.getsignal(number) for number in numbers}
    yield
    os.umask(mask)
    for number, handler in handlers.items():
        signal.signal(number, handler)


@pytest.fixture(autouse=True)
def _usual_logging() -> None:
    """Undoes changes to logging by earlier tests and by servers that they ran in this process.

    A server changes the root logger's level, and imported libraries may disable loggers. Each
    `setLevel` visits all loggers, of which libraries have thousands, so it is called where needed.
    """
    if logging.root.manager.disable != logging.NOTSET:
        logging.disable(logging.NOTSET)
    if logging.root.level != logging.WARNING:
        logging.root.setLevel(logging.WARNING)
    for name, logger in logging.root.manager.loggerDict.items():
        if name.startswith("semantic") and isinstance(logger, logging.Logger):
            logger.disabled, logger.propagate = False, True
            if logger.level != logging.NOTSET:
                logger.setLevel(logging.NOTSET)


@pytest.fixture(autouse=True)
def _same_numbers() -> None:
    """Seeds random weights, which must not depend on the tests that xdist ran before.

    Weights are drawn on the CPU; `torch.manual_seed` formats a stack for each other device.
    """
    if torch := sys.modules.get("torch"):
        torch.default_generator.manual_seed(0)
    if mlx := sys.modules.get("mlx.core"):
        mlx.random.seed(0)


@pytest.fixture
def own_logging() -> Iterator[logging.Logger]:
    """The root logger without handlers; closes handlers that a test adds and restores logging."""
    import structlog

    root = logging.getLogger()
    handlers, level = root.handlers[:], root.level
    root.handlers = []
    yield root
    for handler in root.handlers:
        handler.close()
    root.handlers = handlers
    root.setLevel(level)
    structlog.reset_defaults()


@pytest.fixture(scope="session")
def postgres_server() -> Iterator[str]:
    """The URL of a PostgreSQL server that runs for this test session."""
    from tests.postgres import running_postgres

    with running_postgres() as url:
        yield url


@pytest.fixture
def database_url(postgres_server: str) -> str:
    """The URL of an empty database."""
    from tests.postgres import new_schema

    return new_schema(postgres_server)


@pytest.fixture(scope="session")
def native_directory() -> Path:
    """Where native libraries are kept between test runs."""
    NATIVE_DIRECTORY.mkdir(parents=True, exist_ok=True)
    return NATIVE_DIRECTORY


@pytest.fixture(scope="session")
def native(native_directory: Path) -> "NativeBuild":
    """The native library of CPU kernels, as a server would choose it."""
    from semantic.adapters.outbound.backends.torch.native.variants import NativeBuild

    return NativeBuild(native_directory)


@pytest.fixture(scope="session")
def library(native: "NativeBuild") -> "Library":
    """The native library; skips the test if it is unavailable."""
    if (made := native.library()) is None:
        pytest.skip(f"no native library: {native.reason}")
    return made


@pytest.fixture(scope="session")
def starter_home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A home directory with the starter model, as after a first start."""
    home = tmp_path_factory.mktemp("home")
    share_native(home)
    shutil.copytree(_imported_once(tmp_path_factory), home / "models", copy_function=os.link)
    return home


def _imported_once(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Import the starter model in the first test process that needs it; the others wait."""
    from semantic.adapters.config.settings import STARTER_MODEL
    from semantic.adapters.outbound.models.source import LocalModelSource

    base = tmp_path_factory.getbasetemp()
    shared = base.parent if "PYTEST_XDIST_WORKER" in os.environ else base
    models = shared / "starter-models"
    with (shared / "starter.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        LocalModelSource(models, STARTER_MODEL).resolve(STARTER_MODEL, lambda _: None)
    return models


@pytest.fixture(scope="session")
def starter_model_dir(starter_home: Path) -> Path:
    """The starter model's directory."""
    return starter_home / "models" / "smollm2-135m-instruct"


@pytest.fixture(scope="session")
def tiny_starter_dir(starter_model_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny model with random weights and the starter's tokenizer: fast, with random replies."""
    from examples.custom_model import make_tiny_model

    return make_tiny_model(starter_model_dir, tmp_path_factory.mktemp("tiny") / "tiny-starter")
