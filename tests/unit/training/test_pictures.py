"""The pictures and questions that train and measure `starter-vision`."""

from collections import Counter
from pathlib import Path

import matplotlib as mpl
import numpy as np
import pytest

from training.grading import is_right
from training.questions import Question, make_example
from training.vocabulary import KINDS, WORDINGS

pytestmark = pytest.mark.unit

FONTS = Path(mpl.get_data_path()) / "fonts" / "ttf"


def test_a_seed_always_gives_the_same_picture_and_questions() -> None:
    first, second = (make_example("seed", FONTS) for _ in range(2))
    assert np.array_equal(first.pixels, second.pixels)
    assert first.questions == second.questions
    assert not np.array_equal(first.pixels, make_example("another", FONTS).pixels)


def test_questions_of_all_kinds_are_asked_and_their_answers_are_right() -> None:
    examples = [make_example(f"seed {index}", FONTS) for index in range(60)]
    questions = [question for example in examples for question in example.questions]
    assert set(Counter(question.kind for question in questions)) == set(KINDS.values())
    assert all(is_right(question, question.answer) for question in questions)
    assert all(example.pixels.shape == (192, 192, 3) for example in examples)
    marks = np.concatenate([example.marks for example in examples])
    assert (marks[:, 2] > marks[:, 0]).all()
    assert (marks[:, 3] > marks[:, 1]).all()


def test_wordings_for_measuring_are_never_trained() -> None:
    held_out = {wordings[-1] for wordings in WORDINGS.values() if "{" not in wordings[-1]}
    asked = [make_example(f"seed {i}", FONTS) for i in range(60)]
    assert held_out
    assert held_out.isdisjoint(one.text for example in asked for one in example.questions)


@pytest.mark.parametrize(
    "text, answer, reply, expected",
    [
        ("What color is it?", "It is blue.", "The shape is blue.", True),
        ("What color is it?", "It is blue.", "It is red.", False),
        ("What color is it?", "It is blue.", "It is blue or red.", False),
        ("What shape is red?", "The red shape is a star.", "It is a star.", True),
        ("Is there a star?", "No, there is no star.", "No.", True),
        ("Is there a star?", "No, there is no star.", "Yes, there is a star.", False),
        ("How many stars are there?", "There are 3 stars.", "Three.", True),
        ("What number is this?", "The number is 42.", "The number is 24.", False),
        ("Read the word.", 'It says "Stop".', 'The word "Stop".', True),
        ("Read the word.", 'It says "Stop".', 'It says "stop".', False),
    ],
)
def test_replies_are_graded_by_what_they_say(
    text: str, answer: str, reply: str, expected: bool
) -> None:
    assert is_right(Question("kind", text, answer), reply) is expected
