"""Prints the SBOM of the release as CycloneDX 1.6 JSON: every crate that is linked into a file of it.

The crates are those that cargo metadata resolves for Linux, x86-64 and aarch64, without what only tests and build scripts use.
"""

import json
import os
import subprocess
import sys
from datetime import datetime, timezone
from uuid import NAMESPACE_URL, uuid5

from cyclonedx.contrib.license.factories import LicenseFactory
from cyclonedx.model.bom import Bom
from cyclonedx.model.component import Component, ComponentType
from cyclonedx.output.json import JsonV1Dot6
from packageurl import PackageURL

TARGETS = ("x86_64-unknown-linux-gnu", "aarch64-unknown-linux-gnu")
PRODUCTS = ("nccl-net-spark", "nccl-tests-harness", "softverbs")


def main():
    packages, edges = {}, {}
    for target in TARGETS:
        text = subprocess.run(
            ["cargo", "metadata", "--locked", "--format-version", "1", "--filter-platform", target],
            check=True, capture_output=True, text=True,
        ).stdout
        metadata = json.loads(text)
        packages |= {package["id"]: package for package in metadata["packages"]}
        for node in metadata["resolve"]["nodes"]:
            linked = [dep["pkg"] for dep in node["deps"] if any(kind["kind"] is None for kind in dep["dep_kinds"])]
            edges.setdefault(node["id"], set()).update(linked)
    products = {identifier for identifier, package in packages.items() if package["name"] in PRODUCTS and not package["source"]}
    if len(products) != len(PRODUCTS):
        sys.exit(f"sbom: cargo metadata names {len(products)} of the packages {', '.join(PRODUCTS)}")
    wanted = reach(products, edges)

    version = next(packages[identifier]["version"] for identifier in products)
    bom = Bom(serial_number=uuid5(NAMESPACE_URL, f"nccl-net-spark {version}"))
    bom.metadata.timestamp = datetime.fromtimestamp(int(os.environ["SOURCE_DATE_EPOCH"]), timezone.utc)
    bom.metadata.component = Component(type=ComponentType.APPLICATION, name="nccl-net-spark", version=version, bom_ref="nccl-net-spark")
    components = {identifier: component(packages[identifier]) for identifier in sorted(wanted)}
    for one in components.values():
        bom.components.add(one)
    bom.register_dependency(bom.metadata.component, [components[identifier] for identifier in products])
    for identifier, one in components.items():
        bom.register_dependency(one, [components[other] for other in edges[identifier] if other in components])
    print(JsonV1Dot6(bom).output_as_string(indent=1))


def reach(start, edges):
    seen, left = set(), list(start)
    while left:
        identifier = left.pop()
        if identifier not in seen:
            seen.add(identifier)
            left += edges.get(identifier, ())
    return seen


def component(package):
    name, version = package["name"], package["version"]
    url = PackageURL(type="cargo", name=name, version=version)
    # Cargo once allowed "MIT/Apache-2.0" for a choice.
    licence = (package["license"] or "").replace("/", " OR ")
    licences = [LicenseFactory().make_from_string(licence)] if licence else []
    return Component(type=ComponentType.LIBRARY, name=name, version=version, purl=url, bom_ref=str(url), licenses=licences)


if __name__ == "__main__":
    main()
