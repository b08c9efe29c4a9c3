# shellcheck shell=bash
# Two rails on one node, four on the other: only the two common ones are used.
# shellcheck source-path=SCRIPTDIR source=../lib.sh
source "$(dirname "${BASH_SOURCE[0]}")/../lib.sh"

rails 4 80mbit
mark 4
spark two-of-four all-gather a0,a1 b0,b1,b2,b3 -b 4M -e 4M -n 5 -w 1 -c 1
check_table 1
check_says 'connected with .* over 2 rails' "that the connection has 2 rails"
check_carried 0 1
check_unused 2 3
