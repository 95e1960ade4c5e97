"""What the deployment files promise, read from the files themselves."""

import json
import re
import subprocess
from pathlib import Path, PurePosixPath

import kubernetes_validate
import pytest
import yaml

ROOT = Path(__file__).parents[1]
UID = 10001
KUBERNETES = "1.37"

MANIFESTS = list(yaml.safe_load_all((ROOT / "deploy/kubernetes.yaml").read_text()))
COMPOSE = yaml.safe_load((ROOT / "docker-compose.yml").read_text())
DOCKERFILE = (ROOT / "deploy/Dockerfile").read_text().splitlines()


def manifests(kind):
    return [manifest for manifest in MANIFESTS if manifest["kind"] == kind]


def stateful_set():
    [found] = manifests("StatefulSet")
    return found["spec"]


def pod():
    return stateful_set()["template"]["spec"]


def container():
    [found] = pod()["containers"]
    return found


def coordinator():
    [found] = COMPOSE["services"].values()
    return found


def instruction(name):
    """The last instruction of this name in the Dockerfile: the one in force."""
    found = [line.split(" ", 1) for line in DOCKERFILE if line.startswith(name + " ")]
    return found[-1][1]


def option(args, name):
    """The value of --name in a command line, written `--name=value` or `--name value`."""
    words = [word for arg in args for word in arg.split("=", 1)]
    return words[words.index(f"--{name}") + 1]


def store_folder(args):
    path = option(args, "store").removeprefix("sqlite:///")
    return str(PurePosixPath(path).parent)


def mounted_at(folder):
    return [mount["name"] for mount in container()["volumeMounts"] if mount["mountPath"] == folder]


# Kubernetes


@pytest.mark.parametrize("manifest", MANIFESTS, ids=lambda m: m["metadata"]["name"])
def test_a_manifest_has_known_fields_of_the_right_types_only(manifest):
    assert kubernetes_validate.validate(manifest, KUBERNETES, strict=True) == KUBERNETES


def test_the_schemas_refuse_a_misspelt_field():
    misspelt = {"apiVersion": "v1", "kind": "Service", "spec": {"prots": []}}
    with pytest.raises(kubernetes_validate.ValidationError):
        kubernetes_validate.validate(misspelt, KUBERNETES, strict=True)


def test_one_pod_at_a_time_holds_the_store():
    assert stateful_set()["replicas"] == 1


def test_the_pod_is_nobody_of_importance():
    context = pod()["securityContext"]
    assert context["runAsNonRoot"] is True
    assert context["runAsUser"] == context["runAsGroup"] == context["fsGroup"] == UID
    assert context["seccompProfile"] == {"type": "RuntimeDefault"}
    assert pod()["automountServiceAccountToken"] is False


def test_the_container_writes_to_its_volumes_only_and_gains_no_rights():
    assert container()["securityContext"] == {
        "allowPrivilegeEscalation": False,
        "readOnlyRootFilesystem": True,
        "capabilities": {"drop": ["ALL"]},
    }


def test_the_probes_ask_the_served_port():
    [port] = container()["ports"]
    assert str(port["containerPort"]) == option(container()["args"], "port")
    paths = {"startupProbe": "/healthz", "livenessProbe": "/healthz", "readinessProbe": "/readyz"}
    for probe, path in paths.items():
        assert container()[probe]["httpGet"] == {"path": path, "port": port["name"]}


def test_every_service_leads_to_the_pods_port():
    labels = stateful_set()["template"]["metadata"]["labels"]
    for service in manifests("Service"):
        [port] = service["spec"]["ports"]
        assert service["spec"]["selector"] == labels == stateful_set()["selector"]["matchLabels"]
        assert port["targetPort"] == container()["ports"][0]["name"]
        assert port["port"] == container()["ports"][0]["containerPort"]


def test_the_stateful_set_is_served_by_a_headless_service():
    headless = [s["metadata"]["name"] for s in manifests("Service") if "clusterIP" in s["spec"]]
    assert headless == [stateful_set()["serviceName"]]


def test_the_store_lies_on_the_claimed_volume():
    [claim] = stateful_set()["volumeClaimTemplates"]
    assert mounted_at(store_folder(container()["args"])) == [claim["metadata"]["name"]]


def test_no_service_looks_like_a_setting():
    assert pod()["enableServiceLinks"] is False


def test_the_pod_says_what_it_needs_and_ends_in_peace():
    resources = container()["resources"]
    assert {"cpu", "memory"} <= resources["requests"].keys()
    assert "memory" in resources["limits"]
    assert pod()["terminationGracePeriodSeconds"] == 30


# Compose and the image


def test_compose_publishes_on_loopback_only():
    for published in coordinator()["ports"]:
        assert published.startswith("127.0.0.1:")


def test_compose_publishes_the_port_that_the_image_serves():
    served = option(json.loads(instruction("CMD")), "port")
    assert coordinator()["ports"] == [f"127.0.0.1:{served}:{served}"]
    assert instruction("EXPOSE") == served


def test_compose_keeps_the_images_store_on_a_named_volume():
    folder = store_folder(json.loads(instruction("CMD")))
    [volume] = COMPOSE["volumes"]
    assert coordinator()["volumes"] == [f"{volume}:{folder}"]
    assert instruction("VOLUME") == folder


def test_compose_gives_the_container_no_more_than_it_needs():
    assert coordinator()["read_only"] is True
    assert coordinator()["cap_drop"] == ["ALL"]
    assert coordinator()["security_opt"] == ["no-new-privileges:true"]
    assert "privileged" not in coordinator()


def test_no_argument_of_the_health_check_holds_a_space():
    assert not any(" " in word for word in coordinator()["healthcheck"]["test"])


def test_the_image_runs_as_the_same_user_everywhere():
    assert instruction("USER") == f"{UID}:{UID}"
    assert pod()["securityContext"]["runAsUser"] == UID


def test_compose_and_kubernetes_run_the_same_image_of_a_stated_version():
    images = {coordinator()["image"], container()["image"]}
    bases = {line.split()[1] for line in DOCKERFILE if line.startswith("FROM ")}
    assert len(images) == 1
    for image in images | bases:
        _, _, tag = image.partition(":")
        assert tag
        assert tag != "latest"


def test_the_image_has_what_it_copies():
    for line in DOCKERFILE:
        if line.startswith("COPY ") and "--from" not in line:
            assert all((ROOT / source).exists() for source in line.split()[1:-1]), line


# Every file. The words are put together here, so that this file does not hold them.

REGISTRIES = ["pypi org", "files pythonhosted org", "registry npmjs org", "deb debian org"]
HOSTS = "|".join(re.escape(name.replace(" ", ".")) for name in REGISTRIES)
ELSEWHERE = re.compile(HOSTS + r"|(?<![\w./-])/(work|root)/")


def test_no_file_names_a_registry_or_a_folder_of_one_machine():
    listed = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT,
        check=True,
        capture_output=True,
        text=True,
    ).stdout.split("\0")
    files = [name for name in listed if (ROOT / name).is_file()]
    texts = {name: (ROOT / name).read_text(errors="replace") for name in files}
    assert "Makefile" in files
    assert {name: found[0] for name in files if (found := ELSEWHERE.search(texts[name]))} == {}


@pytest.mark.parametrize("folder", ["work", "root"])
def test_a_folder_of_one_machine_is_found(folder):
    assert ELSEWHERE.search(f'"/{folder}/x"')
    assert not ELSEWHERE.search(f"deploy/{folder}/x")


@pytest.mark.parametrize("registry", REGISTRIES)
def test_a_registry_is_found(registry):
    assert ELSEWHERE.search(f"https://{registry.replace(' ', '.')}/simple")
