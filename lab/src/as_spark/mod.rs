//! `spark-lab as-spark`: runs a command in which NCCL sees a DGX Spark. `NCCL_TOPO_FILE` names a
//! graph ([`topology`]) with this machine's GPUs and the software fabric's rails at a Spark's
//! speeds. The command is `nccl-spark nccl-tests`, `nccl-spark tune collectives` or `spark-lab
//! communicators`.

mod topology;

use anyhow::{Context, Result, anyhow, bail};
use clap::Args;
use host::nic::NICS;
use host::rails::LinkRate;
use nccl_tests_harness::fabric::{UNPACED, limit};
use nccl_tests_harness::program::Outcome;
use nccl_tests_harness::scene::network::{Network, TUNER, Used};
use nccl_tests_harness::usage::wrong;
use softverbs::profile::{Link, Profile, RailSpec};
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;
use topology::{Function, Machine};

/// Options of as-spark.
#[derive(Debug, Args)]
pub struct Options {
    /// Accepts fewer than 16 collective channels. On a Spark, NCCL does not choose so few over this
    /// plugin.
    #[arg(long)]
    allow_few_channels: bool,
    /// The command. Its --profile is `unpaced`, or a Spark's with --scale 1, 0.25, 0.1 or 0.05.
    #[arg(
        value_name = "COMMAND",
        required = true,
        trailing_var_arg = true,
        allow_hyphen_values = true
    )]
    command: Vec<String>,
}

/// Accepted scales of a Spark's profile. NCCL plans with the unscaled speeds, so the message sizes
/// at which its choices are right differ from scale to scale. A few fixed scales give results that
/// can be compared with others at the same scale.
const SCALES: [f64; 4] = [1.0, 0.25, 0.1, 0.05];
/// The fewest collective channels that NCCL chooses on a DGX Spark: 16 over this plugin with one
/// cable (200,000 Mb/s), 18 with two (224,054 Mb/s).
const SPARK_CHANNELS: u32 = 16;

impl Options {
    /// Runs the command, and checks NCCL's channels in its log. `lookup` reads an environment
    /// variable. Fails without a profile of the software fabric, without a GPU, or with fewer
    /// channels than on a Spark.
    pub fn run(self, lookup: &dyn Fn(&str) -> Option<String>) -> Result<Outcome> {
        let mut words = self.command;
        let profile = profile(&words)?;
        let folder = tempfile::tempdir().context("make a folder for the graph")?;
        let graph = folder.path().join("spark.xml");
        fs::write(
            &graph,
            topology::xml(&topology::gpus()?, &machine(&profile)),
        )
        .context("write the graph")?;
        let log = option(&words, "--log")
            .map(PathBuf::from)
            .unwrap_or_else(|| {
                let log = folder.path().join("log");
                let end = words
                    .iter()
                    .position(|word| word == "--")
                    .unwrap_or(words.len());
                words.splice(end..end, ["--log".to_owned(), log.display().to_string()]);
                log
            });
        let mut command = Command::new(&words[0]);
        command.args(&words[1..]).env("NCCL_TOPO_FILE", &graph);
        // By default the tuner acts only on a GB10, which this machine need not have.
        if lookup(TUNER).is_none() {
            command.env(TUNER, "on");
        }
        let status = command
            .status()
            .with_context(|| format!("start {}", words[0]))?;
        if !status.success() {
            return Ok(Outcome::Status(
                status
                    .code()
                    .and_then(|code| u8::try_from(code).ok())
                    .unwrap_or(1),
            ));
        }
        if !self.allow_few_channels {
            check_channels(&log)?;
        }
        Ok(Outcome::Good)
    }
}

fn option(words: &[String], name: &str) -> Option<String> {
    let mut words = words.iter().take_while(|word| *word != "--");
    let rest = words.find_map(|word| {
        word.strip_prefix(name)
            .filter(|rest| rest.is_empty() || rest.starts_with('='))
    })?;
    rest.strip_prefix('=')
        .map(str::to_owned)
        .or_else(|| words.next().cloned())
}

fn profile(words: &[String]) -> Result<Profile> {
    let name = option(words, "--profile");
    let name = name
        .ok_or_else(|| wrong("the command needs --profile: a graph is for the software fabric"))?;
    let scale = option(words, "--scale").unwrap_or_else(|| "1".to_owned());
    let allowed = if name == UNPACED {
        &SCALES[..1]
    } else {
        &SCALES[..]
    };
    let factor = scale.parse().ok().filter(|factor| allowed.contains(factor)).ok_or_else(|| {
        wrong(format!(
            "--profile {name} --scale {scale}: as-spark takes --profile unpaced without --scale, or a Spark's profile \
             (spark-1cable, spark-2cable, spark-triangle, spark-ring) with --scale 1, 0.25, 0.1 or 0.05, so that \
             results can be compared"
        ))
    })?;
    Profile::load(&name, factor).map_err(|error| anyhow!("--profile: {error}"))
}

/// Returns the machine of a profile, with the unscaled speeds. The unpaced profile has no rates, so
/// its rails get the speed of a Spark's port.
fn machine(profile: &Profile) -> Machine {
    let mut profile = profile.clone();
    for cable in &mut profile.cables {
        cable.payload_mbps = 0.0;
    }
    for rail in &mut profile.rails {
        // The software fabric announces no speed below 1 Mb/s either.
        rail.line_mbps = if profile.name == UNPACED {
            f64::from(NICS[0].port_mbps)
        } else {
            rail.speed_mbps.max(1.0)
        };
        let cable = &mut profile.cables[rail.cable];
        cable.payload_mbps = cable.payload_mbps.max(rail.line_mbps);
    }
    for link in &mut profile.links {
        // As the plugin computes it for a link of this width and rate
        // (crates/host/src/rails/pcie.rs).
        let rate = LinkRate {
            width: link.width as u16,
            speed_mts: (link.gts * 1e3).round() as u32,
        };
        link.payload_mbps = f64::from(rate.payload_mbps());
    }
    let function = |rail: &RailSpec| {
        let Link {
            pci, gts, width, ..
        } = &profile.links[rail.link];
        let device = rail.name.clone();
        let slot = pci.clone();
        Function {
            device,
            slot,
            number: rail.function,
            gts: *gts,
            width: *width,
            speed_mbps: rail.line_mbps as u32,
        }
    };
    let all: Vec<_> = (0..profile.rails.len()).map(|at| (at, 1.0)).collect();
    Machine {
        functions: profile.rails.iter().map(function).collect(),
        merged_mbps: limit::of_rails(&profile, &all)
            .payload_mbps
            .map_or(u32::MAX, |mbps| mbps as u32),
    }
}

fn check_channels(log: &Path) -> Result<()> {
    let text = fs::read(log).with_context(|| format!("read {}", log.display()))?;
    let is_of_nccls_own = |line: &&str| {
        [Network::Ib, Network::Socket]
            .iter()
            .any(|network| line.starts_with(&format!("{}: ", network.name())))
    };
    let mut used = Used::default();
    for line in String::from_utf8_lossy(&text)
        .lines()
        .filter(|line| !is_of_nccls_own(line))
    {
        used.note(line);
    }
    let said = match used.channels() {
        Some(channels) if channels.collective >= SPARK_CHANNELS => return Ok(()),
        Some(channels) => format!("NCCL chose {} collective channels", channels.collective),
        None => "NCCL's log does not say how many collective channels it chose".to_owned(),
    };
    bail!(
        "{said}; on a DGX Spark it chooses {SPARK_CHANNELS} or more. Their number decides how large messages are and \
         which protocol is used at which size, so the results are not those of a Spark. --allow-few-channels accepts \
         them"
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    fn words(text: &str) -> Vec<String> {
        text.split(' ').map(str::to_owned).collect()
    }

    #[test]
    fn options_of_the_command_are_found_before_two_dashes() {
        let given = words("nccl-spark nccl-tests --profile unpaced --scale=0.1 -- --log x");
        assert_eq!(option(&given, "--profile").as_deref(), Some("unpaced"));
        assert_eq!(option(&given, "--scale").as_deref(), Some("0.1"));
        assert_eq!(option(&given, "--log"), None);
    }

    #[test]
    fn a_sparks_graph_is_for_fixed_scales() {
        let load = |profile: &str, scale: f64| {
            profile_of(&format!("x --profile {profile} --scale {scale}"))
        };
        for scale in SCALES {
            assert!(load("spark-1cable", scale).is_ok() && load("spark-2cable", scale).is_ok());
        }
        assert!(load("unpaced", 1.0).is_ok());
        for (profile, scale) in [
            ("spark-2cable", 0.5),
            ("spark-1cable", 2.0),
            ("unpaced", 0.25),
        ] {
            let text = load(profile, scale).unwrap_err().to_string();
            assert!(
                text.contains(&format!("--scale {scale}:"))
                    && text.contains("1, 0.25, 0.1 or 0.05"),
                "{text}"
            );
        }
        assert!(
            profile_of("x --scale 1")
                .unwrap_err()
                .to_string()
                .contains("needs --profile")
        );
    }

    fn profile_of(text: &str) -> Result<Profile> {
        profile(&words(text))
    }

    /// Computed by hand: a 32 GT/s x4 link carries 112027 Mb/s of payload, a port 200000. A machine
    /// of a triangle or a ring has four functions. Only two of them lead to any one neighbour, but
    /// NCCL plans with all four.
    #[test]
    fn a_machine_announces_a_sparks_speed_at_any_scale() {
        let speeds = |name: &str, scale| {
            let machine = machine(&Profile::load(name, scale).unwrap());
            assert!(
                machine
                    .functions
                    .iter()
                    .all(|function| function.speed_mbps == 200_000),
                "{machine:?}"
            );
            (machine.functions.len(), machine.merged_mbps)
        };
        for scale in [1.0, 0.25, 0.1] {
            assert_eq!(speeds("spark-2cable", scale), (4, 224_054));
            assert_eq!(speeds("spark-1cable", scale), (2, 200_000));
        }
        assert_eq!(
            (speeds("spark-triangle", 1.0), speeds("spark-ring", 1.0)),
            ((4, 224_054), (4, 224_054))
        );
        assert!(Profile::names().contains(&UNPACED));
        assert_eq!(speeds(UNPACED, 1.0), (2, 200_000));
    }

    #[test]
    fn a_port_that_announces_another_speed_counts_with_that() {
        let text = "link L pci=0000:01:00 gts=32 width=4 payload=0\ncable c payload=0\n\
                    rail r netdev=e port=p link=L cable=c function=0 line=1 qp=1 latency=1 speed=40000";
        let machine = machine(&Profile::parse("file", text).unwrap());
        assert_eq!(
            (machine.functions[0].speed_mbps, machine.merged_mbps),
            (40_000, 40_000)
        );
    }
}
