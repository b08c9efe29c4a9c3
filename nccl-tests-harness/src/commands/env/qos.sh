#!/bin/sh
# Puts RoCE of one network interface on a priority with PFC. Run by nccl-spark-qos@.service.
#
#   nccl-spark-qos INTERFACE
#
# Sets only what differs, because mlx5 takes a port's link down for seconds when its PFC changes.
set -eu

# DSCP:priority of RoCE and of congestion notifications.
readonly mappings='@MAPPINGS@'
readonly priority='@PRIORITY@'
readonly carrier_timeout_s=15
# Tests replace /sys.
readonly sysfs="${SYSFS:-/sys}"

main() {
  [ $# = 1 ] || fail 'usage: nccl-spark-qos INTERFACE'
  interface=$1
  command -v dcb >/dev/null || fail "PFC not set: there is no program dcb; install the package iproute2 (5.12 or newer)"
  output=$(dcb pfc show dev "$interface" 2>&1) ||
    fail "PFC not set: no DCB on this interface ($output); virtual functions have none"
  had_carrier=no
  if has_carrier; then had_carrier=yes; fi
  is_changed=no
  is_pfc_changed=no
  for mapping in $mappings; do
    set_dscp "$mapping"
  done
  set_pfc
  set_pause
  [ $is_changed = yes ] || echo "$interface: PFC on priority $priority: nothing to change"
  if [ $is_pfc_changed = yes ] && [ $had_carrier = yes ]; then
    wait_for_carrier
  fi
}

set_dscp() {
  if has_dscp "$1"; then return; fi
  # The exit status of `dcb app replace` is 0 even after an error, so read the table again.
  output=$(dcb app replace dev "$interface" dscp-prio "$1" 2>&1) || true
  has_dscp "$1" || fail "DSCP:priority $1 not set: $output"
  changed "DSCP:priority $1"
}

has_dscp() {
  dcb -N app show dev "$interface" dscp-prio | grep -qw "$1"
}

set_pfc() {
  if dcb pfc show dev "$interface" prio-pfc | grep -qw "$priority:on"; then return; fi
  output=$(dcb pfc set dev "$interface" prio-pfc "$priority:on" 2>&1) || fail "PFC not set: $output"
  is_pfc_changed=yes
  changed "PFC on priority $priority"
}

# Turns global pause off. A failure is only a warning, because PFC is set already.
set_pause() {
  if ! output=$(ethtool -a "$interface" 2>&1); then
    warn "global pause not read (needs the package ethtool): $output"
    return
  fi
  if ! printf '%s\n' "$output" | grep -q '^[RT]X:[[:space:]]*on'; then return; fi
  if output=$(ethtool -A "$interface" rx off tx off 2>&1); then
    changed 'global pause off'
  else
    warn "global pause not turned off: $output"
  fi
}

wait_for_carrier() {
  seconds=0
  while [ $seconds -lt $carrier_timeout_s ]; do
    # sysfs shows the loss of the carrier a moment after the change, so wait before each check.
    sleep 1
    seconds=$((seconds + 1))
    if has_carrier; then return; fi
  done
  warn "no carrier $carrier_timeout_s s after the change of PFC: check the cable and the switch port"
}

# An interface that is down has an unreadable `carrier`.
has_carrier() {
  [ "$(cat "$sysfs/class/net/$interface/carrier" 2>/dev/null)" = 1 ]
}

changed() {
  is_changed=yes
  echo "$interface: set $1"
}

warn() {
  echo "${interface:-nccl-spark-qos}: $1" >&2
}

fail() {
  warn "$1"
  exit 1
}

main "$@"
