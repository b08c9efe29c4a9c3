# shellcheck shell=bash
# All-gather over four merged rails: every byte is right at every size, and all four rails carry the
# large sizes.
# shellcheck source-path=SCRIPTDIR source=../lib.sh
source "$(dirname "${BASH_SOURCE[0]}")/../lib.sh"

rails 4
spark sizes all-gather a0,a1,a2,a3 b0,b1,b2,b3 -b 8 -e 16M -f 4 -n 5 -w 1 -c 1
check_table 11
check_says 'merged 4 rails' "that 4 rails are merged"
check_says 'connected with .* over 4 rails: .*a0.*a1.*a2.*a3' "that the connection has 4 rails"

# Rails of the same speed, limited by the wires and not only by the processors.
equal_rails 4
mark 4
spark large all-gather a0,a1,a2,a3 b0,b1,b2,b3 -b 16M -e 16M -n 5 -w 1 -c 1
check_table 1
check_carried 0 1 2 3
