"""What is in deploy/ fits the server's metrics, settings and files, and the tools that read it."""

import importlib
import json
import re
import shutil
import subprocess
import tomllib
from pathlib import Path
from typing import Any

import jsonschema_rs
import pytest
import yaml

from semantic.adapters.config.settings import ENV_PREFIX, Settings
from semantic.adapters.config.sources import load_settings
from semantic.cluster.entrypoints.ray_app import agent_key
from semantic.entrypoints.bootstrap import bootstrap
from tests.http_server import make_settings

pytestmark = pytest.mark.unit

ROOT = Path(__file__).resolve().parents[2]
DEPLOY = ROOT / "deploy"
SUFFIXES = {"histogram": ("_bucket", "_sum", "_count"), "counter": ("",), "gauge": ("",)}


def run(*command: str, cwd: Path = DEPLOY) -> None:
    tool = shutil.which(command[0])
    if tool is None:
        pytest.skip(f"{command[0]} is not installed")
    done = subprocess.run(  # noqa: S603 - the tool that reads this kind of file
        [tool, *command[1:]], cwd=cwd, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr


def read(name: str) -> Any:
    return yaml.safe_load((DEPLOY / name).read_text())


@pytest.fixture(scope="module")
def exported(tmp_path_factory: pytest.TempPathFactory) -> dict[str, set[str]]:
    """The metrics of a server, and the series each has."""
    server = bootstrap(make_settings(tmp_path_factory.mktemp("home")))
    text = server.metrics.render("")[0].decode()
    server.memory.close(10)
    kinds = re.findall(r"^# TYPE (semantic_\w+) (\w+)$", text, re.M)
    return {
        name: {name + suffix for suffix in SUFFIXES[kind]}
        for name, kind in kinds
        if not name.endswith("_created")
    }


def named(expressions: list[str]) -> set[str]:
    return {name for text in expressions for name in re.findall(r"semantic_\w+", text)}


def alert_expressions() -> list[str]:
    return [rule["expr"] for group in read("alerts.yml")["groups"] for rule in group["rules"]]


def dashboard_expressions() -> list[str]:
    dashboard = json.loads((DEPLOY / "grafana/dashboards/semantic.json").read_text())
    return [target["expr"] for panel in dashboard["panels"] for target in panel["targets"]]


@pytest.mark.parametrize("expressions", [alert_expressions, dashboard_expressions])
def test_rules_and_panels_name_series_that_are_exported(
    expressions: Any, exported: dict[str, set[str]]
) -> None:
    assert named(expressions()) <= set[str]().union(*exported.values())


def test_the_dashboard_shows_every_metric(exported: dict[str, set[str]]) -> None:
    shown = named(dashboard_expressions())
    assert [name for name, series in exported.items() if not series & shown] == []


def test_alerts_name_labels_and_are_explained() -> None:
    page = (ROOT / "docs/deployment.md").read_text()
    for rule in (rule for group in read("alerts.yml")["groups"] for rule in group["rules"]):
        assert rule["labels"]["severity"] in {"info", "warning", "critical"}
        assert rule["annotations"]["summary"]
        assert f"`{rule['alert']}`" in page


def test_prometheus_takes_the_rules() -> None:
    run("promtool", "check", "rules", "alerts.yml")
    run("promtool", "test", "rules", "alerts_test.yml")
    run("promtool", "check", "config", "--syntax-only", "prometheus.yml")


def test_systemd_takes_the_unit(tmp_path: Path) -> None:
    unit = (DEPLOY / "semantic.service").read_text()
    assert "ExecStart=/opt/semantic/bin/semantic serve\n" in unit
    # Not installed here, and verify looks for it.
    (tmp_path / "semantic.service").write_text(
        unit.replace("/opt/semantic/bin/semantic", "/bin/sh")
    )
    run("systemd-analyze", "verify", "./semantic.service", cwd=tmp_path)


def test_time_to_stop_is_longer_than_the_servers_phases() -> None:
    phases = 4 * float(Settings.model_fields["shutdown_timeout_s"].default)
    unit = (DEPLOY / "semantic.service").read_text()
    grace = read("compose.yml")["services"]["semantic"]["stop_grace_period"]
    times = (re.findall(r"TimeoutStopSec=(\d+)", unit)[0], grace.rstrip("s"))
    assert all(float(seconds) > phases for seconds in times)


def test_the_image_has_what_it_copies_and_settings_that_exist() -> None:
    text = (DEPLOY / "Dockerfile").read_text()
    copied = [name for line in re.findall(r"^COPY (.*) \S+$", text, re.M) for name in line.split()]
    assert [name for name in copied if not (ROOT / name).exists()] == []
    allowed = {line.removeprefix("!") for line in (ROOT / ".dockerignore").read_text().split()}
    assert set(copied) <= allowed
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = re.findall(r"ARG EXTRAS=(\S+)", text)[0].split(",")
    assert set(extras) <= project["optional-dependencies"].keys()


@pytest.mark.parametrize(
    "name", ["Dockerfile", "compose.yml", "compose.cuda.yml", "semantic.service"]
)
def test_settings_that_are_named_exist(name: str) -> None:
    named_settings = set(re.findall(rf"{ENV_PREFIX}(\w+)(?=[=:])", (DEPLOY / name).read_text()))
    assert named_settings
    assert {setting.lower() for setting in named_settings} <= Settings.model_fields.keys()


def test_haproxy_takes_its_file_and_names_headers_that_the_router_knows() -> None:
    text = (DEPLOY / "haproxy.cfg").read_text()
    for header in set(re.findall(r"req\.hdr\(([\w-]+)\)", text)):
        assert agent_key("/v1/messages", [(header.encode(), b"coder")]) == "coder"
    run("haproxy", "-c", "-f", "haproxy.cfg")


def test_the_ray_service_is_one_and_its_settings_exist() -> None:
    service = read("rayservice.yaml")
    assert schema_problems(service) == []
    config = yaml.safe_load(service["spec"]["serveConfigV2"])
    (application,) = config["applications"]
    module, _, function = application["import_path"].partition(":")
    assert callable(getattr(importlib.import_module(module), function))
    cluster = service["spec"]["rayClusterConfig"]
    (group,) = cluster["workerGroupSpecs"]
    pods = [cluster["headGroupSpec"]["template"]["spec"], group["template"]["spec"]]
    named = {entry["name"] for pod in pods for entry in pod["containers"][0]["env"]}
    own = {name.removeprefix(ENV_PREFIX).lower() for name in named if name.startswith(ENV_PREFIX)}
    assert own | application["args"].keys() <= Settings.model_fields.keys()
    settings = load_settings({**application["args"], "database_url": "postgresql://db"})
    assert (settings.replicas, settings.max_replicas) == (
        group["minReplicas"],
        group["maxReplicas"],
    )
    assert pods[1]["terminationGracePeriodSeconds"] > settings.request_timeout_s
    versions = (ROOT / "constraints.txt").read_text().splitlines()
    assert f"ray=={cluster['rayVersion']}" in versions


def schema_problems(service: Any) -> list[str]:
    schema = json.loads((Path(__file__).parent / "rayservice.schema.json").read_text())
    return sorted(error.message for error in jsonschema_rs.iter_errors(schema, service))


def test_the_schema_refuses_what_the_operator_would() -> None:
    service = read("rayservice.yaml")
    service["spec"]["rayClusterConfig"]["workerGroupSpecs"][0]["minReplica"] = 1
    del service["spec"]["rayClusterConfig"]["headGroupSpec"]["template"]
    missing, unknown = schema_problems(service)
    assert missing == '"template" is a required property'
    assert "'minReplica' was unexpected" in unknown


def test_the_compose_file_mounts_files_that_are_there() -> None:
    services = read("compose.yml")["services"]
    mounts = [mount for service in services.values() for mount in service.get("volumes", [])]
    local = [mount.split(":")[0] for mount in mounts if mount.startswith("./")]
    assert [path for path in local if not (DEPLOY / path).exists()] == []
    target = read("prometheus.yml")["scrape_configs"][0]["static_configs"][0]["targets"]
    assert target == [f"semantic:{Settings.model_fields['port'].default}"]
    assert read("compose.cuda.yml")["services"].keys() <= services.keys()
