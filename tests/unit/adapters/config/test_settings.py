import ast
import os
import re
import threading
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest

from semantic.adapters.config.settings import Settings
from semantic.adapters.config.sources import load_settings, unknown_variables
from semantic.domain.errors import InvalidRequestError

pytestmark = pytest.mark.unit

PROJECT = Path(__file__).parents[4]


@pytest.fixture(autouse=True)
def clean_place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for name in Settings.model_fields:
        monkeypatch.delenv(f"SEMANTIC_{name.upper()}", raising=False)
    monkeypatch.delenv("SEMANTIC_ENVIRONMENT", raising=False)


def test_every_source_beats_the_ones_below_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """From the weakest to the strongest; each adds itself and wins over all before."""
    assert load_settings().port == 8000
    (tmp_path / "config").mkdir()
    (tmp_path / "config/default.toml").write_text("port = 1")
    assert load_settings().port == 1
    (tmp_path / "config/special.toml").write_text("port = 2")
    monkeypatch.setenv("SEMANTIC_ENVIRONMENT", "special")
    assert load_settings().port == 2
    given = tmp_path / "mine.toml"
    given.write_text("port = 3")
    assert load_settings(config=given).port == 3
    (tmp_path / ".env").write_text("SEMANTIC_PORT=4")
    assert load_settings(config=given).port == 4
    monkeypatch.setenv("SEMANTIC_PORT", "5")
    assert load_settings(config=given).port == 5
    assert load_settings({"port": 6}, config=given).port == 6


def test_variables_of_other_programs_in_dotenv_are_passed_over(tmp_path: Path) -> None:
    (tmp_path / ".env").write_text("OPENAI_API_KEY=none\nPORT=1\nSEMANTIC_PORT=4")
    assert load_settings().port == 4
    (tmp_path / ".env").write_text("SEMANTIC_PROT=4")
    with pytest.raises(InvalidRequestError, match="SEMANTIC_PROT"):
        load_settings()


def test_the_environment_is_chosen_in_dotenv_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "config").mkdir()
    for index, name in enumerate(("one", "two"), start=1):
        (tmp_path / f"config/{name}.toml").write_text(f"port = {index}")
    (tmp_path / ".env").write_text("SEMANTIC_ENVIRONMENT=one")
    assert load_settings().port == 1
    monkeypatch.setenv("SEMANTIC_ENVIRONMENT", "two")
    assert load_settings().port == 2
    monkeypatch.setenv("SEMANTIC_ENVIRONMENT", "")
    assert load_settings().port == 8000


def test_dotenv_may_be_a_pipe_that_can_be_read_once(tmp_path: Path) -> None:
    """As programs that keep secrets make it."""
    os.mkfifo(tmp_path / ".env")
    (tmp_path / "config").mkdir()
    (tmp_path / "config/one.toml").write_text('log_level = "error"')
    content = "SEMANTIC_ENVIRONMENT=one\nSEMANTIC_PORT=4"
    found: list[Settings] = []
    threading.Thread(target=(tmp_path / ".env").write_text, args=(content,), daemon=True).start()

    reader = threading.Thread(target=lambda: found.append(load_settings()), daemon=True)
    reader.start()
    reader.join(60)

    (settings,) = found  # a second reading would wait for ever
    assert (settings.port, settings.runtime.log_level) == (4, "error")


def test_a_dotenv_file_that_is_not_text_is_refused(tmp_path: Path) -> None:
    (tmp_path / ".env").write_bytes(b"SEMANTIC_PORT=\xff")
    with pytest.raises(InvalidRequestError, match=r"^\.env cannot be read: 'utf-8'"):
        load_settings()


def test_unknown_settings_are_reported_with_the_nearest_name() -> None:
    known = {"SEMANTIC_PORT": "1", "SEMANTIC_ENVIRONMENT": "x", "semantic_host": "h", "PROT": "1"}
    assert unknown_variables(known) == []
    assert unknown_variables({"SEMANTIC_PROT": "1", **known}) == [
        "unknown setting SEMANTIC_PROT, ignored; did you mean SEMANTIC_PORT?"
    ]
    assert unknown_variables({"Semantic_Xyz": "1"}) == ["unknown setting Semantic_Xyz, ignored"]


def test_a_name_that_is_no_setting_is_an_error_in_files(tmp_path: Path) -> None:
    (tmp_path / ".env").write_text("SEMANTIC_KV_BIT=8")
    with pytest.raises(InvalidRequestError, match=r"SEMANTIC_KV_BIT: .* SEMANTIC_KV_BITS\?"):
        load_settings()
    (tmp_path / ".env").unlink()
    (tmp_path / "mine.toml").write_text("kv_bit = 8")
    with pytest.raises(InvalidRequestError, match=r"setting kv_bit: .* did you mean kv_bits\?"):
        load_settings(config=tmp_path / "mine.toml")


@pytest.mark.parametrize(
    "text,words",
    [
        ("port = 70000", r"^setting port: it must be less .* \(in .*mine\.toml\)$"),
        ("[server]\nport = 1", r"^setting server: .* no sections \(in .*mine\.toml\)$"),
        ('trusted_export_keys = { a = "x" }', r"^setting trusted_export_keys\.a: .*mine\.toml\)$"),
        ("port = ", r"mine\.toml cannot be read: Invalid value"),
    ],
)
def test_an_error_in_a_file_names_the_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str, words: str
) -> None:
    (tmp_path / "mine.toml").write_text(text)
    with pytest.raises(InvalidRequestError, match=words):
        load_settings(config=tmp_path / "mine.toml")
    (tmp_path / "mine.toml").write_text("port = 1")
    for name in ("SEMANTIC_PORT", "SEMANTIC_TRUSTED_EXPORT_KEYS"):
        monkeypatch.setenv(name, "{")
        with pytest.raises(InvalidRequestError) as refused:
            load_settings(config=tmp_path / "mine.toml")
        assert "mine.toml" not in refused.value.message


def test_lists_have_commas_in_the_environment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    wanted = ("https://a.example", "app://b:1")
    (tmp_path / "mine.toml").write_text('cors_origins = ["https://a.example", "app://b:1"]')
    assert load_settings(config=tmp_path / "mine.toml").cors_origins == wanted
    monkeypatch.setenv("SEMANTIC_CORS_ORIGINS", "https://a.example, app://b:1")
    monkeypatch.setenv("SEMANTIC_MODEL_ALIASES", "gpt-*, local")
    assert load_settings().cors_origins == wanted
    assert load_settings().model_aliases == ["gpt-*", "local"]
    monkeypatch.setenv("SEMANTIC_ALLOWED_HOSTS", "a.example, [::2]")
    assert load_settings().allowed_hosts == ("a.example", "[::2]")
    for wrong in ("https://a.example", "a.example:80", "*", ""):
        monkeypatch.setenv("SEMANTIC_ALLOWED_HOSTS", wrong)
        with pytest.raises(InvalidRequestError, match="is not a host name"):
            load_settings()
    monkeypatch.delenv("SEMANTIC_ALLOWED_HOSTS")
    for wrong in ("a.example", "https://a.example/", ""):
        monkeypatch.setenv("SEMANTIC_CORS_ORIGINS", wrong)
        with pytest.raises(InvalidRequestError, match="is not an origin"):
            load_settings()


def test_default_toml_lists_every_setting_with_its_default() -> None:
    text = (PROJECT / "config/default.toml").read_text()
    written = tomllib.loads(text)
    defaults = {name: field.default for name, field in Settings.model_fields.items()}
    unset = {name for name, default in defaults.items() if default is None}
    assert all(f"\n# {name} = " in text for name in unset)
    assert written.keys() == defaults.keys() - unset
    loaded = load_settings(config=PROJECT / "config/default.toml")
    for name, default in defaults.items():
        assert getattr(loaded, name) == default


def test_the_documentation_lists_every_setting_with_its_default() -> None:
    text = (PROJECT / "docs/running.md").read_text()
    rows = dict(re.findall(r"^\| `(\w+)` \| `?(.*?)`? \|", text.partition("## Settings")[2], re.M))
    defaults = {name: field.default for name, field in Settings.model_fields.items()}
    assert rows.keys() == defaults.keys()
    for name, default in defaults.items():
        if default is not None:
            said = str(default).lower() if isinstance(default, bool) else str(default)
            assert rows[name] == said.removesuffix(".0"), name


def test_the_shipped_test_settings_load() -> None:
    assert load_settings(config=PROJECT / "config/test.toml").backend == "fake"


@pytest.mark.parametrize(
    "text,words",
    [
        ('port = "many"', "port"),
        ('backend = "cuda"', "backend"),
        ('host = "0.0.0.0"', "--allow-remote .* semantic keys add"),
        ('tls_cert = "a.pem"', "tls_cert and tls_key"),
        ('ollama = true\ntls_cert = "a.pem"\ntls_key = "b.pem"', "ollama needs plain HTTP"),
    ],
)
def test_a_wrong_setting_is_named(tmp_path: Path, text: str, words: str) -> None:
    given = tmp_path / "mine.toml"
    given.write_text(text)
    with pytest.raises(InvalidRequestError, match=words):
        load_settings(config=given)


def test_all_problems_are_named_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    given = tmp_path / "mine.toml"
    given.write_text('port = 70000\nkv_bit = 8\ntrusted_export_keys = { a = "x", b = "y" }\n')
    with pytest.raises(InvalidRequestError) as refused:
        load_settings({"log_level": "loud"}, config=given)
    first, *problems = refused.value.message.split("\n  ")
    assert first == "5 problems in the settings:"
    names = ["log_level", "port", "trusted_export_keys.a", "trusted_export_keys.b", "kv_bit"]
    assert sorted(line.split(":")[0].removeprefix("setting ") for line in problems) == sorted(names)
    assert sum(line.endswith(f"(in {given})") for line in problems) == 4

    monkeypatch.setenv("SEMANTIC_ENVIRONMENT", "special")
    for file in (given, tmp_path / "special.toml"):
        file.write_text("port = ")
    with pytest.raises(InvalidRequestError, match=r"(?s)special\.toml cannot.*mine\.toml cannot"):
        load_settings(config=given, config_dir=tmp_path)


def test_missing_files_are_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(InvalidRequestError, match=r"gone\.toml"):
        load_settings(config=tmp_path / "gone.toml")
    monkeypatch.setenv("SEMANTIC_ENVIRONMENT", "nowhere")
    with pytest.raises(InvalidRequestError, match=r"nowhere\.toml"):
        load_settings()


def test_directories(tmp_path: Path) -> None:
    settings = load_settings({"home": tmp_path})
    assert settings.effective_cache_dir == tmp_path / "cache"
    elsewhere = load_settings({"home": tmp_path, "cache_dir": tmp_path / "fast"})
    assert elsewhere.effective_cache_dir == tmp_path / "fast"
    assert "~" not in str(load_settings().home_dir)


# -- a setting that nothing reads is a defect -----------------------------------------------------


def names_read(sources: Iterator[str]) -> set[str]:
    """Attributes read off settings, and off `self` in the settings' own files."""
    read: set[str] = set()
    for source in sources:
        for node in ast.walk(ast.parse(source)):
            if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Load):
                owner = node.value
                name = owner.id if isinstance(owner, ast.Name) else getattr(owner, "attr", "")
                if name in ("settings", "runtime", "limits", "policy", "self"):
                    read.add(node.attr)
    return read


def unread(sources: Iterator[str]) -> set[str]:
    return set(Settings.model_fields) - names_read(sources)


def test_every_setting_is_read() -> None:
    files = [*PROJECT.glob("src/semantic/entrypoints/**/*.py")]
    files += PROJECT.glob("src/semantic/application/**/*.py")
    files += PROJECT.glob("src/semantic/cluster/**/*.py")
    files.append(PROJECT / "src/semantic/adapters/config/settings.py")
    assert unread(path.read_text() for path in files) == set()


def test_an_unread_setting_would_be_found() -> None:
    assert "port" in unread(iter(["settings.host; port = 1; other.port"]))
    assert "port" not in unread(iter(["server.settings.port"]))


def test_bits_are_read_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SEMANTIC_KV_BITS", "8")
    assert load_settings().kv_bits == 8
    monkeypatch.setenv("SEMANTIC_KV_BITS", "12")
    with pytest.raises(InvalidRequestError, match="16, 8 or 4"):
        load_settings()


@pytest.mark.parametrize(
    "given,problem",
    [
        ({"store": "shared"}, "needs database_url and objects_url"),
        ({"objects_url": "s3://x"}, "need store = shared"),
        ({"durability": "none"}, "durability must not be none"),
        ({"encryption_key_command": "key"}, "does not encrypt"),
    ],
)
def test_a_shared_store_needs_its_places(given: dict[str, str], problem: str) -> None:
    places = {"store": "shared", "database_url": "postgresql://db", "objects_url": "s3://x"}
    assert load_settings(places).lease_s == 15
    is_alone = {"store", "objects_url"} & set(given)
    with pytest.raises(InvalidRequestError, match=problem):
        load_settings(given if is_alone else {**places, **given})


@pytest.mark.parametrize("name", ["home", "cache_dir"])
def test_an_empty_directory_is_refused(name: str) -> None:
    with pytest.raises(InvalidRequestError, match=f"setting {name}: it must name a directory"):
        load_settings({name: " "})
