# shellcheck shell=bash
# All-gather over four merged rails: every byte right at every size, and all four rails really carry the large sizes.
# shellcheck source-path=SCRIPTDIR source=../lib.sh
source "$(dirname "${BASH_SOURCE[0]}")/../lib.sh"

rails 4
spark sizes all-gather a0,a1,a2,a3 b0,b1,b2,b3 -b 8 -e 16M -f 4 -n 5 -w 1 -c 1
check_table 11
check_says 'merged 4 rails' "that 4 rails are merged"
check_says 'connected with .* over 4 rails: .*a0.*a1.*a2.*a3' "that the connection has 4 rails"

# Of 6 times 16 MiB all-gathered each side sends half. Equal rails: each should carry about a quarter of it. (Rails that only
# the processors limit are not equal, and carry what they can.)
equal_rails 4
mark 4
spark large all-gather a0,a1,a2,a3 b0,b1,b2,b3 -b 16M -e 16M -n 5 -w 1 -c 1
check_table 1
for rail in 0 1 2 3; do
  check_share a "$rail" 10 $((6 * 8 * 1024 * 1024))
  check_share b "$rail" 10 $((6 * 8 * 1024 * 1024))
done
