"""What the scripts in this folder share: NCCL's log, the ranks' messages, and times of a CUDA graph."""

import argparse
import collections
import os
import re
import sys
import tempfile
import time
from collections.abc import Callable


def add_network_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--local-hosts", action="store_true", help="each rank is a host of its own to NCCL")
    parser.add_argument("--network", default="Spark", help="the network that NCCL has to use (default: Spark)")


def require_torchrun(parser: argparse.ArgumentParser) -> None:
    missing = [name for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK") if name not in os.environ]
    if missing:
        parser.error(f"{', '.join(missing)} not set: start it with torchrun --nproc-per-node 2 {sys.argv[0]}")


def start_log(rank: int, local_hosts: bool) -> str:
    """Sets what NCCL reads from the environment when it starts; returns the path of the file that NCCL logs to."""
    if local_hosts:
        os.environ["NCCL_HOSTID"] = f"host-{rank}"
        os.environ["SOFTVERBS_NODE"] = str(rank)
        os.environ.setdefault("NCCL_SOCKET_IFNAME", "lo")
    log = os.path.join(tempfile.mkdtemp(prefix="nccl-spark-check-"), "nccl.log")
    os.environ.update(NCCL_DEBUG="INFO", NCCL_DEBUG_SUBSYS="INIT,NET", NCCL_DEBUG_FILE=log)
    return log


def say(rank: int, text: str) -> None:
    if rank == 0:
        print(text, flush=True)


def require(is_right: bool, text: str) -> None:
    if not is_right:
        raise SystemExit(f"rank {os.environ['RANK']}: WRONG: {text}")


def replay_times(replay: Callable[[], None], synchronize: Callable[[], None], replays: int, operations: int) -> tuple[float, float]:
    """Replays a CUDA graph of so many operations; returns the median and the best time of one operation in microseconds."""
    times = []
    for _ in range(replays):
        synchronize()
        begun = time.perf_counter()
        replay()
        synchronize()
        times.append((time.perf_counter() - begun) / operations * 1e6)
    times.sort()
    return times[len(times) // 2], times[0]


def log_lines(log: str) -> list[str]:
    with open(log, errors="replace") as file:
        return file.read().splitlines()


def check_network(rank: int, log: str, wanted: str) -> None:
    """Every channel of this rank went over the network that was asked for."""
    lines = log_lines(log)
    channels = collections.Counter(found for line in lines for found in re.findall(r" via NET/(\w+)", line))
    using = next((line for line in lines if "Using network" in line), "no line says which network")
    warnings = [line for line in lines if " NCCL WARN " in line][:3]
    say(rank, f"NCCL: {using.split('NCCL INFO')[-1].strip()}; ends of channels: {dict(channels)}")
    require(set(channels) == {wanted}, f"channels over {dict(channels)}, not over NET/{wanted} alone; NCCL warns: {warnings}; {log}")
