"""What all tests share: the starter model, imported once, and Hypothesis profiles."""

import fcntl
import gc
import logging
import os
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

# As in the server: idle OpenMP threads must sleep, since test processes share few cores.
os.environ.setdefault("GOMP_SPINCOUNT", "2000")
# Threads of two processes on two cores wait for each other at every barrier.
if int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1")) > 1:
    os.environ.setdefault("OMP_NUM_THREADS", "1")

# Others share the machine, so that no time tells anything. Every run tries the same examples, and
# a change is not refused for what an earlier one left; new ones are drawn at night.
settings.register_profile(
    "default", deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow]
)
settings.register_profile(
    "nightly", settings.get_profile("default"), derandomize=False, max_examples=1000
)
settings.load_profile("default")


def pytest_collection_finish() -> None:
    """Let no later collection of garbage go through the modules and all the tests once more."""
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True)
def _usual_umask() -> Iterator[None]:
    """The command changes it for its process, which tests that call it are in too."""
    mask = os.umask(0o022)
    os.umask(mask)
    yield
    os.umask(mask)


@pytest.fixture(autouse=True)
def _same_numbers() -> None:
    """Random weights do not depend on the tests before, which a worker of several chooses."""
    if torch := sys.modules.get("torch"):
        torch.manual_seed(0)
    if mlx := sys.modules.get("mlx.core"):
        mlx.random.seed(0)


@pytest.fixture
def own_logging() -> Iterator[logging.Logger]:
    """The root logger without handlers; what a test gives it is closed, and all is as before."""
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
    """The URL of a PostgreSQL that is there for this test run."""
    from tests.postgres import running_postgres

    with running_postgres() as url:
        yield url


@pytest.fixture
def database_url(postgres_server: str) -> str:
    """The URL of an empty database."""
    from tests.postgres import new_schema

    return new_schema(postgres_server)


@pytest.fixture(scope="session")
def starter_home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A home directory with the starter model in it, as the first start makes it."""
    home = tmp_path_factory.mktemp("home")
    shutil.copytree(_imported_once(tmp_path_factory), home / "models", copy_function=os.link)
    return home


def _imported_once(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Import the starter model in the first test process that asks for it."""
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
    """A tiny model with random weights and the starter's tokenizer: fast, and talks nonsense."""
    from examples.custom_model import make_tiny_model

    return make_tiny_model(starter_model_dir, tmp_path_factory.mktemp("tiny") / "tiny-starter")
