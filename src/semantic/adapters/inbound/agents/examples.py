"""What the agent API's answers look like, for its document."""

from typing import Any

Json = dict[str, Any]

STATE: Json = {
    "tier": "hot",
    "tokens": 731,
    "memory_tokens": 731,
    "disk_tokens": 731,
    "memory_bytes": 33685504,
    "disk_bytes": 33690112,
}
AGENT: Json = {
    "object": "agent",
    "id": "coder",
    "created_at": 1767225600.0,
    "last_used": 1767225661.5,
    "head": "turn_57d6c033ac4c047f4192f7f7",
    "turns": 3,
    "tokens": 732,
    "busy": False,
    "state": STATE,
    "settings": {
        "system": "You write Python.",
        "tools": [],
        "model": None,
        "class": "interactive",
        "weight": 1.0,
        "pin": False,
        "ttl_s": None,
        "quota": {"max_bytes": None, "max_turns": None},
        "overflow": "error",
        "labels": {"project": "web"},
    },
}
IMPORTED: Json = AGENT | {"import_state": "imported", "import_reason": "signed by this server"}
AGENTS: Json = {"object": "list", "data": [AGENT], "total": 1, "next": None}
USAGE: Json = {
    "prompt_tokens": 724,
    "completion_tokens": 8,
    "cached_tokens": 701,
    "thinking_tokens": 0,
}
REUSE: Json = {"hot": 701, "pool": 0, "disk": 0, "computed": 23}
ANSWER: Json = {"role": "assistant", "content": [{"type": "text", "text": "Use a set."}]}
REPLY: Json = {
    "object": "agent.reply",
    "agent_id": "coder",
    "turn_id": "turn_57d6c033ac4c047f4192f7f7",
    "model": "smollm2-135m-instruct",
    "message": ANSWER,
    "text": "Use a set.",
    "finish_reason": "end_turn",
    "stop_sequence": None,
    "usage": USAGE,
    "reuse": REUSE,
    "dropped_messages": 0,
    "durable": True,
}
TURN: Json = {
    "object": "turn",
    "id": "turn_57d6c033ac4c047f4192f7f7",
    "parent": "turn_0a31c8f2b4d94e6f83a1c7d2",
    "agent_id": "coder",
    "created_at": 1767225661.5,
    "model": "smollm2-135m-instruct",
    "messages": [
        {"role": "user", "content": [{"type": "text", "text": "How do I drop duplicates?"}]},
        ANSWER,
    ],
    "finish_reason": "end_turn",
    "tokens": 732,
    "new_tokens": 30,
    "usage": USAGE,
    "reuse": REUSE,
    "dropped_messages": 0,
    "starts_anew": False,
}
TURNS: Json = {"object": "list", "data": [TURN], "next": "turn_57d6c033ac4c047f4192f7f7"}
EXPLANATION: Json = {
    "object": "agent.explanation",
    "agent_id": "coder",
    "turn_id": "turn_57d6c033ac4c047f4192f7f7",
    "prompt_tokens": 724,
    "reuse": {"hot": 0, "pool": 0, "disk": 412, "computed": 312},
    "diverged": {
        "from_turn": "turn_0a31c8f2b4d94e6f83a1c7d2",
        "index": 412,
        "before": "Today is ",
        "expected": "Monday.",
        "actual": "Tuesday.",
    },
    "next": STATE,
    "summary": "Of the latest prompt's 724 tokens 412 were reused (0 from an open working copy, 0 "
    "from memory, 412 from disk). It left the conversation at token 412. The next turn starts hot.",
}
CACHE: Json = {
    "object": "cache",
    "memory": {
        "budget": 4294967296,
        "used": 101056512,
        "working": 33685504,
        "blocks": 9,
        "pressure": "low",
    },
    "disk": {
        "budget": 21474836480,
        "used": 67380224,
        "other": 1245184,
        "files": 9,
        "queue_budget": 536870912,
        "queue_used": 0,
        "problem": "",
    },
    "agents": {"hot": 3, "warm": 12, "cold": 1},
    "replies": 40,
    "reuse": {"hot": 24000, "pool": 3100, "disk": 900, "computed": 4000},
    "hit_rates": {"hot": 0.75, "pool": 0.0969, "disk": 0.0281, "all": 0.875},
    "dedup_ratio": 2.4,
    "counters": {"sealed": 120, "evicted": 3, "restored": 14, "written": 118, "corrupt": 0},
    "live_requests": 1,
}
