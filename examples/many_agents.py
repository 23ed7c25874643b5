"""Several agents with one system prompt, which is computed once; the replies share batches.

Run it against a server (`make serve`): python -m examples.many_agents
"""

import time
from concurrent.futures import ThreadPoolExecutor

from examples.client import Json, call, connect, say

SYSTEM = "You are a careful assistant on a team. You answer briefly and stick to facts. " * 8
QUESTIONS = {
    "geographer": "Name a river in Germany.",
    "chemist": "What is water made of?",
    "cook": "What goes into an omelette?",
    "astronomer": "Which planet is closest to the sun?",
}


def main() -> None:
    """Run the example."""
    with connect() as http:
        for name in QUESTIONS:
            settings = {"id": f"team-{name}", "system": SYSTEM, "labels": {"team": "demo"}}
            call(http, "POST", "/v1/agents", json=settings)

        def ask(name: str) -> Json:
            return say(http, f"team-{name}", QUESTIONS[name])

        started = time.perf_counter()
        with ThreadPoolExecutor(len(QUESTIONS)) as threads:
            replies = dict(zip(QUESTIONS, threads.map(ask, QUESTIONS), strict=True))
        elapsed = time.perf_counter() - started

        for name, reply in replies.items():
            usage = reply["usage"]
            shared = f"{usage['cached_tokens']}/{usage['prompt_tokens']} tokens reused"
            print(f"{name} ({shared}): {reply['text'].strip()[:80]}")
        print(f"{len(replies)} agents answered together in {elapsed:.1f} s")

        cache = call(http, "GET", "/v1/cache")
        print("stored once, used by all: dedup ratio", cache["dedup_ratio"])
        for agent in call(http, "GET", "/v1/agents", params={"label": "team:demo"})["data"]:
            call(http, "DELETE", f"/v1/agents/{agent['id']}")


if __name__ == "__main__":
    main()
