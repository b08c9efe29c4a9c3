"""For vLLM's plugin loader (entry point vllm.general_plugins), which calls register() in every process of vLLM's.

register() acts only with NCCL_SPARK_VLLM=1. It sets NCCL_NET_PLUGIN (to the path on its own node)
and NCCL_NET, each only if it is unset or empty. So it also keeps a value that vLLM copied from the
head node.
"""

import os

from . import path


def register() -> None:
    if os.environ.get("NCCL_SPARK_VLLM") != "1":
        return
    for name, value in (("NCCL_NET_PLUGIN", path()), ("NCCL_NET", "Spark")):
        if not os.environ.get(name):
            os.environ[name] = value
