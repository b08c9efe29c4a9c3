//! Examples below the help of each command, and in its manual page.

/// Of the program.
pub const ALL: &str = "\
Examples:
  nccl-spark rails                                 # which ports of this machine would be merged?
  nccl-spark all-gather -b 8 -e 64M -f 2           # two ranks on this machine; without RDMA in software
  sudo nccl-spark install                          # into /usr/local

Collectives also have nccl-tests' names: all_gather, all_reduce, reduce_scatter.
The exit status is 0 when all is well, 1 when a run failed or data was wrong, 2 when the command line is wrong.";

pub const ALL_GATHER: &str = "\
Examples:
  nccl-spark all-gather -b 8 -e 64M -f 2           # two ranks on this machine
  nccl-spark all-gather -r 4 --profile spark-2cable --scale 0.1 --json run.json
Across machines:
  mpirun -np 2 -H spark-1,spark-2 --map-by node \\
    nccl-spark all-gather --rendezvous spark-1:29501 -b 8 -e 1G -f 2";

pub const ALL_REDUCE: &str = "\
Examples:
  nccl-spark all-reduce -b 8 -e 64M -f 2           # two ranks on this machine
  nccl-spark all-reduce -r 3 -n 100 -c 10          # 100 timed and 10 checked iterations
  mpirun -np 2 -H spark-1,spark-2 --map-by node nccl-spark all-reduce --rendezvous spark-1:29501";

pub const REDUCE_SCATTER: &str = "\
Examples:
  nccl-spark reduce-scatter -b 8 -e 64M -f 2       # two ranks on this machine
  mpirun -np 2 -H spark-1,spark-2 --map-by node nccl-spark reduce-scatter --rendezvous spark-1:29501";

pub const BROADCAST: &str = "\
Examples:
  nccl-spark broadcast -b 8 -e 64M -f 2            # two ranks on this machine
  mpirun -np 2 -H spark-1,spark-2 --map-by node nccl-spark broadcast --rendezvous spark-1:29501";

pub const ALL_TO_ALL: &str = "\
Examples:
  nccl-spark alltoall -r 4 -b 8 -e 64M -f 2        # four ranks on this machine
  mpirun -np 2 -H spark-1,spark-2 --map-by node nccl-spark alltoall --rendezvous spark-1:29501";

pub const SEND_RECV: &str = "\
Examples:
  nccl-spark sendrecv -b 8 -e 64M -f 2             # two ranks on this machine
  nccl-spark sendrecv -r 3 --slow-rail rocep1s0f0=0.25
  mpirun -np 2 -H spark-1,spark-2 --map-by node nccl-spark sendrecv --rendezvous spark-1:29501";

pub const BENCH: &str = "\
Examples:
  nccl-spark bench bandwidth latency               # two ranks on this machine
  nccl-spark bench --scale 0.02 --against libnccl-net-other.so --json bench.json --plot plots
  mpirun -np 2 -H spark-1,spark-2 --map-by node nccl-spark bench --rendezvous spark-1:29501";

pub const TUNE: &str = "\
Examples:
  nccl-spark tune --dry-run                        # shows what it would write
  mpirun -np 2 -H spark-1,spark-2 --map-by node nccl-spark tune --rendezvous spark-1:29501
  nccl-spark tune collectives --dir ~/nccl-tests --mpirun '-np 2 -H spark-1,spark-2'";

pub const NCCL_TESTS: &str = "\
Examples:
  nccl-spark nccl-tests all_gather --dir ~/nccl-tests -- -b 8 -e 128M -f 2
  nccl-spark nccl-tests all_reduce --dir ~/nccl-tests --compare spark,ib,socket --json out.json
  nccl-spark nccl-tests all_gather --dir ~/nccl-tests --mpirun '-np 2 -H spark-1,spark-2'";

pub const COMMUNICATORS: &str = "\
Examples:
  nccl-spark communicators                         # all scenarios, two ranks on this machine's GPUs
  nccl-spark communicators again --count 10000
  nccl-spark communicators lost mixed -r 4 --log log.txt";

pub const MEMORY: &str = "\
Examples:
  nccl-spark memory                                # all kinds of memory that this machine has
  nccl-spark memory --litmus 60                    # and for a minute, whether LL128 is safe";

pub const FABRIC: &str = "\
Examples, while `nccl-spark all-gather --profile spark-2cable --scale 0.01 -n 1000` runs:
  nccl-spark fabric down 1:rocep1s0f0              # on rank 1
  nccl-spark fabric up 1:rocep1s0f0
  nccl-spark fabric slow '*:rocep1s0f0' 0.25       # on all ranks";

pub const RAILS: &str = "\
Examples:
  nccl-spark rails
  NCCL_IB_HCA=^rocep1s0f1 nccl-spark rails         # with a filter";

pub const SETTINGS: &str = "\
Examples:
  nccl-spark settings
  NCCL_IB_TIMEOUT=18 nccl-spark settings           # with the current value of a variable";

pub const INSTALL: &str = "\
Examples:
  sudo target/release/nccl-spark install           # into /usr/local
  target/release/nccl-spark install --prefix ~/.local";

pub const UNINSTALL: &str = "\
Examples:
  sudo nccl-spark uninstall
  ~/.local/bin/nccl-spark uninstall";

pub const COMPLETIONS: &str = "\
Examples:
  nccl-spark completions bash > ~/.local/share/bash-completion/completions/nccl-spark
  nccl-spark completions zsh > ~/.zfunc/_nccl-spark
  nccl-spark completions fish > ~/.config/fish/completions/nccl-spark.fish";
