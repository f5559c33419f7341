"""What the deployment files say agrees with the settings, the protos and each other."""

from __future__ import annotations

import os
import re
import tomllib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import yaml

from protos.v1 import coordinator_pb2, draft_pb2, target_pb2
from splitspec.config import (
    ENV_PREFIX,
    CoordinatorSettings,
    DraftSettings,
    ServerSettings,
    TargetSettings,
    load_settings,
)

ROOT = Path(__file__).parents[2]
DEPLOY = ROOT / "deploy"
OVERLAYS = ["base", "cpu"]
# Read beside the settings, by whatever converts models.
CACHE_DIR = f"{ENV_PREFIX}CACHE_DIR"


@dataclass(frozen=True)
class Role:
    """One process: its names in compose and Kubernetes, its settings, its gRPC service."""

    compose: str
    kubernetes: str
    settings: type[ServerSettings]
    service: str

    @property
    def port(self) -> int:
        return int(self.settings.model_fields["port"].default)

    @property
    def variables(self) -> set[str]:
        return {f"{ENV_PREFIX}{name.upper()}" for name in self.settings.model_fields}


def full_name(descriptor: Any) -> str:
    (service,) = descriptor.services_by_name.values()
    return str(service.full_name)


ROLES = [
    Role("coordinator", "coordinator", CoordinatorSettings, full_name(coordinator_pb2.DESCRIPTOR)),
    Role("draft", "draft-worker", DraftSettings, full_name(draft_pb2.DESCRIPTOR)),
    Role("target", "target-worker", TargetSettings, full_name(target_pb2.DESCRIPTOR)),
]
each_role = pytest.mark.parametrize("role", ROLES, ids=lambda role: role.compose)
each_overlay = pytest.mark.parametrize("overlay", OVERLAYS)


def compose() -> Any:
    """The compose file, with the defaults of its variables."""
    text = (DEPLOY / "compose.yaml").read_text()
    return yaml.safe_load(re.sub(r"\$\{\w+:-([^}]*)\}", r"\1", text))


def manifests(role: Role) -> dict[str, Any]:
    """The role's manifests by kind."""
    text = (DEPLOY / f"k8s/base/{role.kubernetes}.yaml").read_text()
    return {manifest["kind"]: manifest for manifest in yaml.safe_load_all(text)}


def pod(role: Role) -> Any:
    return manifests(role)["Deployment"]["spec"]["template"]["spec"]


def container(role: Role) -> Any:
    (only,) = pod(role)["containers"]
    return only


def config_map(name: str, overlay: str) -> dict[str, str]:
    """A generated ConfigMap: the base's literals, then the overlay's."""
    literals: dict[str, str] = {}
    for folder in dict.fromkeys(["base", overlay]):
        for generator in yaml.safe_load((DEPLOY / f"k8s/{folder}/kustomization.yaml").read_text())[
            "configMapGenerator"
        ]:
            if generator["name"] == name:
                literals |= dict(literal.split("=", 1) for literal in generator["literals"])
    return literals


def kubernetes_environment(role: Role, overlay: str) -> dict[str, str]:
    """The container's environment: ConfigMaps, then values; what the cluster fills in stays a number."""
    environment: dict[str, str] = {}
    for source in container(role)["envFrom"]:
        if "configMapRef" in source:
            environment |= config_map(source["configMapRef"]["name"], overlay)
    for entry in container(role)["env"]:
        environment[entry["name"]] = entry.get("value", "1")
    return environment


def dockerfile_stage(role: Role) -> str:
    stages = re.split(r"(?m)^FROM ", (DEPLOY / "Dockerfile").read_text())
    (stage,) = [stage for stage in stages if stage.split("\n", 1)[0].endswith(f" AS {role.kubernetes}")]
    return stage


def check_settings(role: Role, environment: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    ours = {name: value for name, value in environment.items() if name.startswith(ENV_PREFIX)}
    assert ours.keys() - role.variables == set()
    for name in [name for name in os.environ if name.startswith(ENV_PREFIX)]:
        monkeypatch.delenv(name)
    for name, value in ours.items():
        monkeypatch.setenv(name, value)
    settings = load_settings(role.settings)
    assert settings.port == role.port
    assert "127.0.0.1" not in settings.redis_url


@pytest.mark.parametrize(
    "path", sorted(DEPLOY.rglob("*.yaml")), ids=lambda path: str(path.relative_to(DEPLOY))
)
def test_yaml_parses_without_empty_documents(path: Path) -> None:
    documents = list(yaml.safe_load_all(path.read_text()))
    assert documents
    assert all(documents)


def test_every_variable_named_anywhere_is_a_setting() -> None:
    known = {CACHE_DIR}.union(*(role.variables for role in ROLES))
    files = [path for path in DEPLOY.rglob("*") if path.is_file()]
    named = {name for path in files for name in re.findall(rf"{ENV_PREFIX}[A-Z_]*[A-Z]", path.read_text())}
    assert named
    assert named - known == set()


@each_role
def test_compose_environment_makes_settings(role: Role, monkeypatch: pytest.MonkeyPatch) -> None:
    service = compose()["services"][role.compose]
    check_settings(role, service["environment"], monkeypatch)
    assert service["build"]["target"] == role.kubernetes


@each_overlay
@each_role
def test_kubernetes_environment_makes_settings(
    role: Role, overlay: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    check_settings(role, kubernetes_environment(role, overlay), monkeypatch)


@each_role
def test_image_serves_its_port_and_checks_its_own_service(role: Role) -> None:
    stage = dockerfile_stage(role)
    assert f"EXPOSE {role.port}\n" in stage
    assert f'CMD ["splitspec", "health", "127.0.0.1:{role.port}", "{role.service}"]' in stage
    assert f'ENTRYPOINT ["splitspec", "serve", "{role.compose}"]' in stage


@each_role
def test_probes_ask_the_right_port_and_service(role: Role) -> None:
    ours = container(role)
    assert ours["ports"] == [{"name": "grpc", "containerPort": role.port}]
    assert ours["startupProbe"]["grpc"] == {"port": role.port}
    assert ours["livenessProbe"]["grpc"] == {"port": role.port}
    assert ours["readinessProbe"]["grpc"] == {"port": role.port, "service": role.service}


@each_role
def test_advertised_address_has_the_port(role: Role) -> None:
    environment = kubernetes_environment(role, "base")
    assert environment[f"{ENV_PREFIX}ADVERTISE"] == f"$(POD_IP):{role.port}"
    if role.settings is not CoordinatorSettings:
        in_compose = compose()["services"][role.compose]["environment"]
        assert in_compose[f"{ENV_PREFIX}ADVERTISE"] == f"{role.compose}:{role.port}"


def test_only_the_coordinator_is_exposed() -> None:
    port = ROLES[0].port
    exposed = {
        name: service["ports"] for name, service in compose()["services"].items() if "ports" in service
    }
    assert exposed == {"coordinator": [f"127.0.0.1:{port}:{port}"]}
    (service_port,) = manifests(ROLES[0])["Service"]["spec"]["ports"]
    assert service_port["port"] == port
    assert all("Service" not in manifests(worker) for worker in ROLES[1:])


@each_role
def test_processes_are_killed_only_after_their_grace_time(role: Role) -> None:
    name = f"{ENV_PREFIX}SHUTDOWN_GRACE_S"
    service = compose()["services"][role.compose]
    assert int(service["stop_grace_period"].removesuffix("s")) > int(service["environment"][name])
    grace = int(kubernetes_environment(role, "base")[name])
    assert pod(role)["terminationGracePeriodSeconds"] > grace


@each_role
def test_image_tags_are_the_version_of_the_package(role: Role) -> None:
    version = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]
    image = f"splitspec/{role.kubernetes}"
    assert compose()["services"][role.compose]["image"] == f"{image}:{version}"
    assert container(role)["image"] == image
    tags = yaml.safe_load((DEPLOY / "k8s/base/kustomization.yaml").read_text())["images"]
    assert {"name": image, "newTag": version} in tags
