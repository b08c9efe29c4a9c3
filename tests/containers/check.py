"""Validates the files of examples/containers: check.py FOLDER. Run by check.sh, in an environment that has its tools.

Each file goes to the validator of its kind, and the command is printed. A file that no validator takes is an error.
"""

import json
import os
import re
import shlex
import subprocess
import sys
import tempfile
from pathlib import Path

import jsonschema
import kubernetes_validate
import yaml

HERE = Path(os.path.relpath(__file__)).parent
SCHEMAS = HERE / "schemas"
PLUGIN = "/usr/local/lib/libnccl-net-spark.so"
YAMLLINT = HERE / "yamllint.yaml"
KUBERNETES = kubernetes_validate.latest_version()


class Wrong(Exception):
    """A fault in a file."""


def main() -> int:
    folder = Path(sys.argv[1])
    files = sorted(path for path in folder.rglob("*") if path.is_file())
    if not files:
        print(f"check: {folder} has no files", file=sys.stderr)
        return 1
    wrong = 0
    for path in files:
        try:
            validate(path)
        except Wrong as error:
            print(f"check: {path}: {error}", file=sys.stderr)
            wrong += 1
    print(f"check: {len(files) - wrong} of {len(files)} files are valid")
    return 1 if wrong else 0


def validate(path: Path) -> None:
    for pattern, validators in KINDS:
        if re.search(pattern, str(path)):
            for validator in validators:
                validator(path)
            return
    raise Wrong("no validator takes this file: add it to KINDS of tests/containers/check.py")


def run(*command: str, quiet_means_valid: bool = False) -> None:
    print(shlex.join(command))
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode or (quiet_means_valid and done.stdout + done.stderr):
        raise Wrong(f"{command[0]}: {(done.stdout + done.stderr).strip()}")


def hadolint(path: Path) -> None:
    run("hadolint", "--no-color", "--failure-threshold", "style", str(path))


def yamllint(path: Path) -> None:
    run("yamllint", "--strict", "-c", str(YAMLLINT), str(path))


def compose(path: Path) -> None:
    run("check-jsonschema", "--builtin-schema", "vendor.compose-spec", str(path))
    services = load(path)[0]["services"]
    for name, service in services.items():
        base = service.get("extends", {})
        file = path.parent / base.get("file", path.name)
        if base and (not file.is_file() or base["service"] not in load(file)[0]["services"]):
            raise Wrong(f"service {name} extends {base}, which does not exist")
        if not base:
            mounts = [volume["target"] for volume in service["volumes"]]
            check_plugin(f"service {name}", service["environment"], mounts)


def shellcheck(path: Path) -> None:
    run("shellcheck", "-x", str(path))
    if not os.access(path, os.X_OK):
        raise Wrong("not executable")


def drop_in(path: Path) -> None:
    """systemd prints the lines that it ignores, and still ends with 0. It searches drop-ins beside the unit."""
    with tempfile.TemporaryDirectory() as folder:
        unit = Path(folder) / "containerd.service"
        unit.write_text("[Service]\nExecStart=/bin/true\n")
        beside = Path(folder) / "containerd.service.d"
        beside.mkdir()
        (beside / path.name).write_text(path.read_text())
        run("systemd-analyze", "verify", "--man=no", str(unit), quiet_means_valid=True)


def kubernetes(path: Path) -> None:
    documents = load(path)
    for document in documents:
        kind = document["kind"]
        if kind == "NetworkAttachmentDefinition":
            against(document, "network-attachment-definition", kind)
            against(parsed(document["spec"]["config"], kind), "cni-network", f"{kind} {document['metadata']['name']}, spec.config")
            continue
        print(f"kubernetes_validate.validate({kind} of {path}, {KUBERNETES!r}, strict=True)")
        try:
            kubernetes_validate.validate(document, KUBERNETES, strict=True)
        except kubernetes_validate.ValidationError as error:
            raise Wrong(f"{kind}: {'.'.join(map(str, error.path))}: {error.message}") from error
        except kubernetes_validate.SchemaNotFoundError as error:
            raise Wrong(f"{kind}: {error}") from error
        if kind == "ConfigMap":
            against(parsed(document["data"]["config.json"], kind), "rdma-devices", f"{kind}, config.json")
    check_references(documents)


def check_references(documents: list[dict]) -> None:
    """Checks that references between a file's documents exist, and that NCCL's path is the mounted file."""
    networks = {one["metadata"]["name"]: json.loads(one["spec"]["config"]) for one in of_kind(documents, "NetworkAttachmentDefinition")}
    pools = [pool for one in of_kind(documents, "ConfigMap") for pool in json.loads(one["data"]["config.json"])["configList"]]
    services = {one["metadata"]["name"] for one in of_kind(documents, "Service")}
    sets = of_kind(documents, "StatefulSet")
    if not sets:
        raise Wrong("no StatefulSet")
    for one in sets:
        template, spec = one["spec"]["template"], one["spec"]["template"]["spec"]
        if one["spec"]["serviceName"] not in services:
            raise Wrong(f"serviceName {one['spec']['serviceName']} is none of the Services {sorted(services)}")
        annotation = template["metadata"].get("annotations", {}).get("k8s.v1.cni.cncf.io/networks", "")
        named = [name.strip() for name in annotation.split(",") if name.strip()]
        if sorted(named) != sorted(networks):
            raise Wrong(f"the pod's networks are {named}, and those of the file {sorted(networks)}")
        volumes = {volume["name"]: volume for volume in spec["volumes"]}
        for container in spec["containers"]:
            mounts = {mount["mountPath"]: mount["name"] for mount in container["volumeMounts"]}
            if missing := set(mounts.values()) - set(volumes):
                raise Wrong(f"no volume {sorted(missing)}")
            variables = {variable["name"]: variable.get("value") for variable in container["env"]}
            check_plugin(f"container {container['name']}", variables, list(mounts))
            asked = {name for name in container["resources"]["limits"] if name.startswith("rdma/")}
            if asked != {f"rdma/{pool['resourceName']}" for pool in pools}:
                raise Wrong(f"the container asks for {sorted(asked)}, and the device plugin has {[pool['resourceName'] for pool in pools]}")
            if not asked and not (spec.get("hostNetwork") and container["securityContext"].get("privileged")):
                raise Wrong("the container cannot open an RDMA device: neither a resource of the device plugin nor privileged")
    masters = {plugin["master"] for network in networks.values() for plugin in network["plugins"] if "master" in plugin}
    selected = {name for pool in pools for name in pool["selectors"].get("ifNames", [])}
    if masters != selected:
        raise Wrong(f"the networks are on {sorted(masters)}, and the device plugin has {sorted(selected)}")


def check_plugin(where: str, variables: dict, mounts: list[str]) -> None:
    if variables.get("NCCL_NET_PLUGIN") != PLUGIN or variables.get("NCCL_NET") != "Spark" or PLUGIN not in mounts:
        raise Wrong(f"{where}: NCCL_NET_PLUGIN is not the mounted {PLUGIN}, or NCCL_NET not Spark")


def of_kind(documents: list[dict], kind: str) -> list[dict]:
    return [one for one in documents if one["kind"] == kind]


def against(value: object, schema: str, what: str) -> None:
    file = SCHEMAS / f"{schema}.schema.json"
    print(f"jsonschema.validate({what}, {file})")
    try:
        jsonschema.validate(value, json.loads(file.read_text()), cls=jsonschema.Draft202012Validator)
    except jsonschema.ValidationError as error:
        raise Wrong(f"{what}: {'.'.join(map(str, error.path))}: {error.message}") from error


def parsed(text: str, what: str) -> object:
    try:
        return json.loads(text)
    except json.JSONDecodeError as error:
        raise Wrong(f"{what}: not JSON: {error}") from error


def load(path: Path) -> list[dict]:
    try:
        return [document for document in yaml.safe_load_all(path.read_text()) if document is not None]
    except yaml.YAMLError as error:
        raise Wrong(f"not YAML: {error}") from error


KINDS = [
    (r"\.Dockerfile$", [hadolint]),
    (r"\.compose\.yaml$", [yamllint, compose]),
    (r"/kubernetes/[^/]*\.yaml$", [yamllint, kubernetes]),
    (r"/kubernetes/[^/]*\.conf$", [drop_in]),
    (r"\.sh$", [shellcheck]),
]

if __name__ == "__main__":
    sys.exit(main())
