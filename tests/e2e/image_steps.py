"""What deploy/Dockerfile says, step by step and without Docker; run by `make deploy-check`.

Not collected by itself: it installs gigabytes. The base image, its user and its layers are not
tried: the Python is this one, and files lie in a temporary directory.
"""

import json
import os
import re
import shutil
import signal
import subprocess
import venv
from pathlib import Path

import httpx
import pytest

from tests.smoke.server_process import ServerProcess

pytestmark = pytest.mark.e2e

ROOT = Path(__file__).resolve().parents[2]
KEY = "a-key-of-this-test-alone"


def steps() -> list[tuple[str, str]]:
    """The instructions of the Dockerfile, in order."""
    text = (ROOT / "deploy/Dockerfile").read_text().replace("\\\n", " ")
    lines = [line for line in text.splitlines() if line and not line.startswith("#")]
    return [(word, rest) for word, _, rest in (line.partition(" ") for line in lines)]


def last(word: str) -> str:
    return [rest for found, rest in steps() if found == word][-1]


@pytest.fixture(scope="module")
def image(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with what is copied, and an environment with what is installed."""
    work = tmp_path_factory.mktemp("image")
    venv.create(work / "venv", with_pip=True)
    environment = make_environment(work)
    for word, rest in steps():
        if word == "ARG":
            name, _, value = rest.partition("=")
            environment.setdefault(name, value)
        elif word == "COPY":
            *sources, _ = rest.split()
            for source in sources:
                copy = shutil.copytree if (ROOT / source).is_dir() else shutil.copy2
                copy(ROOT / source, work / source)
        elif word == "RUN" and "pip install" in rest:
            subprocess.run(["/bin/sh", "-ec", rest], cwd=work, env=environment, check=True)  # noqa: S603
    return work


def make_environment(work: Path) -> dict[str, str]:
    kept = {k: v for k, v in os.environ.items() if not k.startswith(("SEMANTIC_", "PYTHON"))}
    return kept | {"PATH": f"{work / 'venv/bin'}:{os.environ['PATH']}", "HF_HUB_OFFLINE": "1"}


def test_what_is_installed_serves_is_healthy_and_stops(image: Path) -> None:
    environment = make_environment(image)
    environment |= dict(re.findall(r"(\w+)=(\S+)", last("ENV")))
    environment |= {"SEMANTIC_HOME": str(image / "home"), "SEMANTIC_API_KEY": KEY}
    environment |= {"SEMANTIC_PORT": os.environ.get("IMAGE_PORT", "8000")}
    command = [*json.loads(last("ENTRYPOINT")), *json.loads(last("CMD"))]
    program = shutil.which(command[0], path=environment["PATH"])
    assert program == str(image / "venv/bin" / command[0])
    log = image / "log"
    with log.open("w") as sink:
        process = subprocess.Popen(  # noqa: S603 - the image's entry point
            [program, *command[1:]], env=environment, cwd=image, stdout=sink, stderr=sink, text=True
        )
    server = ServerProcess(process, log)
    try:
        server.await_listening()
        server.await_ready()
        check_health(environment)
        body = {"messages": [{"role": "user", "content": "Hello."}], "max_tokens": 4}
        url, headers = f"{server.url}/v1/chat/completions", {"authorization": f"Bearer {KEY}"}
        assert httpx.post(url, json=body, timeout=300).status_code == 401
        reply = httpx.post(url, json=body, headers=headers, timeout=300)
        assert reply.raise_for_status().json()["choices"][0]["message"]["content"]
        process.send_signal(signal.Signals[last("STOPSIGNAL")])
        assert process.wait(30) == 0, server.output
    finally:
        process.kill()
        process.wait()


def check_health(environment: dict[str, str]) -> None:
    """Run the image's own check."""
    _, _, probe = last("HEALTHCHECK").partition("CMD ")
    command = json.loads(probe.replace(":8000/", f":{environment['SEMANTIC_PORT']}/"))
    subprocess.run(command, env=environment, check=True, timeout=60)  # noqa: S603
