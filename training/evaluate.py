"""Asks a running server about held-out pictures: `python -m training.evaluate --help`."""

import argparse
import base64
import io
from collections import defaultdict
from pathlib import Path

import httpx
from PIL import Image

from training.grading import is_right
from training.questions import Example, Question, make_example


def ask(client: httpx.Client, model: str, example: Example, question: Question) -> str:
    """The server's reply, without sampling."""
    file = io.BytesIO()
    Image.fromarray(example.pixels).save(file, "PNG")
    url = f"data:image/png;base64,{base64.b64encode(file.getvalue()).decode()}"
    content = [
        {"type": "image_url", "image_url": {"url": url}},
        {"type": "text", "text": question.text},
    ]
    messages = [{"role": "user", "content": content}]
    body = {"model": model, "messages": messages, "temperature": 0, "max_tokens": 48}
    answer = client.post("/v1/chat/completions", json=body).raise_for_status().json()
    reply: str = answer["choices"][0]["message"]["content"]
    return reply


def main() -> None:
    """Print wrong replies, and the part of right ones by kind of question."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--url", default="http://127.0.0.1:8000")
    parser.add_argument("--model", default="starter-vision")
    parser.add_argument("--fonts", type=Path, required=True, help="DejaVu and Liberation fonts")
    parser.add_argument("--kinds", nargs="*", help="kinds of questions; all if left out")
    parser.add_argument("--first", type=int, default=0, help="number of the first picture")
    parser.add_argument("--pictures", type=int, default=300)
    parser.add_argument("--unseen", action="store_true", help="ask in wordings never trained")
    arguments = parser.parse_args()
    right: dict[str, list[bool]] = defaultdict(list)
    with httpx.Client(base_url=arguments.url, timeout=300) as client:
        for index in range(arguments.first, arguments.first + arguments.pictures):
            seed = f"held out/{index}"
            example = make_example(seed, arguments.fonts, is_held_out=arguments.unseen)
            for question in example.questions:
                if arguments.kinds and question.kind not in arguments.kinds:
                    continue
                reply = ask(client, arguments.model, example, question)
                is_alone = example.scene == "shapes" and example.num_things == 1
                names = [question.kind, "all", *([f"{question.kind}, one shape"] * is_alone)]
                for name in names:
                    right[name].append(is_right(question, reply))
                if not right["all"][-1]:
                    print(f"{seed}: {question.text} {question.answer} Reply: {reply}", flush=True)
    for kind, results in sorted(right.items()):
        print(f"{kind:24} {sum(results) / len(results):.1%} of {len(results)}")


if __name__ == "__main__":
    main()
