"""Fork an agent, give every fork the same task, and keep the best fork.

Run it against a server (`make serve`): python -m examples.best_of_n
"""

from concurrent.futures import ThreadPoolExecutor

from examples.client import Json, call, connect, say

NUM_TRIES = 4
TASK = "Write one sentence about the sea."


def score(reply: Json) -> int:
    """Score a reply by its number of different words."""
    return len(set(reply["text"].lower().split()))


def main() -> None:
    """Run the example."""
    with connect() as http:
        settings = {"system": "You write short, vivid sentences."}
        writer = call(http, "POST", "/v1/agents", json=settings)["id"]
        say(http, writer, "Hello! Are you ready to write?")

        forks = call(http, "POST", f"/v1/agents/{writer}/fork", json={"n": NUM_TRIES})["data"]
        names = [fork["id"] for fork in forks]

        def attempt(index: int) -> Json:
            return say(http, names[index], TASK, temperature=1.0, seed=index)

        with ThreadPoolExecutor(NUM_TRIES) as threads:
            replies = list(threads.map(attempt, range(NUM_TRIES)))
        for name, reply in zip(names, replies, strict=True):
            reused = f"{reply['usage']['cached_tokens']}/{reply['usage']['prompt_tokens']}"
            print(f"{name} (score {score(reply)}, reused {reused}): {reply['text'].strip()[:60]}")

        best = max(range(NUM_TRIES), key=lambda index: score(replies[index]))
        print("kept:", names[best])
        for name in (writer, *(n for i, n in enumerate(names) if i != best)):
            call(http, "DELETE", f"/v1/agents/{name}")
        again = say(http, names[best], "Shorten it.")
        print("the best one continues:", again["text"].strip()[:80])
        call(http, "DELETE", f"/v1/agents/{names[best]}")


if __name__ == "__main__":
    main()
