"""Installs and serves as a user without a checkout: `pipx install semantic-server[torch]`.

Builds this machine's wheel, installs it by pipx into an empty home where no C compiler is on the
path, serves the starter model from there with the library inside the wheel, and asks README's
question. Run by `make install-test`.
"""

import os
import platform
import re
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import httpx

ROOT = Path(__file__).resolve().parents[2]
PORT = os.environ.get("PORT", "8000")
QUESTION = "What is the capital of France? Answer in one sentence."


def main() -> int:
    """Install, serve, ask; 0 if the answer is right."""
    with tempfile.TemporaryDirectory(prefix="semantic-install-") as name:
        place = Path(name)
        home = place / "home"
        home.mkdir()
        kept = {key: value for key, value in os.environ.items() if key.startswith("PIP_")}
        programs = without_compilers(place / "bin")
        env = {**kept, "HOME": str(home), "PATH": f"{home}/.local/bin:{programs}"}
        tools = sys.argv[1]
        say("building this machine's wheel")
        source = {**os.environ, "PYTHONPATH": str(ROOT / "src")}
        run(tools, ROOT / "hatch_build.py", "--out", place, this_platform(), env=source)
        (wheel,) = place.glob("*.whl")
        run(sys.executable, "-m", "venv", place / "venv", env=env)
        run(place / "venv" / "bin" / "pip", "install", "-q", "pipx", env=env)
        say(f"installing {wheel.name} with pipx")
        limits = f"--pip-args=--constraint {ROOT / 'constraints.txt'}"
        pipx = (place / "venv" / "bin" / "pipx", "install", "--python", sys.executable)
        run(*pipx, limits, f"{wheel}[torch]", env=env)
        return serve_and_ask(home, env)


def this_platform() -> str:
    """The tag of this machine's wheel."""
    if sys.platform == "darwin":
        return "macosx_11_0_arm64"
    libc = "manylinux_2_17" if platform.libc_ver()[0] == "glibc" else "musllinux_1_2"
    return f"{libc}_{platform.machine()}"


def without_compilers(directory: Path) -> Path:
    """A directory with links to all of the system's programs but C compilers."""
    directory.mkdir()
    compiler = re.compile(r"(.*-)?(cc|c\+\+|gcc|g\+\+|clang|clang\+\+|c89|c99|tcc)(-[\d.]+)?$")
    for program in [*Path("/bin").iterdir(), *Path("/usr/bin").iterdir()]:
        link = directory / program.name
        if not compiler.match(program.name) and not link.is_symlink():
            link.symlink_to(program)
    return directory


def serve_and_ask(home: Path, env: dict[str, str]) -> int:
    """Start what was installed, as its user would."""
    command = [str(home / ".local" / "bin" / "semantic"), "serve", "--port", PORT]
    say("starting semantic serve")
    with subprocess.Popen(command, env=env, cwd=home) as server:  # noqa: S603 - our own
        try:
            answer = ask(f"http://127.0.0.1:{PORT}", server)
        finally:
            server.terminate()
    say(answer)
    compiled = list((home / ".semantic" / "native").glob("*.so"))
    report = subprocess.run(  # noqa: S603 - our own
        [command[0], "doctor"], env=env, capture_output=True, text=True, check=False
    ).stdout
    kernels = next(
        (line for line in report.splitlines() if "CPU kernels" in line), "no CPU kernels"
    )
    say(kernels)
    return 0 if "Paris" in answer and "native" in kernels and not compiled else 1


def ask(url: str, server: "subprocess.Popen[bytes]") -> str:
    """Wait for the model, and ask."""
    with httpx.Client(base_url=url, trust_env=False, timeout=300) as http:
        while server.poll() is None:
            try:
                if http.get("/health/ready").is_success:
                    break
            except httpx.TransportError:
                pass
            time.sleep(0.5)
        else:
            return f"it ended with status {server.returncode}"
        body = {"temperature": 0, "messages": [{"role": "user", "content": QUESTION}]}
        reply = http.post("/v1/chat/completions", json=body).raise_for_status().json()
        return str(reply["choices"][0]["message"]["content"])


def run(*command: str | Path, env: dict[str, str]) -> None:
    """Run a program; what it says is seen if it fails."""
    subprocess.run(command, env=env, check=True)  # noqa: S603 - our own


def say(text: str) -> None:
    """Print progress."""
    sys.stdout.write(f"==> {text}\n")
    sys.stdout.flush()


if __name__ == "__main__":
    sys.exit(main())
