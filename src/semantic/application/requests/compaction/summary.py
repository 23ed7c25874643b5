"""Summaries of conversations, and where a conversation may be cut."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

from semantic.application.parsing import MessageFold
from semantic.application.prompt.renderer import BEGINNINGS
from semantic.application.requests.reply import LiveReply
from semantic.application.requests.service import InferenceService
from semantic.application.requests.truncation import opens_turn, text_size
from semantic.domain.agents import Principal, Reuse
from semantic.domain.chat import ChatRequest, Message, Role, ToolChoice, ToolMode, ToolResultPart
from semantic.domain.errors import (
    CompactionError,
    ConflictError,
    ContextLengthError,
    StateQuotaError,
)
from semantic.domain.events import Failed, Finished, Usage
from semantic.domain.sampling import UNSET_SAMPLING, FinishReason, SamplingParams, StopRules
from semantic.ports.inbound import Compaction

INSTRUCTIONS = """\
Write a summary of this conversation. It replaces the conversation, so whoever continues must be \
able to rely on it alone. State, as far as they occurred: what the user asked for and any rules \
the user set, in the user's own words; decisions and their reasons; facts, names, paths, commands \
and code that are still needed, verbatim; errors and how they were resolved; what is done, and \
what remains to be done next. Do not call tools, do not continue the work, and do not comment on \
the summary."""
OPENING = "This conversation continues from a summary of its earlier part:\n\n"
_MAX_SHARE = 0.7  # of the limit, for a conversation after it was compacted
_ROOM_SHARE = 3  # a compacted conversation leaves at most 1/3 of the context for the reply


@dataclass(frozen=True, slots=True)
class CompactionPolicy:
    """How conversations are compacted if a request does not say.

    Attributes:
        keep_turns: Latest turns that stay as they are.
        max_tokens: Longest summary.
    """

    instructions: str = INSTRUCTIONS
    keep_turns: int = 2
    max_tokens: int = 2048
    sampling: SamplingParams = field(default_factory=lambda: SamplingParams(unset=UNSET_SAMPLING))

    def changed_by(self, ask: Compaction) -> "CompactionPolicy":
        """Return the policy of one request."""
        return CompactionPolicy(
            instructions=ask.instructions or self.instructions,
            keep_turns=self.keep_turns if ask.keep_turns is None else ask.keep_turns,
            max_tokens=ask.max_tokens or self.max_tokens,
            sampling=ask.sampling or self.sampling,
        )

    def room(self, max_context: int, wanted: int | None) -> int:
        """Return how many tokens a turn must leave free; otherwise it is compacted first."""
        num_asked = len(self.instructions) // 3  # an estimate of its tokens
        needed = max(wanted or 1, self.max_tokens + num_asked)
        return max(1, min(needed, max_context // _ROOM_SHARE))


@dataclass(frozen=True, slots=True)
class Summary:
    """A summary, and the tokens that it took."""

    text: str
    usage: Usage
    reuse: Reuse

    @property
    def message(self) -> Message:
        return summary_message(self.text)


def summary_message(text: str) -> Message:
    """Return the message that begins a conversation in place of what was summarised."""
    return Message.of(Role.USER, OPENING + text)


def is_summary(message: Message) -> bool:
    """Whether a message is the result of `summary_message`."""
    return message.role is Role.USER and message.text.startswith(OPENING)


def expected_after(request: ChatRequest, messages: Sequence[Message]) -> list[ChatRequest]:
    """Return variants of the request that continues `messages` with a message of the user."""
    return [replace(request, messages=(*messages, one), is_continued=False) for one in BEGINNINGS]


class Summariser:
    """Asks the served model for summaries; leaves no turn and no KV cache behind."""

    def __init__(self, inference: InferenceService, policy: CompactionPolicy | None = None) -> None:
        self._inference = inference
        self.policy = policy or CompactionPolicy()

    async def summarise(
        self,
        request: ChatRequest,
        principal: Principal,
        policy: CompactionPolicy,
        on_start: Callable[[LiveReply], None] = lambda _: None,
    ) -> Summary:
        """Summarise the conversation of a request, which begins as the prompts of its turns do.

        The summary therefore reuses the KV cache of those turns.

        Args:
            on_start: Called with the running reply, so that it can be cancelled.

        Raises:
            CompactionError: the summary is empty or was cut off.
            ConflictError: the summary was cancelled.
            ContextLengthError: the conversation leaves no room for a summary.
        """
        asked = replace(
            request,
            messages=(*request.messages, Message.of(Role.USER, policy.instructions)),
            tool_choice=ToolChoice(ToolMode.NONE),
            sampling=policy.sampling,
            stop=StopRules(max_tokens=policy.max_tokens),
            output_format=None,
            agent=replace(request.agent, continuation=None, is_ephemeral=True),
            is_continued=False,
            prediction="",
            num_marked=None,
        )
        await self._inference.gate.model(request.model)
        reply = await self._inference.begin(asked, principal)
        on_start(reply)
        fold = MessageFold()
        async for event in reply:
            fold.add(event)
            if isinstance(event, Failed):
                raise event.error
            if isinstance(event, Finished):
                _require_whole(event)
                text = fold.message().text.strip()
                if not text:
                    raise CompactionError("the model wrote no summary.", param="instructions")
                return Summary(text, event.usage, reply.state.reuse if reply.state else Reuse())
        raise AssertionError("a reply ended without a final event")

    def expect(
        self, request: ChatRequest, messages: Sequence[Message], principal: Principal
    ) -> None:
        """Compute in the background what follows: `messages`, and then one of the user.

        Args:
            request: A request with the same model, tools and settings.
        """
        self._inference.expect(expected_after(request, messages), principal)


def _require_whole(finished: Finished) -> None:
    num_tokens = finished.usage.completion_tokens
    if finished.reason is FinishReason.MAX_TOKENS:
        raise CompactionError(
            f"the summary was cut off after {num_tokens} tokens; raise max_tokens.",
            param="max_tokens",
        )
    if finished.reason is FinishReason.CONTEXT_FULL:
        raise CompactionError(
            f"the context was full after {num_tokens} tokens of the summary; keep more turns, so "
            "that fewer are summarised.",
            param="keep_turns",
        )
    if finished.reason is FinishReason.CANCELLED:
        raise ConflictError("the agent was rewound or deleted while it was compacted.")


# -- where to cut ---------------------------------------------------------------------------------


def first_kept(history: Sequence[Message], keep_turns: int) -> int:
    """Return where the latest turns of a conversation begin.

    Raises:
        CompactionError: nothing before them is worth a summary.
    """
    starts = [index for index, message in enumerate(history) if opens_turn(message)]
    num_turns = sum(message.role is Role.ASSISTANT for message in history)
    start = starts[-keep_turns] if 0 < keep_turns <= len(starts) else 0
    start = start if keep_turns else len(history)
    if not any(message.role is Role.ASSISTANT for message in history[:start]):
        raise CompactionError(
            f"the conversation is too short to compact: it has {num_turns} replies, and its last "
            f"{keep_turns} turns are kept. Keep fewer turns.",
            param="keep_turns",
        )
    return start


def cut_to_fit(
    system: Sequence[Message],
    history: Sequence[Message],
    new: Sequence[Message],
    refusal: ContextLengthError | StateQuotaError,
    policy: CompactionPolicy,
) -> int | None:
    """Return where to cut a conversation so that both its summary and its successor fit.

    Prefers to keep the latest turns of the policy, then fewer, then more. Token counts are
    estimated from characters, with the ratio of the refused prompt.

    Args:
        new: The new messages, which are always kept.
        refusal: Holds the length of the refused prompt and the limit.

    Returns:
        The number of messages of the history to summarise; None if no cut fits.
    """
    ratio = refusal.num_prompt / text_size((*system, *history, *new))
    places = [i for i, m in enumerate(history) if i and (opens_turn(m) or m.role is Role.ASSISTANT)]
    is_result = any(
        isinstance(part, ToolResultPart) for message in new[:1] for part in message.parts
    )
    if not is_result:  # otherwise the call that it answers stays
        places.append(len(history))
    starts = [i for i in places if i == len(history) or opens_turn(history[i])]
    wanted = starts[-1 - policy.keep_turns] if policy.keep_turns < len(starts) else 0
    instructions = Message.of(Role.USER, policy.instructions)

    def fits(place: int) -> bool:
        before, after = (*system, *history[:place], instructions), (*system, *history[place:], *new)
        if text_size(before) * ratio + policy.max_tokens > refusal.limit:
            return False
        return text_size(after) * ratio + policy.max_tokens <= _MAX_SHARE * refusal.limit

    ordered = [i for i in places if i >= wanted] + [i for i in reversed(places) if i < wanted]
    has_reply = (i for i in ordered if any(m.role is Role.ASSISTANT for m in history[:i]))
    return next((place for place in has_reply if fits(place)), None)
