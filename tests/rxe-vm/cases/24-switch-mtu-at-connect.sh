# shellcheck shell=bash
# Interfaces with an MTU of 9000 on a switch that drops packets above 1500 bytes. Packets of the
# ports' path MTU, 4096, are lost without an error. The job runs with path MTU 1024 and logs a
# warning.
# shellcheck source-path=SCRIPTDIR source=../lib.sh
source "$(dirname "${BASH_SOURCE[0]}")/../lib.sh"

bridged_rails 2 1500
sysctl -qw net.ipv4.conf.all.arp_ignore=1 net.ipv4.conf.all.arp_announce=2
equal_rails 2
for device in a0 a1 b0 b1; do
  ibv_devinfo -d "$device" | grep 'active_mtu:.*4096' || fail "$device has another path MTU than 4096"
done
# On a single connection, a rail may recover more than a second after the other rails. The job must
# take longer.
mark 2
spark small all-gather a0,a1 b0,b1 -b 4M -e 4M -n 40 -w 1 -c 1 "${slow_wire[@]}"
check_table 1
check_carried 0 1
check_says 'WARN NET/Spark: .*: packets of 4096 bytes are lost, .*; using path MTU 1024: set MTU 9000' \
  "that the job runs with path MTU 1024, with the cure"
