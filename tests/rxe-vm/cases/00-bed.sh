# shellcheck shell=bash
# The bed alone, without the plugin: every rail carries verbs traffic between the nodes, over its
# own wire only; a rate, a delay, and a pulled cable have their effects.
# shellcheck source-path=SCRIPTDIR source=../lib.sh
source "$(dirname "${BASH_SOURCE[0]}")/../lib.sh"

# ping I COUNT SIZE: sends COUNT messages each way over rail I with the verbs library's own example,
# ibv_rc_pingpong. A queue pair of soft-RoCE with more than 64 packets under way waits until they
# have left (rxe_req.c). After a retransmission it can wait without end. The example resends after
# 67 ms. With 64 KiB on a rail of 80 Mb/s, this happened in 10 of 12 runs at the example's
# own MTU of 1024, and in none at 4096.
ping() {
  local server status=0
  ibv_rc_pingpong -d "b$1" -g "$(gid_index "b$1")" -n "$2" -s "$3" -m 4096 &
  server=$!
  until ss -Hltn 'sport = :18515' | grep -q .; do sleep 0.05; done
  timeout 60 ibv_rc_pingpong -d "a$1" -g "$(gid_index "a$1")" -n "$2" -s "$3" -m 4096 "192.168.$((100 + $1)).2" || status=$?
  if [[ $status != 0 ]]; then
    kill "$server" 2>/dev/null || true
    fail "$2 messages of $3 bytes over rail $1: the client ended with status $status"
  fi
  wait "$server" || fail "$2 messages of $3 bytes over rail $1: the server ended with status $?"
}

# gid_index DEVICE: prints the index of the device's IPv4-mapped GID.
gid_index() {
  local file
  for file in /sys/class/infiniband/"$1"/ports/1/gids/*; do
    if grep -q '^0000:0000:0000:0000:0000:ffff:' "$file"; then
      basename "$file"
      return
    fi
  done
  fail "$1 has no IPv4-mapped GID"
}

rails 4
for rail in 0 1 2 3; do
  mark 4
  ping "$rail" 50 4096
  for other in 0 1 2 3; do
    if [[ $other == "$rail" ]]; then
      for side in a b; do check_sent "$side" "$other" $((50 * 4096)); done
    else
      check_unused "$other"
    fi
  done
done

# At 80 Mb/s, 100 messages of 64 KiB each way take at least 0.65 s of wire time.
rail_rate 1 80mbit
before=$(date +%s%N)
ping 1 100 65536
took_ms=$((($(date +%s%N) - before) / 1000000))
((took_ms >= 600)) || fail "13 MB at 80 Mb/s took only $took_ms ms"
rail_free 1

rail_slow 1 20ms
before=$(date +%s%N)
ping 1 20 64
took_ms=$((($(date +%s%N) - before) / 1000000))
((took_ms >= 800)) || fail "20 round trips with 20 ms each way took only $took_ms ms"
rail_free 1

rail_down 2
rail_up 2
ping 2 10 4096
