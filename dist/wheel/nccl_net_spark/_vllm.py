"""For vLLM's plugin loader (entry point vllm.general_plugins), which calls register() in every process of vLLM's.

It acts only with NCCL_SPARK_VLLM=1, and fills in what is unset: NCCL_NET_PLUGIN with the path on the node that it runs on, and
NCCL_NET. A value that is set stays, also one that vLLM copied from the head node.
"""

import os

from . import path


def register() -> None:
    if os.environ.get("NCCL_SPARK_VLLM") != "1":
        return
    for name, value in (("NCCL_NET_PLUGIN", path()), ("NCCL_NET", "Spark")):
        if not os.environ.get(name):
            os.environ[name] = value
