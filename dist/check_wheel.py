"""Checks the installed wheel: run by dist/check.sh with the Python that it is installed for."""

import ctypes
import os
from importlib.metadata import entry_points

before = dict(os.environ)
import nccl_net_spark  # noqa: E402

assert dict(os.environ) == before, "importing the package changed the environment"
library = ctypes.CDLL(nccl_net_spark.path())
for symbol in ("ncclNetPlugin_v12", "ncclTunerPlugin_v7"):
    assert hasattr(library, symbol), f"{nccl_net_spark.path()} has no {symbol}"

(plugin,) = entry_points(group="vllm.general_plugins")
register = plugin.load()
register()
assert dict(os.environ) == before, "the vLLM plugin acted without NCCL_SPARK_VLLM=1"
os.environ["NCCL_SPARK_VLLM"] = "1"
os.environ["NCCL_NET"] = "IB"
register()
assert os.environ["NCCL_NET_PLUGIN"] == nccl_net_spark.path()
assert os.environ["NCCL_NET"] == "IB", "a variable that was set was changed"
del os.environ["NCCL_NET"]
register()
assert os.environ["NCCL_NET"] == "Spark"
print(f"wheel: {nccl_net_spark.path()}")
