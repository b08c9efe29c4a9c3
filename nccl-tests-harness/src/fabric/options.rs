//! The options that choose the fabric, for all commands that start ranks.

use super::place::parse_fabric_name;
use super::{FabricRequest, Kind};
use crate::places;
use crate::usage::{Suggesting, wrong};
use clap::Args;
use softverbs::path::PathFault;
use softverbs::profile::Profile;
use softverbs::settings::SCALES;
use std::path::{Path, PathBuf};

/// The fabric that a run uses.
#[derive(Debug, Args)]
#[command(next_help_heading = "Fabric")]
pub struct FabricOptions {
    /// Network to use: RDMA devices or the software fabric [default: verbs, or soft where there is
    /// no RDMA device].
    #[arg(long, value_name = "KIND", value_enum)]
    fabric: Option<Kind>,
    #[arg(long, value_name = "NAME|FILE", help = profile_help(), value_parser = Suggesting::new(Profile::names()), hide_possible_values = true)]
    profile: Option<String>,
    /// Factor on all rates of the profile.
    #[arg(long, value_name = "F", value_parser = parse_scale)]
    scale: Option<f64>,
    /// Limits a rail of the software fabric to a part of its rate, on every rank, as in
    /// rocep1s0f0=0.25; may be given more than once.
    #[arg(long, value_name = "RAIL=FACTOR", value_parser = |text: &str| of_rail(text, parse_factor, "RAIL=FACTOR, as in rocep1s0f0=0.25"))]
    slow_rail: Vec<(String, f64)>,
    /// Gives the path of a rail of the software fabric a fault, on every rank, as in
    /// rocep1s0f0=silent; may be given more than once. `nccl-spark fabric path --help` has the
    /// faults.
    #[arg(long, value_name = "RAIL=FAULT", value_parser = |text: &str| of_rail(text, PathFault::parse, "RAIL=FAULT, as in rocep1s0f0=silent"))]
    path_fault: Vec<(String, PathFault)>,
    /// Software fabric's library [default: the one installed with or built beside this program].
    #[arg(long, value_name = "PATH")]
    softverbs: Option<PathBuf>,
    /// Name of the software fabric, for `nccl-spark fabric` [default: nccl-spark-PID].
    #[arg(long, value_name = "NAME", value_parser = parse_fabric_name)]
    fabric_name: Option<String>,
}

fn profile_help() -> String {
    format!(
        "Rails of the software fabric: a built-in profile ({}) or a file [default: spark-1cable]",
        Profile::names().join(", ")
    )
}

impl FabricOptions {
    /// Returns the fabric that the options select. Any option for the software fabric also selects
    /// the software fabric.
    ///
    /// # Errors
    /// Fails when options contradict each other.
    pub fn request(self, program: &Path) -> Result<FabricRequest, clap::Error> {
        let given = [
            ("--profile", self.profile.is_some()),
            ("--scale", self.scale.is_some()),
            ("--slow-rail", !self.slow_rail.is_empty()),
            ("--path-fault", !self.path_fault.is_empty()),
            ("--softverbs", self.softverbs.is_some()),
            ("--fabric-name", self.fabric_name.is_some()),
        ];
        let first = given
            .iter()
            .find(|(_, given)| *given)
            .map(|(name, _)| *name);
        let kind = match (self.fabric, first) {
            (Some(Kind::Verbs), Some(name)) => {
                return Err(wrong(format!(
                    "{name} is for the software fabric: not with --fabric verbs"
                )));
            }
            (None, Some(_)) => Some(Kind::Soft),
            (kind, _) => kind,
        };
        Ok(FabricRequest {
            kind,
            profile: self.profile.unwrap_or_else(|| "spark-1cable".to_owned()),
            scale: self.scale.unwrap_or(1.0),
            slow_rails: self.slow_rail,
            path_faults: self.path_fault,
            library: match self.softverbs {
                Some(path) => places::existing("--softverbs", &path)?,
                None => places::fabric(program),
            },
            name: self.fabric_name,
        })
    }
}

fn parse_scale(text: &str) -> Result<f64, String> {
    let scale = text
        .parse::<f64>()
        .ok()
        .filter(|scale| SCALES.contains(scale));
    scale.ok_or_else(|| format!("must be {} to {}", SCALES.start(), SCALES.end()))
}

/// Parses the fraction of its rate that a rail keeps. The error names the allowed values.
pub(crate) fn parse_factor(text: &str) -> Result<f64, String> {
    let factor = text
        .parse::<f64>()
        .ok()
        .filter(|factor| *factor > 0.0 && *factor <= 1.0);
    factor.ok_or_else(|| "must be above 0, up to 1".to_owned())
}

/// Parses RAIL=VALUE. `form` is the error for a text without `=` or without a rail.
fn of_rail<T>(
    text: &str,
    value: fn(&str) -> Result<T, String>,
    form: &str,
) -> Result<(String, T), String> {
    match text.split_once('=') {
        Some((rail, text)) if !rail.is_empty() => Ok((rail.to_owned(), value(text)?)),
        _ => Err(form.to_owned()),
    }
}
