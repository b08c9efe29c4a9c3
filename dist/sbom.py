"""Prints the SBOM of the release as CycloneDX 1.6 JSON: everything that is linked into its files.

It has no parts that are only used to build or test."""

import os
from datetime import datetime, timezone
from uuid import NAMESPACE_URL, uuid5

from cyclonedx.contrib.license.factories import LicenseFactory
from cyclonedx.model.bom import Bom
from cyclonedx.model.component import Component, ComponentType
from cyclonedx.output.json import JsonV1Dot6

from linked import parts


def main():
    found = parts()
    ours = [part for part in found.values() if part.is_ours]
    version = ours[0].version
    bom = Bom(serial_number=uuid5(NAMESPACE_URL, f"nccl-net-spark {version}"))
    bom.metadata.timestamp = datetime.fromtimestamp(int(os.environ["SOURCE_DATE_EPOCH"]), timezone.utc)
    bom.metadata.component = Component(type=ComponentType.APPLICATION, name="nccl-net-spark", version=version, bom_ref="nccl-net-spark")
    components = {key: component(part) for key, part in found.items()}
    for one in components.values():
        bom.components.add(one)
    bom.register_dependency(bom.metadata.component, [components[part.key] for part in ours])
    for key, part in found.items():
        bom.register_dependency(components[key], [components[other] for other in sorted(part.depends)])
    print(JsonV1Dot6(bom).output_as_string(indent=1))


def component(part):
    licences = [LicenseFactory().make_from_string(part.licence)] if part.licence else []
    reference = str(part.purl or part.key)
    return Component(
        type=ComponentType.LIBRARY, name=part.name, version=part.version or None, purl=part.purl, bom_ref=reference, licenses=licences
    )


if __name__ == "__main__":
    main()
