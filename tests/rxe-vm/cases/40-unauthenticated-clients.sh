# shellcheck shell=bash
# Unauthenticated clients at the bootstrap port (a port scanner, a health check, another job): each
# port that listens while the ranks connect gets nonsense, half a HELLO, and silence. The job must
# not notice, and must come up.
# shellcheck source-path=SCRIPTDIR source=../lib.sh
source "$(dirname "${BASH_SOURCE[0]}")/../lib.sh"

# intrude FOLDER: sends nonsense to each listening port of both nodes, a few times each, until
# FOLDER/stop exists. Each connection adds a line to FOLDER/met.
intrude() {
  local folder=$1 address port nonsense client
  local -A visits
  until [[ -e $folder/stop ]]; do
    while read -r address port; do
      visits[$port]=$((${visits[$port]:-0} + 1))
      ((visits[$port] <= 3)) || continue
      for nonsense in 'GET / HTTP/1.0\r\n\r\n' "$(printf 'A%.0s' {1..4000})" '\x4e' ''; do
        # Not by `exec`, which would end the shell if it cannot connect. The descriptor stays open
        # in both forms.
        { :; } {client}<>"/dev/tcp/$address/$port" || continue
        printf '%b' "$nonsense" >&"$client"
        echo "$address:$port: ${nonsense:0:12}" >>"$folder/met"
        # The connection without nonsense stays open in silence.
        [[ -z $nonsense ]] || exec {client}>&-
      done
    done < <(ss -Hltn | awk '{ n = split($4, at, ":"); if (at[1] ~ /^192\.168\./) print at[1], at[n] }')
  done 2>/dev/null
  return 0
}

rails 4
# Only rail 0 carries the bootstrap. Each of its packets is half a second late, so that the
# listeners stay open for long. The clients run as another user, and reach the listeners without
# that delay.
rail_slow 0 500ms
nobody=65534
ip rule add pref 5 uidrange "$nobody-$nobody" lookup local
folder=$(mktemp -d)
chmod 777 "$folder"
: >"$folder/met"
chmod 666 "$folder/met"
setpriv --reuid "$nobody" --clear-groups bash -c "$(declare -f intrude); intrude $folder" &
intruder=$!
spark job sendrecv a1,a2,a3 b1,b2,b3 -b 64K -e 64K -n 2 -w 0 -c 1
touch "$folder/stop"
cat "$folder/met"
wait "$intruder" || fail "the clients' shell ended with status $?"
ip rule del pref 5
check_table 1
check_says 'connected with .* over 3 rails' "that the connection has 3 rails"
[[ -s $folder/met ]] || fail "the clients found no listening port"
