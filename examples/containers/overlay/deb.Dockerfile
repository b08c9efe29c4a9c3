# An image with NCCL (vLLM, SGLang, NGC PyTorch, spark-vllm-docker's), and nccl-net-spark from its
# Debian package.
#
#   docker build -f deb.Dockerfile --build-arg IMAGE=vllm/vllm-openai:latest -t vllm-spark FOLDER
#
# FOLDER has one nccl-net-spark_*.deb of the image's architecture. apt-get also installs libibverbs1
# and ibverbs-providers, if the image lacks them.
ARG IMAGE
FROM ${IMAGE}
# No version is pinned: apt takes the versions of the verbs libraries that fit the image.
# hadolint ignore=DL3008
RUN --mount=type=bind,target=/packages \
    set -eu; \
    set -- /packages/nccl-net-spark_*_"$(dpkg --print-architecture)".deb; \
    if ! [ $# = 1 ] || ! [ -f "$1" ]; then echo "the build's folder needs one package for $(dpkg --print-architecture); found: $*" >&2; exit 1; fi; \
    apt-get update; \
    apt-get install -y --no-install-recommends --no-upgrade "$1"; \
    rm -rf /var/lib/apt/lists/*; \
    ln -sf "/usr/lib/$(uname -m)-linux-gnu/libnccl-net-spark.so" /usr/local/lib/libnccl-net-spark.so; \
    python3 -c 'from ctypes import CDLL; CDLL("/usr/local/lib/libnccl-net-spark.so"); CDLL("libibverbs.so.1")'
# A full path, so that NCCL does not find another libnccl-net.so of the image first. NCCL_NET=Spark
# is left to the job: with that setting, a container without rails cannot use NCCL at all.
ENV NCCL_NET_PLUGIN=/usr/local/lib/libnccl-net-spark.so
