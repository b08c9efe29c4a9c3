# shellcheck shell=bash
# A cable is pulled before the job starts: the other three rails carry it, and the log names the
# port and the reason.
# shellcheck source-path=SCRIPTDIR source=../lib.sh
source "$(dirname "${BASH_SOURCE[0]}")/../lib.sh"

rails 4 80mbit
rail_down 2
mark 4
spark three all-gather a0,a1,a2,a3 b0,b1,b2,b3 -b 4M -e 4M -n 5 -w 1 -c 1
check_table 1
check_carried 0 1 3
check_unused 2
check_says 'merged 3 rails' "that 3 rails are merged"
check_says 'a2:1 not used as a rail: .*down' "that a2 is down"
check_says 'b2:1 not used as a rail: .*down' "that b2 is down"

# After the cable is put back, the next job uses the rail again.
rail_up 2
mark 4
spark four all-gather a0,a1,a2,a3 b0,b1,b2,b3 -b 4M -e 4M -n 5 -w 1 -c 1
check_table 1
check_carried 2
