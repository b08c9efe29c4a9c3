# An image with NCCL and Python (vLLM, SGLang, NGC PyTorch, spark-vllm-docker's), and nccl-net-spark
# from its wheel.
#
#   docker build -f wheel.Dockerfile --build-arg IMAGE=lmsysorg/sglang:latest -t sglang-spark FOLDER
#
# FOLDER has one nccl_net_spark-*.whl of the image's architecture.
ARG IMAGE
FROM ${IMAGE}
# No version is pinned: apt takes the versions of the verbs libraries that fit the image, and the
# wheel is the one in the folder. The Python of Ubuntu 24.04 needs PIP_BREAK_SYSTEM_PACKAGES; older
# versions of pip ignore it.
# hadolint ignore=DL3008,DL3013
RUN --mount=type=bind,target=/packages \
    set -eu; \
    set -- /packages/nccl_net_spark-*_"$(uname -m)".whl; \
    if ! [ $# = 1 ] || ! [ -f "$1" ]; then echo "the build's folder needs one wheel for $(uname -m); found: $*" >&2; exit 1; fi; \
    apt-get update; \
    apt-get install -y --no-install-recommends --no-upgrade ibverbs-providers libibverbs1; \
    rm -rf /var/lib/apt/lists/*; \
    PIP_BREAK_SYSTEM_PACKAGES=1 python3 -m pip install --no-cache-dir --no-index --no-deps "$1"; \
    ln -sf "$(python3 -c 'import nccl_net_spark; print(nccl_net_spark.path())')" /usr/local/lib/libnccl-net-spark.so; \
    python3 -c 'from ctypes import CDLL; CDLL("/usr/local/lib/libnccl-net-spark.so"); CDLL("libibverbs.so.1")'
# A full path, so that NCCL does not find another libnccl-net.so of the image first. NCCL_NET=Spark
# is left to the job: with that setting, a container without rails cannot use NCCL at all.
ENV NCCL_NET_PLUGIN=/usr/local/lib/libnccl-net-spark.so
