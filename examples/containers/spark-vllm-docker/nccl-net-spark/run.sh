#!/bin/bash
# A mod of spark-vllm-docker: its launch-cluster.sh copies this folder into the container of each
# node, and runs this file there as root, before vLLM starts.
#
#   cp /usr/local/lib/libnccl-net-spark.so THIS-FOLDER/
#   ./launch-cluster.sh --apply-mod THIS-FOLDER exec vllm serve MODEL --tensor-parallel-size 2
#
# A mod cannot change the environment of later processes. So this script writes NCCL_NET_PLUGIN and
# NCCL_NET to /etc/nccl.conf. NCCL reads that file for variables that the environment does not set
# (setEnvFile in NCCL's src/misc/param.cc).
set -euo pipefail
shopt -s inherit_errexit

readonly library=/usr/local/lib/libnccl-net-spark.so
readonly settings=/etc/nccl.conf

main() {
  cd "$(dirname "${BASH_SOURCE[0]}")"
  check_variable NCCL_NET_PLUGIN "$library"
  check_variable NCCL_NET Spark
  install_library
  install_verbs
  python3 -c 'import ctypes, sys; ctypes.CDLL(sys.argv[1]); ctypes.CDLL("libibverbs.so.1")' "$library" ||
    die "this image cannot load the plugin: the lines above say why"
  write_settings
  echo "nccl-net-spark: $settings names $library and NCCL_NET=Spark"
}

# Stops if the environment or the user's own file sets another value: NCCL prefers both to
# /etc/nccl.conf.
check_variable() {
  local name=$1 wanted=$2 value=${!1-} own
  [[ ! -v $name || $value == "$wanted" ]] ||
    die "$name=$value is set in this container, so NCCL would not take the plugin; give launch-cluster.sh: -e NCCL_NET_PLUGIN=$library -e NCCL_NET=Spark"
  own=${NCCL_CONF_FILE:-$HOME/.nccl.conf}
  [[ ! -f $own ]] || ! grep -q "^$name=" "$own" || [[ $(grep -m 1 "^$name=" "$own") == "$name=$wanted" ]] ||
    die "$own sets $name to something else, and NCCL reads it before $settings: remove the line"
}

install_library() {
  if [[ -f libnccl-net-spark.so ]]; then
    install -m 644 libnccl-net-spark.so "$library"
  elif [[ ! -f $library ]]; then
    die "copy libnccl-net-spark.so into the mod's folder on the node where you start launch-cluster.sh"
  fi
}

# The image of spark-vllm-docker has the verbs libraries; other images may not.
install_verbs() {
  if [[ ! -f /etc/libibverbs.d/mlx5.driver ]] || ! ldconfig -p | grep -q 'libibverbs\.so\.1 '; then
    apt-get update -qq
    DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends libibverbs1 ibverbs-providers
  fi
}

# Writes both variables. Removes their older lines, because NCCL uses the first value of a name.
write_settings() {
  local lines=
  if [[ -f $settings ]]; then lines=$(grep -Ev '^NCCL_NET(_PLUGIN)?=' "$settings" || true); fi
  printf '%s\n' ${lines:+"$lines"} "NCCL_NET_PLUGIN=$library" NCCL_NET=Spark >"$settings"
}

die() {
  echo "nccl-net-spark: $*" >&2
  exit 1
}

main
