"""Plants errors in copies of examples/containers, and fails where check.py does not notice one.

    planted.py FOLDER

Run by check.sh."""

import contextlib
import io
import shutil
import sys
import tempfile
from pathlib import Path

import check

# File, replaced text, replacement, and a word of the expected message. A new file has None in place
# of the replaced text.
PLANTED = [
    ("overlay/deb.Dockerfile", "apt-get install", "apt install", "DL3027"),
    ("overlay/deb.Dockerfile", "ENV NCCL_NET_PLUGIN=", "EVN NCCL_NET_PLUGIN=", "unexpected"),
    ("overlay/wheel.Dockerfile", "--no-cache-dir ", "", "DL3042"),
    ("overlay/wheel.Dockerfile", "--no-install-recommends ", "", "DL3015"),
    ("compose/spark.compose.yaml", "network_mode:", "network_mod:", "network_mod"),
    ("compose/spark.compose.yaml", "      memlock: -1", "      memlock: [-1]", "memlock"),
    ("compose/spark.compose.yaml", "      NCCL_NET: Spark", "      NCCL_NET: IB", "NCCL_NET not Spark"),
    ("compose/vllm.compose.yaml", "    entrypoint:", "    entrypont:", "entrypont"),
    ("compose/vllm.compose.yaml", "service: spark", "service: sparks", "does not exist"),
    ("compose/sglang.compose.yaml", "    image:", "    image: a\n    image:", "duplication of key"),
    ("kubernetes/host-network.yaml", "hostNetwork:", "hostNetwrok:", "hostNetwrok"),
    ("kubernetes/host-network.yaml", "replicas: 2", 'replicas: "2"', "replicas"),
    ("kubernetes/host-network.yaml", "privileged: true", "privileged: false", "cannot open an RDMA device"),
    ("kubernetes/host-network.yaml", "apiVersion: apps/v1", "apiVersion: apps/v1beta1", "StatefulSet"),
    ("kubernetes/multus-rdma.yaml", "mountPath: /models", "mountpath: /models", "volumeMounts.1"),
    ("kubernetes/multus-rdma.yaml", '"mode": "bridge"', '"mode": "brigde"', "spec.config"),
    ("kubernetes/multus-rdma.yaml", '"selectors":', '"selector":', "selector"),
    ("kubernetes/multus-rdma.yaml", "networks: rail-0, rail-1", "networks: rail-0, rail-2", "rail-2"),
    ("kubernetes/multus-rdma.yaml", "rdma/spark_rails: 1", "rdma/spark_rail: 1", "spark_rail"),
    ("kubernetes/multus-rdma.yaml", '"ifNames": ["enp1s0f0np0", ', '"ifNames": [', "enp1s0f0np0"),
    ("kubernetes/multus-rdma.yaml", "  config: |-", "  confg: |-", "config"),
    ("kubernetes/10-memlock.conf", "LimitMEMLOCK", "LimitMEMLOK", "LimitMEMLOK"),
    ("kubernetes/10-memlock.conf", "=infinity", "=unlimted", "unlimted"),
    ("spark-vllm-docker/nccl-net-spark/run.sh", 'install -m 644 libnccl-net-spark.so "$library"', "install -m 644 libnccl-net-spark.so $libary", "libary"),
    ("compose/new.yml", None, "services: {}\n", "no validator takes this file"),
    ("kubernetes/README", None, "text\n", "no validator takes this file"),
]


def main() -> int:
    unnoticed = 0
    for file, old, new, word in PLANTED:
        with tempfile.TemporaryDirectory() as copy:
            folder = Path(copy) / "containers"
            shutil.copytree(sys.argv[1], folder)
            path = folder / file
            if old is not None:
                text = path.read_text()
                if old not in text:
                    print(f"planted: {file} has no {old!r} any more: change PLANTED", file=sys.stderr)
                    unnoticed += 1
                    continue
                new = text.replace(old, new, 1)
            path.write_text(new)
            said = complaint(path)
            if word not in said:
                print(f"planted: {file}: {old!r} -> an error that is not noticed; the check said: {said or 'valid'}", file=sys.stderr)
                unnoticed += 1
    print(f"planted: {len(PLANTED) - unnoticed} of {len(PLANTED)} errors are noticed")
    return 1 if unnoticed else 0


def complaint(path: Path) -> str:
    try:
        with contextlib.redirect_stdout(io.StringIO()):
            check.validate(path)
    except check.Wrong as error:
        return str(error)
    return ""


if __name__ == "__main__":
    sys.exit(main())
