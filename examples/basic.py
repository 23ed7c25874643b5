"""Create an agent, send it messages, read its log, and rewind it.

Run it against a server (`make serve`): python -m examples.basic
"""

from examples.client import call, connect, say, stream


def main() -> None:
    """Run the example."""
    with connect() as http:
        agent = call(http, "POST", "/v1/agents", json={"system": "You answer in one sentence."})
        path = f"/v1/agents/{agent['id']}"

        first = say(http, agent["id"], "What is the capital of France?")
        print("reply:", first["text"])

        print("stream: ", end="")
        for event in stream(http, agent["id"], "And of Italy?"):
            if event["type"] == "text":
                print(event["text"], end="", flush=True)
            elif event["type"] == "finished":
                usage = event["usage"]
                print(f"\nreused {usage['cached_tokens']} of {usage['prompt_tokens']} tokens")

        turns = call(http, "GET", f"{path}/turns")["data"]
        print("turns:", len(turns))
        print("why:", call(http, "GET", f"{path}/explain")["summary"])

        call(http, "POST", f"{path}/rewind", json={"turn_id": first["turn_id"]})
        print("after the rewind:", call(http, "GET", path)["turns"], "turn")
        call(http, "DELETE", path)


if __name__ == "__main__":
    main()
