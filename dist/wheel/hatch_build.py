"""Tags the wheel: any Python 3, one platform."""

import os

from hatchling.builders.hooks.plugin.interface import BuildHookInterface


class Tag(BuildHookInterface):
    def initialize(self, version, build_data):
        platform = os.environ.get("NCCL_NET_SPARK_PLATFORM")
        if not platform:
            raise RuntimeError("NCCL_NET_SPARK_PLATFORM is not set: build the wheel with dist/build.sh")
        build_data["pure_python"] = False
        build_data["tag"] = f"py3-none-{platform}"
