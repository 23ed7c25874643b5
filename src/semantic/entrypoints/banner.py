"""What `semantic serve` prints when it starts: the banner, and a line when the model is loaded."""

import contextlib
import sys
import time
from concurrent.futures import wait

import uvicorn

from semantic import __version__
from semantic.adapters.config.settings import STARTER_MODEL, STARTER_NOTE
from semantic.adapters.config.terminal import printable
from semantic.application.engine.model import STARTING
from semantic.entrypoints.bootstrap import Server
from semantic.entrypoints.cli.client import DEFAULT_URL
from semantic.ports.inbound import ModelState

LOOPBACK = "127.0.0.1"
_POLL_S = 0.05


def start_banner(server: Server, url: str, *, is_ollama: bool = False) -> str:
    """Make the text that says where the server listens and what to do next."""
    port = server.settings.ollama_port
    ollama = f"\n             http://{LOOPBACK}:{port}   (Ollama)" if is_ollama else ""
    at = "" if url == DEFAULT_URL else f" --server {url}"
    return f"""
  Semantic {__version__}
  listening  {url}   (OpenAI base URL: {url}/v1; Anthropic: {url}){ollama}
  page       {url}/
  model      {server.model_id} on {server.backend_name}, loading
  home       {server.settings.home_dir}
  agents     {server.memory.summary}

  Try it in another terminal:
  semantic chat{at}
  curl {url}/v1/chat/completions -H 'content-type: application/json' -d '{{
    "model": "{server.model_id}", "temperature": 0, "messages": [
    {{"role": "user", "content": "What is the capital of France? Answer in one sentence."}}]}}'

  Ctrl-C stops.
"""


def announce(server: Server, http: uvicorn.Server, banner: str, failures: list[str]) -> None:
    """Print the banner when the model was checked, and a line when it is loaded.

    If the model cannot be loaded, stops `http` and adds the reason to `failures`.
    """
    started = time.monotonic()
    while server.device.state is ModelState.LOADING and server.device.detail == STARTING:
        time.sleep(_POLL_S)
    if server.device.state is not ModelState.FAILED:
        _print(banner)
    if (loading := server.models.running_load()) is not None:
        wait([loading])
    if server.device.state is ModelState.READY:
        elapsed = time.monotonic() - started
        current = server.models.current()
        how = f" ({current.compute.summary})" if current.compute else ""
        how += f", drafts by {current.draft_model}" if current.draft_model else ""
        note = f"  {STARTER_NOTE}\n" if server.model_id == STARTER_MODEL else ""
        note += _context_note(server, current.max_context)
        _print(f"\n  ready: {server.model_id} after {elapsed:.1f} s{how}\n{note}\n")
    elif server.device.state is ModelState.FAILED:
        failures.append(f"the model could not be loaded: {server.device.detail}")
        http.should_exit = True


def _context_note(server: Server, usable: int) -> str:
    """Say how long a request may be, if the memory holds less than the model's context."""
    model = server.device.model
    own = model.backend.spec.max_context if model else 0
    if usable >= own:
        return ""
    text = f"a prompt and its reply may have {usable:,} of the model's {own:,} tokens"
    return f"  context    {text}: the memory for KV cache holds no more (memory_budget_mb)\n"


def _print(text: str) -> None:
    with contextlib.suppress(BrokenPipeError):  # the reader of stdout has exited
        sys.stdout.write(printable(text))
        sys.stdout.flush()
