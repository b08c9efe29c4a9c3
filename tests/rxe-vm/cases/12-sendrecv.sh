# shellcheck shell=bash
# Sends and receives in both directions together, over four merged rails, with one channel and with
# four.
# shellcheck source-path=SCRIPTDIR source=../lib.sh
source "$(dirname "${BASH_SOURCE[0]}")/../lib.sh"

rails 4
spark one-channel sendrecv a0,a1,a2,a3 b0,b1,b2,b3 -b 1 -e 4M -f 8 -n 5 -w 1 -c 1
check_table 8
equal_rails 4
mark 4
spark four-channels sendrecv a0,a1,a2,a3 b0,b1,b2,b3 -b 4M -e 4M -n 5 -w 1 -c 1 --channels 4
check_table 1
check_carried 0 1 2 3
