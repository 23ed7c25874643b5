"""A server on one machine loads nothing of the cluster."""

import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.unit

SCRIPT = """
import sys
from pathlib import Path
from semantic.entrypoints import bootstrap, server
from semantic.entrypoints.cli import app
from tests.http_server import make_settings
made = bootstrap.bootstrap(make_settings(Path(sys.argv[1])))
server.create_app(made)
made.memory.close(10)
print([name for name in sys.modules if name.startswith(("semantic.cluster", "psycopg", "ray"))])
"""


def test_a_single_server_does_not_import_the_cluster(tmp_path: Path) -> None:
    command = [sys.executable, "-c", SCRIPT, str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)  # noqa: S603 - our own
    assert done.stdout.strip().endswith("[]"), done.stdout + done.stderr
