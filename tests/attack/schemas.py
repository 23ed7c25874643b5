"""Asks for replies in forms that are expensive to prepare, while another client is served.

Promised: an answer or a 400 in good time; bounded memory, of the server and of its workers; others
are served meanwhile.
"""

import contextlib
import json
import random
import threading
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any, ClassVar

import httpx
import psutil

from tests.attack.hostile_schemas import MAKERS, Schema
from tests.attack.site import MAX_TOKENS, MODEL, SETTINGS, ServerAttack, client
from tests.chaos.talk import ask

DEADLINE_S = 240.0  # for the answer to a hostile request, several at once on a machine of others
MAX_GROWTH = 2**30 * 3 // 2  # bytes that all processes together may grow by
_LOOK_EVERY_S = 0.1


class HostileSchemas(ServerAttack):
    """Each round one kind of schema, sent in several places at once."""

    kind: ClassVar[str] = "schemas"
    # What a schema may cost is processor time; by the clock that takes as long as others let it.
    settings: ClassVar[Mapping[str, Any]] = {**SETTINGS, "request_timeout_s": DEADLINE_S / 2}

    def open(self) -> None:
        super().open()
        self.check_witness()
        self._at_first = resident_bytes(self.server.pid)

    def run_round(self, dice: random.Random) -> None:
        schema = MAKERS[self.round % len(MAKERS)](dice)
        ways = dice.sample(_WAYS, dice.choice((1, 2, 3)))
        watch = _Watch(self.server.pid, self._at_first + MAX_GROWTH)
        bystander = _Bystander(self)
        with ThreadPoolExecutor(len(ways)) as pool:
            sent = [pool.submit(self._send, *way(schema), watch) for way in ways]
            answers = [future.result() for future in sent]
        bystander.stop()
        watch.stop()
        name = json.dumps(schema)[:150]
        for trouble in (*filter(None, answers), *bystander.troubles):
            self.find(f"{trouble}; {name}")
        if watch.is_over:
            self.restart(f"the server grew to {watch.most >> 20} MB; {name}")
        elif any(answers):
            self.server.kill()  # what it still does must not be blamed on the next round
            self.server.start()
        self.check_server()

    def _send(self, path: str, body: Any, watch: "_Watch") -> str:
        """Send one hostile request; returns what was wrong."""
        self.num_requests += 1
        url = str(self.server.http.base_url)
        with client(url, timeout_s=DEADLINE_S) as http:
            try:
                answer = http.post(path, json=body)
            except httpx.HTTPError as error:
                return "" if watch.is_over else f"{path}: no answer, {error!r}"
        if answer.status_code not in {200, 400, 413}:
            return f"{path}: {answer.status_code} {answer.text[:200]}"
        return _misshapen(path, answer)


def _misshapen(path: str, answer: httpx.Response) -> str:
    """A reply that ended by itself is JSON, as was asked."""
    if path != "/v1/chat/completions" or answer.status_code != 200:
        return ""
    choice = answer.json()["choices"][0]
    if choice["finish_reason"] != "stop":
        return ""
    try:
        json.loads(choice["message"]["content"])
    except ValueError:
        return f"{path}: the reply is not JSON: {choice['message']['content'][:100]!r}"
    return ""


# -- where a schema can stand -----------------------------------------------------------------

_SAID = [{"role": "user", "content": "Fill in the form."}]
_USUAL = {"model": MODEL, "messages": _SAID, "max_tokens": MAX_TOKENS}


def _chat(schema: Schema) -> tuple[str, Any]:
    form = {"type": "json_schema", "json_schema": {"name": "f", "schema": schema, "strict": True}}
    return "/v1/chat/completions", {**_USUAL, "response_format": form}


def _chat_tool(schema: Schema) -> tuple[str, Any]:
    function = {"name": "f", "parameters": _as_object(schema), "strict": True}
    tools = [{"type": "function", "function": function}]
    return "/v1/chat/completions", {**_USUAL, "tools": tools, "tool_choice": "required"}


def _message_tool(schema: Schema) -> tuple[str, Any]:
    tools = [{"name": "f", "input_schema": _as_object(schema)}]
    return "/v1/messages", {**_USUAL, "tools": tools, "tool_choice": {"type": "any"}}


def _message(schema: Schema) -> tuple[str, Any]:
    form = {"format": {"type": "json_schema", "schema": schema}}
    return "/v1/messages", {**_USUAL, "output_config": form}


def _response(schema: Schema) -> tuple[str, Any]:
    form = {"format": {"type": "json_schema", "name": "f", "schema": schema, "strict": True}}
    body = {"model": MODEL, "input": "Fill in the form.", "max_output_tokens": MAX_TOKENS}
    return "/v1/responses", {**body, "text": form}


def _completion(schema: Schema) -> tuple[str, Any]:
    asked = {"model": MODEL, "prompt": "x", "max_tokens": MAX_TOKENS}
    if "pattern" in schema and len(schema["pattern"]) < 10_000:
        return "/v1/completions", {**asked, "structured_outputs": {"regex": schema["pattern"]}}
    return "/v1/completions", {**asked, "structured_outputs": {"json": schema}}


def _as_object(schema: Schema) -> Schema:
    """Parameters are an object; definitions stay where they are looked for."""
    definitions = {"$defs": schema["$defs"]} if "$defs" in schema else {}
    inner = {key: value for key, value in schema.items() if key != "$defs"}
    return {"type": "object", "properties": {"x": inner}, "required": ["x"], **definitions}


_WAYS = (_chat, _chat_tool, _message_tool, _message, _response, _completion)


# -- the other client -------------------------------------------------------------------------


class _Bystander:
    """A client that sends simple requests all the time; each must be answered."""

    def __init__(self, attack: HostileSchemas) -> None:
        self._attack = attack
        self._url = str(attack.server.http.base_url)
        self._is_over = threading.Event()
        self.troubles: list[str] = []
        self._thread = threading.Thread(target=self._ask, daemon=True)
        self._thread.start()

    def stop(self) -> None:
        self._is_over.set()
        self._thread.join(2 * DEADLINE_S)

    def _ask(self) -> None:
        number = 0
        with client(self._url, timeout_s=DEADLINE_S / 2) as http:
            while not self._is_over.wait(0.2) or not number:
                number += 1
                said = [{"role": "user", "content": f"Bystander {self._attack.round}.{number}"}]
                self._attack.num_requests += 1
                try:
                    ask(http, MODEL, said, MAX_TOKENS)
                except httpx.HTTPError as error:
                    self.troubles.append(f"a bystander was not answered: {error!r}")
                    return


class _Watch:
    """Looks at a server's memory, and kills what outgrows a limit: the machine is not only ours."""

    def __init__(self, pid: int, limit: int) -> None:
        self._pid, self._limit = pid, limit
        self.most = 0
        self._is_stopping = threading.Event()
        self._thread = threading.Thread(target=self._look, daemon=True)
        self._thread.start()

    @property
    def is_over(self) -> bool:
        return self.most > self._limit

    def stop(self) -> None:
        self._is_stopping.set()
        self._thread.join()

    def _look(self) -> None:
        while not self._is_stopping.wait(_LOOK_EVERY_S) and not self.is_over:
            self.most = max(self.most, resident_bytes(self._pid))
        if self.is_over:
            for process in family(self._pid):
                with contextlib.suppress(psutil.NoSuchProcess):
                    process.kill()


def family(pid: int) -> list[psutil.Process]:
    """A process and all it started."""
    try:
        first = psutil.Process(pid)
        return [first, *first.children(recursive=True)]
    except psutil.NoSuchProcess:
        return []


def resident_bytes(pid: int) -> int:
    """The memory of a process and all it started."""
    total = 0
    for process in family(pid):
        with contextlib.suppress(psutil.NoSuchProcess):
            total += process.memory_info().rss
    return total
