"""The nccl-net-spark plugin for NCCL, as files. Importing this changes nothing.

    import os, nccl_net_spark
    os.environ["NCCL_NET_PLUGIN"] = nccl_net_spark.path()
    os.environ["NCCL_NET"] = "Spark"

Set both before the first communicator is made, on every rank. `nccl-spark env` prints them for a shell, docker or Ray.
"""

from pathlib import Path

__all__ = ["path"]


def path() -> str:
    """The plugin's file on this machine, for NCCL_NET_PLUGIN."""
    return str(Path(__file__).resolve().parent / "lib" / "libnccl-net-spark.so")
