//! The options of a run of collectives, checked before anything starts.

use super::Collective;
use super::lead::Plan;
use super::messages::RunParameters;
use crate::fabric::options::FabricOptions;
use crate::output::report::JsonOption;
use crate::places::PluginOption;
use crate::ranks::job::RankEnv;
use crate::ranks::launch::World;
use crate::ranks::placement;
use crate::ranks::rendezvous;
use crate::sizes::{self, Step};
use crate::usage::wrong;
use clap::Args;
use std::path::Path;
use std::time::Duration;

/// Options of a collective: those of a run, and of its table.
#[derive(Debug, Args)]
pub struct Options {
    /// The run.
    #[command(flatten)]
    pub run: Run,
    /// Adds columns with the median and the 99th percentile of the times, each of the slowest rank.
    #[arg(long)]
    pub percentiles: bool,
}

/// Options of a run; names and meanings are those of nccl-tests where it has them.
#[derive(Debug, Args)]
pub struct Run {
    /// Number of ranks to start on this machine, on the software fabric at most 16 [default: 2,
    /// unless mpirun, srun or torchrun started this process as a rank].
    #[arg(short, long, value_name = "N", value_parser = clap::value_parser!(u16).range(2..=256))]
    ranks: Option<u16>,
    /// Connections from each rank to each rank that it sends to; a message below 64 KiB uses one.
    #[arg(long, value_name = "N", default_value_t = 1, value_parser = clap::value_parser!(u16).range(1..=64))]
    channels: u16,
    /// First size, in bytes or with K, M or G.
    #[arg(short = 'b', long = "minbytes", value_name = "SIZE", default_value = "32M", value_parser = sizes::parse)]
    min_bytes: usize,
    /// Largest size.
    #[arg(short = 'e', long = "maxbytes", value_name = "SIZE", default_value = "32M", value_parser = sizes::parse)]
    max_bytes: usize,
    /// Bytes from one size to the next, where --stepfactor is 1.
    #[arg(short = 'i', long = "stepbytes", value_name = "SIZE", default_value = "1M", value_parser = sizes::parse)]
    step_bytes: usize,
    /// Factor from one size to the next; 1 to use --stepbytes.
    #[arg(short = 'f', long = "stepfactor", value_name = "N", default_value_t = 1, value_parser = clap::value_parser!(u32).range(1..))]
    step_factor: u32,
    /// Timed iterations per size.
    #[arg(short = 'n', long, value_name = "N", default_value_t = 20, value_parser = clap::value_parser!(u32).range(1..))]
    iters: u32,
    /// Untimed iterations per size, before the timed ones.
    #[arg(
        short = 'w',
        long = "warmup_iters",
        alias = "warmup-iters",
        value_name = "N",
        default_value_t = 1
    )]
    warmup_iters: u32,
    /// Checked iterations per size, after the timed ones; 0 turns checks off.
    #[arg(short = 'c', long = "check", value_name = "N", default_value_t = 1)]
    check_iters: u32,
    /// Seconds without progress on any rank after which the run fails as hung.
    #[arg(short = 'T', long, value_name = "SECONDS", default_value_t = 300, value_parser = clap::value_parser!(u64).range(1..=86400))]
    timeout: u64,
    #[command(flatten)]
    plugin: PluginOption,
    /// Environment variable for one rank; may be given more than once.
    #[arg(long, value_name = "RANK:NAME=VALUE", value_parser = RankEnv::parse)]
    rank_env: Vec<RankEnv>,
    #[command(flatten)]
    json: JsonOption,
    /// Where ranks that a launcher started find rank 0 [default: from the launcher; with torchrun
    /// the port after MASTER_PORT].
    #[arg(long, value_name = "HOST:PORT", value_parser = rendezvous::parse_place)]
    rendezvous: Option<(String, u16)>,
    /// Lets the ranks meet at --rendezvous without a token. Anybody who reaches rank 0's port can
    /// then take part in the run, and anybody who answers there can direct a rank.
    #[arg(long, requires = "rendezvous")]
    without_token: bool,
    #[command(flatten)]
    fabric: FabricOptions,
}

impl Run {
    /// Returns true if `--ranks` is given. This process then starts all ranks itself, even under a
    /// launcher.
    pub fn is_local(&self) -> bool {
        self.ranks.is_some()
    }

    /// Returns the plan of the run. `program` is this program's file: the plugin and the software
    /// fabric are looked for in folders near this file. `world` is the launcher's job, if any.
    /// `verbs_library` is the value of `NCCL_IBVERBS_LIB` in the user's environment. Fails if
    /// options contradict each other, if a file that they name does not exist, or if nothing tells
    /// where the launcher's ranks meet.
    pub fn plan(
        self,
        collective: Collective,
        program: &Path,
        world: Option<World>,
        verbs_library: Option<String>,
    ) -> anyhow::Result<Plan> {
        let ranks = match &world {
            Some(world) => world.ranks,
            None => usize::from(self.ranks.unwrap_or(2)),
        };
        self.check(collective, ranks)?;
        let timeout = Duration::from_secs(self.timeout);
        let launched = match world {
            Some(world) => {
                let meeting =
                    placement::meeting(&world, self.rendezvous, self.without_token, timeout)?;
                Some((world, meeting))
            }
            None if self.rendezvous.is_some() => Err(wrong(
                "--rendezvous is for ranks that a launcher starts, and all ranks are started on this machine here",
            ))?,
            None => None,
        };
        let terms = RunParameters {
            collective,
            ranks,
            channels: usize::from(self.channels),
            warmup_iters: self.warmup_iters,
            iters: self.iters,
            check_iters: self.check_iters,
        };
        Ok(Plan {
            terms,
            plugin: self.plugin.library(program)?,
            min_bytes: self.min_bytes,
            max_bytes: self.max_bytes,
            step: match self.step_factor {
                1 => Step::Bytes(self.step_bytes),
                factor => Step::Factor(factor as usize),
            },
            timeout,
            rank_env: self.rank_env,
            fabric: self.fabric.request(program)?,
            verbs_library,
            shows_percentiles: false,
            json: self.json.target,
            launched,
        })
    }

    fn check(&self, collective: Collective, ranks: usize) -> Result<(), clap::Error> {
        if self.min_bytes > self.max_bytes {
            return Err(wrong(format!(
                "--minbytes {} (its default is 32M) is more than --maxbytes {}",
                self.min_bytes, self.max_bytes
            )));
        }
        if collective.count(self.min_bytes, ranks) == 0 {
            let least = collective.size_bytes(1, ranks);
            return Err(wrong(format!(
                "--minbytes {} is too small: with {ranks} ranks it must be at least {least}",
                self.min_bytes
            )));
        }
        if self.step_factor == 1 && self.step_bytes == 0 {
            return Err(wrong(
                "--stepbytes 0 never reaches --maxbytes: it must be at least 1",
            ));
        }
        if let Some(env) = self.rank_env.iter().find(|env| env.rank >= ranks) {
            return Err(wrong(format!(
                "--rank-env {}:{}: ranks are 0 to {}",
                env.rank,
                env.name,
                ranks - 1
            )));
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cli::{Cli, Command};
    use crate::fabric::Kind;
    use crate::usage::one_line;
    use clap::Parser;

    fn plan(arguments: &[&str]) -> Result<Plan, String> {
        plan_in(arguments, None)
    }

    fn plan_in(arguments: &[&str], world: Option<World>) -> Result<Plan, String> {
        let cli = Cli::try_parse_from([&["nccl-spark", "all-gather"], arguments].concat());
        let cli = cli.map_err(|error| one_line(&error))?;
        let Command::AllGather(options) = cli.command else {
            panic!("another command")
        };
        let plan = options.run.plan(
            Collective::AllGather,
            Path::new("/nowhere/nccl-spark"),
            world,
            None,
        );
        plan.map_err(|error| {
            error
                .downcast_ref()
                .map_or_else(|| error.to_string(), one_line)
        })
    }

    #[test]
    fn options_of_nccl_tests_are_understood() {
        let plan = plan(&[
            "-b", "8", "-e", "16M", "-f", "4", "-n", "5", "-w", "2", "-c", "3", "-r", "4",
        ])
        .unwrap();
        assert_eq!(
            (plan.min_bytes, plan.max_bytes, plan.step),
            (8, 16 << 20, Step::Factor(4))
        );
        let RunParameters {
            iters,
            warmup_iters,
            check_iters,
            ranks,
            ..
        } = plan.terms;
        assert_eq!((iters, warmup_iters, check_iters, ranks), (5, 2, 3, 4));
        assert_eq!(plan.plugin, Path::new("libnccl-net-spark.so"));
    }

    #[test]
    fn defaults_match_nccl_tests() {
        let plan = plan(&[]).unwrap();
        assert_eq!(
            (plan.min_bytes, plan.max_bytes, plan.step),
            (32 << 20, 32 << 20, Step::Bytes(1 << 20))
        );
        let RunParameters {
            iters,
            warmup_iters,
            check_iters,
            ranks,
            ..
        } = plan.terms;
        assert_eq!((iters, warmup_iters, check_iters, ranks), (20, 1, 1, 2));
    }

    #[test]
    fn rank_env_keeps_equal_signs_and_colons_of_the_value() {
        let plan = plan(&["--rank-env", "1:NCCL_IB_HCA==b0:1,b1", "--rank-env", "0:A="]).unwrap();
        let env = |rank, name: &str, value: &str| RankEnv {
            rank,
            name: name.into(),
            value: value.into(),
        };
        assert_eq!(
            plan.rank_env,
            [env(1, "NCCL_IB_HCA", "=b0:1,b1"), env(0, "A", "")]
        );
    }

    #[test]
    fn mistakes_name_the_option_and_what_is_allowed_in_one_line() {
        for (arguments, option, allowed) in [
            (&["-r", "1"][..], "--ranks", "must be 2 to 256"),
            (&["-r", "x"], "--ranks", "must be a whole number"),
            (&["-b", "8Q"], "--minbytes", "K, M or G"),
            (&["-b", "64M"], "--minbytes", "--maxbytes 33554432"),
            (&["-b", "1", "-e", "8"], "--minbytes", "at least 2"),
            (&["-i", "0"], "--stepbytes", "at least 1"),
            (&["-n", "0"], "--iters", "must be at least 1"),
            (&["--channels", "0"], "--channels", "must be 1 to 64"),
            (&["--timeout", "0"], "--timeout", "must be 1 to 86400"),
            (&["--rank-env", "2:A=b"], "--rank-env", "0 to 1"),
            (&["--rank-env", "A=b"], "--rank-env", "RANK:NAME=VALUE"),
            (&["--plugin", "/no/such.so"], "--plugin", "No such file"),
            (
                &["--softverbs", "/no/such.so"],
                "--softverbs",
                "No such file",
            ),
            (&["--rnaks", "2"], "--rnaks", "--ranks"),
            (&["--rendezvous", "a:1"], "--rendezvous", "launcher"),
            (&["--rendezvous", "a"], "--rendezvous", "HOST:PORT"),
            (&["--without-token"], "--rendezvous", "HOST:PORT"),
            (&["--fabric", "hard"], "--fabric", "soft, verbs"),
            (
                &["--fabric", "verbs", "--scale", "2"],
                "--scale",
                "--fabric verbs",
            ),
            (&["--scale", "0"], "--scale", "must be 0.000001 to 1000000"),
            (&["--slow-rail", "a=2"], "--slow-rail", "up to 1"),
            (&["--slow-rail", "a"], "--slow-rail", "RAIL=FACTOR"),
            (
                &["--path-fault", "a=slow"],
                "--path-fault",
                "crossed-arp, switch-mtu, spanning-tree, loss",
            ),
            (&["--path-fault", "silent"], "--path-fault", "RAIL=FAULT"),
            (&["--fabric-name", "a/b"], "--fabric-name", "letters"),
        ] {
            let text = plan(arguments).unwrap_err();
            assert!(
                text.contains(option) && text.contains(allowed),
                "{arguments:?}: {text}"
            );
            assert!(!text.contains('\n'), "{text}");
        }
    }

    #[test]
    fn options_of_the_software_fabric_select_it() {
        assert_eq!(plan(&[]).unwrap().fabric.kind, None);
        let request = plan(&[
            "--slow-rail",
            "a=0.25",
            "--slow-rail",
            "b=1",
            "--scale",
            "0.5",
        ])
        .unwrap()
        .fabric;
        assert_eq!(
            (request.kind, request.scale, request.profile.as_str()),
            (Some(Kind::Soft), 0.5, "spark-1cable")
        );
        assert_eq!(
            request.slow_rails,
            [("a".to_owned(), 0.25), ("b".to_owned(), 1.0)]
        );
        assert_eq!(request.library, Path::new("/nowhere/softverbs-ibverbs"));
    }

    #[test]
    fn the_launcher_sets_the_number_of_ranks_and_may_need_an_address() {
        let world = |place: Option<(&str, u16)>| World {
            launcher: crate::ranks::launch::Launcher::OpenMpi,
            rank: 1,
            ranks: 4,
            job: "j".into(),
            place: place.map(|(host, port)| (host.to_owned(), port)),
            token: None,
        };
        let (_, meeting) = plan_in(&[], Some(world(Some(("a", 7)))))
            .unwrap()
            .launched
            .unwrap();
        assert_eq!(
            (meeting.host.as_str(), meeting.port, meeting.ranks),
            ("a", 7, 4)
        );
        let given = ["--rendezvous", "[fe80::1]:9"];
        let (_, meeting) = plan_in(&given, Some(world(Some(("a", 7)))))
            .unwrap()
            .launched
            .unwrap();
        assert_eq!((meeting.host.as_str(), meeting.port), ("fe80::1", 9));
        let error = plan_in(&[], Some(world(None))).unwrap_err();
        assert!(
            error.contains("mpirun") && error.contains("--rendezvous HOST:PORT"),
            "{error}"
        );
    }
}
