"""Renders conversations with chat templates that take all time or memory.

Promised: such a conversation is refused within its limits, others are rendered meanwhile, and
neither this process nor those it started grow.
"""

import os
import random
from concurrent.futures import ThreadPoolExecutor
from typing import ClassVar

from semantic.adapters.outbound.limited_process import ProcessLimits
from semantic.adapters.outbound.models.chat_template import ChatTemplate
from semantic.domain.errors import InvalidRequestError
from tests.attack.schemas import resident_bytes
from tests.attack.site import Attack
from tests.templates import HOSTILE

_LIMITS = ProcessLimits(cpu_s=0.5, memory=256 * 2**20)
_MAX_GROWTH = 3 * _LIMITS.memory  # two processes, and the texts that they answer with
_NUM_HOSTILE, _NUM_BYSTANDERS = 8, 4


class HostileTemplates(Attack):
    """Each round one template, which some conversations set off, eight at once."""

    kind: ClassVar[str] = "templates"

    def run_round(self, dice: random.Random) -> None:
        name, hostile = list(HOSTILE.items())[self.round % len(HOSTILE)]
        word = str(dice.randrange(10**6))
        asked = "{% if messages[0].content == '" + word + "' %}" + hostile + "{% endif %}"
        template = ChatTemplate(asked + "{{ messages[0].content }}", {}, _LIMITS)
        before = resident_bytes(os.getpid())

        def render(content: str) -> str:
            self.num_requests += 1
            try:
                return template.render([{"role": "user", "content": content}])
            except InvalidRequestError as error:
                return error.message

        said = [word] * _NUM_HOSTILE + ["bystander"] * _NUM_BYSTANDERS
        dice.shuffle(said)
        with ThreadPoolExecutor(len(said)) as threads:
            answers = list(threads.map(render, said))
        for content, answer in zip(said, answers, strict=True):
            is_right = answer == content if content != word else "exceeds" in answer
            if not is_right:
                self.find(f"{name}: {content!r} is answered with {answer[:200]!r}")
        growth = resident_bytes(os.getpid()) - before
        if growth > _MAX_GROWTH:
            self.find(f"{name}: the processes grew by {growth >> 20} MB")
