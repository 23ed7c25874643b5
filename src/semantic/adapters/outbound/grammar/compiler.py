"""Constrained decoding with llguidance: JSON schemas, patterns, choices and tool calls.

llguidance never raises for a bad grammar or token; every state it reaches is checked here.
"""

import re
import threading
from functools import lru_cache

from llguidance import LLMatcher, LLTokenizer, TokenizerWrapper

from semantic.adapters.outbound.grammar.bounds import has_patterns, pattern_growth, schema_growth
from semantic.adapters.outbound.grammar.budget import BudgetedConstraint
from semantic.adapters.outbound.grammar.planner import Closing, Planner
from semantic.adapters.outbound.grammar.schema_faults import schema_fault
from semantic.adapters.outbound.grammar.shapes import exits, shape_grammar, tool_names
from semantic.adapters.outbound.grammar.vocabulary import Vocabulary
from semantic.domain.chat import (
    ChoiceFormat,
    JsonFormat,
    JsonObject,
    RegexFormat,
    ToolMode,
    require_whole_characters,
)
from semantic.domain.errors import InvalidRequestError
from semantic.domain.reply_format import ReplyShape
from semantic.ports.outbound import TokenConstraint, TokenizerPort

_MAX_CACHED = 64
_TOKEN_GROWTH = 16  # brackets that one token may open
_CALL_GROWTH = 80  # markers and keys around a call's name and arguments


class LLGuidanceGrammar:
    """`GrammarPort` for one tokenizer. Made on first use: laying out a vocabulary takes a while."""

    def __init__(self, tokenizer: TokenizerPort) -> None:
        self._tokenizer = tokenizer
        self._lock = threading.Lock()
        self._vocabulary: Vocabulary | None = None
        self._matcher = lru_cache(_MAX_CACHED)(self._compile)

    def constrain(self, shape: ReplyShape, max_tokens: int) -> TokenConstraint | None:
        """Compile a shape for one reply."""
        if shape.is_free:
            return None
        _check_shape(shape)
        vocabulary = self._laid_out()
        matcher = self._matcher(shape_grammar(shape, self._tokenizer.special_ids))
        if matcher.is_error():
            raise self._refusal(shape, matcher.get_error())
        planner = Planner(vocabulary, self._closing(shape))
        constraint = BudgetedConstraint(matcher.deep_copy(), planner, max_tokens)
        if constraint.shortest is not None and constraint.shortest > max_tokens:
            raise InvalidRequestError(
                f"max_tokens is {max_tokens}, but the shortest reply of the form asked for takes "
                f"{constraint.shortest} tokens.",
                param="max_tokens",
            )
        return constraint

    def _laid_out(self) -> Vocabulary:
        with self._lock:
            if self._vocabulary is None:
                self._vocabulary = lay_out(self._tokenizer)
            return self._vocabulary

    def _compile(self, text: str) -> LLMatcher:
        return LLMatcher(self._laid_out().tokenizer, text, log_level=0)

    def _closing(self, shape: ReplyShape) -> Closing:
        schemas = _schemas(shape)
        growth = max(map(schema_growth, schemas), default=0)
        if shape.offered:  # another call may begin
            growth += _CALL_GROWTH + max(len(tool.name.encode()) for tool in shape.offered)
        endings: list[str] = []
        match shape.output:
            case RegexFormat(pattern):
                growth = max(growth, pattern_growth(pattern))
                endings = re.findall(r"[\w .,;:!?/@#-]+", pattern)[::-1]
            case ChoiceFormat(choices):
                growth = max(growth, *(len(choice.encode()) for choice in choices))
        ways_out = [self._tokenizer.encode(text) for text in exits(shape)]
        return Closing(
            growth=growth + _TOKEN_GROWTH * bool(schemas),
            exits=tuple(tuple(tokens) for tokens in ways_out),
            endings=tuple(tuple(self._tokenizer.encode(text)) for text in endings),
            is_json=not isinstance(shape.output, RegexFormat | ChoiceFormat),
            has_free_strings=not isinstance(shape.output, RegexFormat)
            and not any(map(has_patterns, schemas)),
        )

    def _refusal(self, shape: ReplyShape, reason: str) -> InvalidRequestError:
        """Find the part of the request that cannot be compiled."""
        tokenizer = self._laid_out().tokenizer
        if isinstance(shape.output, JsonFormat) and shape.output.schema is not None:
            fault = schema_fault(tokenizer, shape.output.schema)
            if fault:
                return InvalidRequestError(f"the schema {fault}", param="response_format")
        for index, tool in enumerate(shape.tools):
            if tool not in shape.offered:
                continue
            fault = schema_fault(tokenizer, tool.parameters, is_lenient=not tool.is_strict)
            if fault:
                param = f"tools[{index}].parameters"
                return InvalidRequestError(f"the schema of tool {tool.name!r} {fault}", param=param)
        if isinstance(shape.output, RegexFormat):
            detail = reason.rpartition("error: ")[2].splitlines() or [reason]
            return InvalidRequestError(
                f"the pattern {shape.output.pattern!r} cannot be enforced: {detail[0]}.",
                param="response_format",
            )
        return InvalidRequestError(
            f"the reply's form cannot be enforced: {reason.splitlines()[0]}.",
            param="response_format",
        )


def _check_shape(shape: ReplyShape) -> None:
    match shape.output:
        case RegexFormat(pattern):
            require_whole_characters(pattern, param="response_format")
        case ChoiceFormat(choices):
            if not choices:
                raise InvalidRequestError("it needs at least one choice.", param="response_format")
            require_whole_characters("\n".join(choices), param="response_format")
    if not shape.must_call or shape.offered:
        return
    if shape.tool_choice.mode is ToolMode.NAMED:
        raise InvalidRequestError(
            f"tool_choice names {shape.tool_choice.name!r}, but the tools are "
            f"{tool_names(shape.tools)}.",
            param="tool_choice",
        )
    raise InvalidRequestError("tool_choice requires a tool, but none is offered.", param="tools")


def _schemas(shape: ReplyShape) -> list[JsonObject]:
    schemas = [tool.parameters for tool in shape.offered]
    if isinstance(shape.output, JsonFormat):
        schemas.append(shape.output.schema or {})
    return schemas


class _Encoder:
    """What llguidance asks of a tokenizer."""

    def __init__(self, tokenizer: TokenizerPort, pieces: list[bytes], eos_ids: list[int]) -> None:
        names = {token: text.encode() for text, token in tokenizer.special_ids.items()}
        self.eos_token_id = eos_ids[0]
        self.bos_token_id = None
        self.special_token_ids = sorted(names)
        self.tokens = [names.get(token, piece) for token, piece in enumerate(pieces)]
        self._encode = tokenizer.encode

    def __call__(self, text: str) -> list[int]:
        return self._encode(text)


def lay_out(tokenizer: TokenizerPort) -> Vocabulary:
    """Lay out a model's tokens for constraints.

    Raises:
        InvalidRequestError: the model has no end token.
    """
    eos_ids = sorted(tokenizer.eos_ids)
    if not eos_ids:
        raise InvalidRequestError("this model has no end token, so replies cannot be constrained.")
    pieces = [tokenizer.token_bytes(token) for token in range(tokenizer.vocab_size)]
    wrapper = TokenizerWrapper(_Encoder(tokenizer, pieces, eos_ids))
    made = LLTokenizer(wrapper, n_vocab=len(pieces), eos_token=eos_ids)
    return Vocabulary(made, pieces, eos_ids)
