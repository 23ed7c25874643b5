"""The model `starter-vision`: built from the starter model, served, and asked about pictures."""

import base64
import io
import shutil
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
from PIL import Image, ImageDraw
from safetensors import safe_open
from tokenizers import Tokenizer

from semantic.adapters.config.settings import STARTER_MODEL
from semantic.adapters.outbound.models.source import LocalModelSource
from semantic.adapters.outbound.models.starter_vision import building
from semantic.adapters.outbound.models.starter_vision.building import STARTER_VISION
from semantic.domain.errors import InvalidRequestError
from tests.http_server import make_settings, run_server

pytestmark = pytest.mark.integration


@pytest.fixture(scope="module")
def home(starter_home: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A home directory with the starter model and the model built from it."""
    home = tmp_path_factory.mktemp("vision")
    (home / "native").symlink_to(starter_home / "native")
    (home / "models").mkdir()
    (home / "models" / STARTER_MODEL).symlink_to(starter_home / "models" / STARTER_MODEL)
    LocalModelSource(home / "models", STARTER_MODEL).resolve(STARTER_VISION, lambda _: None)
    return home


@pytest.fixture(scope="module")
def client(home: Path) -> Iterator[httpx.Client]:
    settings = make_settings(home, backend="torch", model=STARTER_VISION)
    with run_server(settings) as running, running.client() as client:
        yield client


def picture(colour: str, shape: str = "ellipse", size: tuple[int, int] = (400, 300)) -> str:
    """A data URI of a picture with a shape in its middle."""
    image = Image.new("RGB", size, "white")
    getattr(ImageDraw.Draw(image), shape)((120, 70, 280, 230), fill=colour)
    file = io.BytesIO()
    image.save(file, "PNG")
    return f"data:image/png;base64,{base64.b64encode(file.getvalue()).decode()}"


def ask(client: httpx.Client, question: str, *pictures: str) -> str:
    images = [{"type": "image_url", "image_url": {"url": url}} for url in pictures]
    content = [*images, {"type": "text", "text": question}]
    body = {"messages": [{"role": "user", "content": content}], "temperature": 0, "max_tokens": 24}
    answer = client.post("/v1/chat/completions", json=body).raise_for_status().json()
    return str(answer["choices"][0]["message"]["content"])


@pytest.mark.parametrize("colour", ["red", "blue", "green"])
def test_the_colour_of_a_circle_is_seen(client: httpx.Client, colour: str) -> None:
    reply = ask(client, "What colour is the circle?", picture(colour))
    assert reply == f"The circle is {colour}."


def test_a_picture_changes_the_reply_and_its_absence_does_not(client: httpx.Client) -> None:
    question = "What is in the picture?"
    circle, square = picture("red"), picture("black", "rectangle")
    seen = [ask(client, question, one) for one in (circle, square, circle)]
    assert seen == ["A red circle.", "A black square.", "A red circle."]
    assert "Paris" in ask(client, "What is the capital of France?")


def test_the_text_model_is_the_starters_byte_for_byte(home: Path) -> None:
    starter, built = (home / "models" / name for name in (STARTER_MODEL, STARTER_VISION))
    with (
        safe_open(starter / "model.safetensors", "pt") as before,
        safe_open(built / "model.safetensors", "pt") as after,
    ):
        for name in before.keys():  # noqa: SIM118 - it is no mapping
            same = after.get_tensor(name.replace("model.", "model.text_model.", 1))
            assert before.get_tensor(name).equal(same), name
    first, second = (Tokenizer.from_file(str(one / "tokenizer.json")) for one in (starter, built))
    text = "<|im_start|>user\nThe café costs 42 €.<|im_end|>\n"
    assert first.encode(text).ids == second.encode(text).ids
    assert len(second.encode("<fake_token_around_image><global-img><image>").ids) == 3


def test_the_model_is_built_once_and_again_when_outdated(home: Path, tmp_path: Path) -> None:
    models = tmp_path / "models"
    models.mkdir()
    (models / STARTER_MODEL).symlink_to(home / "models" / STARTER_MODEL)
    steps: list[str] = []
    source = LocalModelSource(models, STARTER_MODEL)
    built = source.resolve(STARTER_VISION, steps.append)
    weights = (built / "model.safetensors").stat().st_ino
    assert source.resolve(STARTER_VISION, steps.append) == built
    assert (built / "model.safetensors").stat().st_ino == weights
    (built / ".built").write_text("0 0 0\n")
    source.resolve(STARTER_VISION, steps.append)
    assert (built / "model.safetensors").stat().st_ino != weights
    assert steps == ["building starter-vision from the starter model"] * 2
    assert sorted(path.name for path in models.iterdir()) == [STARTER_MODEL, STARTER_VISION]


def test_files_of_the_user_stay(home: Path, tmp_path: Path) -> None:
    models = tmp_path / "models"
    other = models / STARTER_VISION
    other.mkdir(parents=True)
    (models / STARTER_MODEL).symlink_to(home / "models" / STARTER_MODEL)
    (other / "notes.txt").write_text("mine")
    source = LocalModelSource(models, STARTER_MODEL)
    with pytest.raises(InvalidRequestError, match="was not built from the starter model"):
        source.resolve(STARTER_VISION, lambda _: None)
    shutil.copyfile(home / "models" / STARTER_MODEL / "config.json", other / "config.json")
    assert source.resolve(STARTER_VISION, lambda _: None) == other


def test_a_wheel_has_no_tower_and_says_so(
    home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    models = tmp_path / "models"
    models.mkdir()
    (models / STARTER_MODEL).symlink_to(home / "models" / STARTER_MODEL)
    monkeypatch.setattr(building, "_TOWER", tmp_path / "none")
    source = LocalModelSource(models, STARTER_MODEL)
    with pytest.raises(InvalidRequestError, match="needs a checkout"):
        source.resolve(STARTER_VISION, lambda _: None)
