//! Examples for the help and the manual page of each command. Lines fit 80 columns.

pub const ALL: &str = "\
Examples:
  nccl-spark doctor                           # what is wrong, and its cure
  nccl-spark rails                            # which ports would be merged?
  nccl-spark all-gather -b 8 -e 64M -f 2      # two ranks on this machine
  sudo nccl-spark install                     # into /usr/local

Collectives also have nccl-tests' names: all_gather, all_reduce and so on.

Exit status:
  0    all is well
  1    a run failed, data was wrong, or there is nothing to use
  2    the command line is wrong
  130  interrupted by Ctrl-C; in general 128 and the signal's number";

/// Makes the examples of a collective: its own, and a common one across hosts.
macro_rules! collective {
    ($name:literal, $($example:literal),*) => {
        concat!(
            "Examples:\n",
            $("  nccl-spark ", $name, " ", $example, "\n",)*
            "  mpirun -np 2 -H spark-1,spark-2 --map-by node --bind-to none \\\n",
            "    nccl-spark ", $name, " --rendezvous spark-1:29501 -b 8 -e 1G -f 2"
        )
    };
}

pub const ALL_GATHER: &str = collective!(
    "all-gather",
    "-b 8 -e 64M -f 2      # two ranks on this machine",
    "-r 4 --profile spark-2cable --scale 0.1",
    "-b 8 -e 64K -f 8 -n 1000 --percentiles"
);
pub const ALL_REDUCE: &str = collective!(
    "all-reduce",
    "-b 8 -e 64M -f 2      # two ranks on this machine",
    "-r 3 -n 100 -c 10     # 100 timed, 10 checked"
);
pub const REDUCE_SCATTER: &str = collective!(
    "reduce-scatter",
    "-b 8 -e 64M -f 2  # two ranks on this machine"
);
pub const BROADCAST: &str = collective!(
    "broadcast",
    "-b 8 -e 64M -f 2       # two ranks on this machine"
);
pub const ALL_TO_ALL: &str = collective!(
    "alltoall",
    "-r 4 -b 8 -e 64M -f 2   # four ranks on this machine"
);
pub const SEND_RECV: &str = collective!(
    "sendrecv",
    "-b 8 -e 64M -f 2        # two ranks on this machine",
    "-r 3 --slow-rail rocep1s0f0=0.25"
);

pub const TUNE: &str = "\
Examples:
  nccl-spark tune --dry-run                   # writes no settings file
  mpirun -np 2 -H spark-1,spark-2 --map-by node --bind-to none \\
    nccl-spark tune --rendezvous spark-1:29501
  nccl-spark tune collectives --dir ~/nccl-tests \\
    --mpirun '-np 2 -H spark-1,spark-2 --bind-to none'";

pub const NCCL_TESTS: &str = "\
Examples:
  nccl-spark nccl-tests all_gather --dir ~/nccl-tests -- -b 8 -e 128M -f 2
  nccl-spark nccl-tests all_reduce --dir ~/nccl-tests --compare spark,ib,socket
  nccl-spark nccl-tests all_gather all_reduce --dir ~/nccl-tests \\
    --compare spark,ib --rounds 3 --sizes 8K-16M,24K-24M
  nccl-spark nccl-tests all_gather --dir ~/nccl-tests \\
    --mpirun '-np 2 -H spark-1,spark-2 --bind-to none' -- -b 8 -e 1G -f 2";

pub const MEMORY: &str = "\
Examples:
  nccl-spark memory                           # all kinds of memory
  nccl-spark memory --litmus 60               # is LL128 safe? for a minute";

pub const FABRIC: &str = "\
Examples, while `nccl-spark all-gather --scale 0.01 -n 1000` runs:
  nccl-spark fabric down 1:rocep1s0f0         # a rail of rank 1
  nccl-spark fabric up 1:rocep1s0f0
  nccl-spark fabric slow '*:rocep1s0f0' 0.25  # of all ranks";

pub const RAILS: &str = "\
Examples:
  nccl-spark rails
  nccl-spark rails --short                    # a line for each port
  nccl-spark rails --profile spark-2cable     # of the software fabric
  NCCL_IB_HCA=^rocep1s0f1 nccl-spark rails    # with a filter";

pub const DOCTOR: &str = "\
Examples:
  nccl-spark doctor                           # this machine and this shell
  nccl-spark doctor -v                        # with all that was read
  nccl-spark doctor --env                     # the variables alone
  nccl-spark doctor --pid 4711                # a running job
  docker exec CONTAINER nccl-spark doctor     # as the container sees it
  nccl-spark doctor --peer spark-2            # with another host, measured
  nccl-spark doctor --silence                 # when is a dead peer noticed?
  nccl-spark doctor --hosts spark-1,spark-2,spark-3,spark-4

Exit status: 0 works, 1 works but slow or fragile, 2 the command line is wrong,
3 does not work.";

pub const REPORT: &str = "\
Examples:
  nccl-spark report                           # nccl-spark-report-DATE.json
  nccl-spark report --dry-run                 # which commands would run?
  nccl-spark report --hosts spark-1,spark-2 --nccl-tests ~/nccl-tests
  nccl-spark report --only machine,all-gather --output -

Exit status: 0 the file was written, even if parts failed; 1 it could not be
written; 2 the command line is wrong; 130 after Ctrl-C and 143 after SIGTERM,
with what there was until then in the file.";

pub const TOP: &str = "\
Examples:
  nccl-spark top                              # q ends it, ? shows the keys
  sudo nccl-spark top --peers                 # all users; each peer's rails
  nccl-spark top --count 1 > rails.txt        # one reading, as plain lines
  nccl-spark top --json --interval 10 > rails.json
  sudo nccl-spark top --interval 15 \\
    --prometheus /var/lib/prometheus/node-exporter/nccl_spark.prom";

pub const SETTINGS: &str = "\
Examples:
  nccl-spark settings
  NCCL_IB_TIMEOUT=18 nccl-spark settings      # shows it as the current value";

pub const ENV: &str = "\
Examples:
  eval \"$(nccl-spark env)\"
  docker run $(nccl-spark env --for docker) --gpus all IMAGE
  ray job submit --runtime-env-json \"$(nccl-spark env --for ray)\" -- ./job";

pub const INSTALL: &str = "\
Examples:
  sudo target/release/nccl-spark install      # into /usr/local
  target/release/nccl-spark install --prefix ~/.local";

pub const UNINSTALL: &str = "\
Examples:
  sudo nccl-spark uninstall
  nccl-spark uninstall --prefix ~/.local";

pub const COMPLETIONS: &str = "\
Examples (install does this for all users):
  nccl-spark completions bash \\
    > ~/.local/share/bash-completion/completions/nccl-spark
  nccl-spark completions zsh > ~/.zfunc/_nccl-spark
  nccl-spark completions fish > ~/.config/fish/completions/nccl-spark.fish";
