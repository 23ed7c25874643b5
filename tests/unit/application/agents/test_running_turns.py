"""The progress of turns that wait or run."""

import pytest

from semantic.application.agents.feed import EventFeed
from semantic.application.agents.running_turns import TurnWatch
from semantic.application.agents.turn_log import turn_id
from semantic.domain.agents import Reuse
from semantic.domain.events import Finished, PrefillProgress, Started, Usage
from semantic.domain.sampling import FinishReason, SamplingParams
from semantic.ports.telemetry import NoTelemetry, RequestTrace

pytestmark = pytest.mark.unit


def test_a_running_turn_reports_its_progress() -> None:
    watch, trace = TurnWatch(EventFeed(), NoTelemetry()), RequestTrace(max_tokens=50)
    end = watch.begin(Started("1", "m", Usage(20), SamplingParams(seed=0)), "local", "a", trace)

    def told() -> tuple[str, int, int, int]:
        (turn,) = watch.running("local")
        assert (turn.agent_id, turn.turn_id, turn.prompt_tokens) == ("a", turn_id("1"), 20)
        assert turn.max_tokens == 50
        return turn.state, turn.reused_tokens, turn.computed_tokens, turn.generated_tokens

    assert told() == ("queued", 0, 0, 0)
    trace.note_admitted()
    trace.progress = PrefillProgress(12, 20, 8)
    assert told() == ("prefill", 8, 12, 0)
    trace.first_token, trace.num_generated = 1.0, 3
    assert told() == ("decoding", 8, 20, 3)
    assert watch.running("other") == []
    end(Finished(FinishReason.END_TURN, Usage(20)), Reuse())
    assert watch.running("local") == []
