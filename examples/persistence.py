"""An agent that survives a restart and continues without recomputing its conversation.

It starts servers of its own and stops them: python -m examples.persistence [SERVER OPTIONS]
"""

import contextlib
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import httpx

from examples.client import call, connect, say


@contextlib.contextmanager
def server(home: Path, *options: str) -> Iterator[httpx.Client]:
    """Run a server on a free port until the block ends."""
    log = home / "server.log"
    command = [sys.executable, "-m", "semantic", "serve", "--port", "0", "--home", str(home)]
    with log.open("w") as sink:
        process = subprocess.Popen([*command, *options], stdout=sink, stderr=sink)  # noqa: S603
    try:
        with connect(_address(log, process)) as http:
            while http.get("/health/ready").status_code != 200:
                time.sleep(0.1)
            yield http
    finally:
        process.send_signal(signal.SIGINT)
        process.wait(30)


def _address(log: Path, process: "subprocess.Popen[bytes]") -> str:
    while process.poll() is None:
        for line in log.read_text().splitlines():
            if "listening" in line:
                return line.split()[1]
        time.sleep(0.05)
    raise RuntimeError(log.read_text())


def main() -> None:
    """Run the example."""
    options = sys.argv[1:]
    with tempfile.TemporaryDirectory() as directory:
        home = Path(directory)
        with server(home, *options) as http:
            system = "You remember what you are told. " * 10
            call(http, "POST", "/v1/agents", json={"id": "memory", "system": system})
            print("before:", say(http, "memory", "My name is Ada.")["text"].strip()[:80])
            tokens = call(http, "GET", "/v1/agents/memory")["tokens"]
        print("the server has stopped; the conversation has", tokens, "tokens")
        with server(home, *options) as http:
            reply = say(http, "memory", "What is my name?")
            usage = reply["usage"]
            print("after:", reply["text"].strip()[:80])
            print(f"reused {usage['cached_tokens']} of {usage['prompt_tokens']} prompt tokens")


if __name__ == "__main__":
    main()
