//! The command line of `nccl-spark memory`, checked before anything starts.

use super::litmus::Order;
use super::messages::Setup;
use crate::fabric::FabricRequest;
use crate::fabric::options::FabricOptions;
use crate::gpu::Kind;
use crate::output::report::{JsonOption, Target};
use crate::places::PluginOption;
use crate::sizes;
use crate::usage::wrong;
use clap::Args;
use std::path::Path;
use std::time::Duration;

/// Options of memory.
#[derive(Debug, Args)]
pub struct Options {
    /// Largest message, in bytes or with K or M, 64M at most; up to six smaller sizes, from 8 bytes
    /// on, are tested too.
    #[arg(short, long, value_name = "SIZE", default_value = "4M", value_parser = sizes::parse)]
    bytes: usize,
    /// CUDA number of the GPU that allocates and writes what is sent [default: 0].
    #[arg(long, value_name = "N")]
    gpu: Option<u32>,
    /// CUDA number of the GPU that allocates and checks what is received [default: the same].
    #[arg(long, value_name = "N")]
    receiver_gpu: Option<u32>,
    /// Seconds to test whether LL128 is safe on this machine: whether lines of 128 bytes become
    /// visible as a whole, both those that a GPU stores and those that the NIC stores; needs a GPU
    /// [default: 0, no test].
    #[arg(long, value_name = "SECONDS", value_parser = clap::value_parser!(u64).range(0..=86400))]
    litmus: Option<u64>,
    /// Make the writer of that test tear its lines, to see that they are found.
    #[arg(long, hide = true, requires = "litmus")]
    litmus_plant: bool,
    /// Seconds without progress after which the test of a kind of memory counts as hung.
    #[arg(short = 'T', long, value_name = "SECONDS", default_value_t = 120, value_parser = clap::value_parser!(u64).range(1..=86400))]
    timeout: u64,
    #[command(flatten)]
    plugin: PluginOption,
    #[command(flatten)]
    json: JsonOption,
    #[command(flatten)]
    fabric: FabricOptions,
}

#[derive(Debug)]
pub struct Plan {
    pub setup: Setup,
    /// True if the options need a GPU. Then a machine without a GPU is an error.
    pub needs_gpu: bool,
    pub litmus: Option<Order>,
    pub timeout: Duration,
    pub fabric: FabricRequest,
    pub verbs_library: Option<String>,
    pub json: Option<Target>,
}

/// Limit of --bytes. Managed memory may move to the GPU as a whole, and must leave room there for
/// other programs.
const MAX_BYTES: usize = 64 << 20;
/// Message sizes around two limits: 128 bytes, the most that a sender puts into a work request, and
/// a page. Some sizes are not multiples of a word or a page.
const SIZES: [usize; 6] = [8, 13, 300, 4096, (64 << 10) + 4, (1 << 20) + 3];

impl Options {
    /// Checks the options. `verbs_library` comes from the user's environment.
    ///
    /// # Errors
    /// An option is out of bounds, or contradicts another.
    pub fn plan(self, program: &Path, verbs_library: Option<String>) -> Result<Plan, clap::Error> {
        if !(1..=MAX_BYTES).contains(&self.bytes) {
            return Err(wrong(format!(
                "--bytes {}: must be 1 to {MAX_BYTES} (64M)",
                self.bytes
            )));
        }
        let mut sizes: Vec<usize> = SIZES
            .into_iter()
            .filter(|size| *size < self.bytes)
            .collect();
        sizes.push(self.bytes);
        let gpu = self.gpu.unwrap_or(0);
        let litmus = self.litmus.filter(|seconds| *seconds > 0);
        Ok(Plan {
            setup: Setup {
                kind: Kind::Malloc,
                plugin: self.plugin.library(program)?,
                job: u64::from(std::process::id()),
                sizes,
                gpus: [gpu, self.receiver_gpu.unwrap_or(gpu)],
                litmus: None,
            },
            needs_gpu: self.gpu.or(self.receiver_gpu).is_some() || litmus.is_some(),
            litmus: litmus.map(|seconds| Order {
                seconds,
                planted: self.litmus_plant,
            }),
            timeout: Duration::from_secs(self.timeout),
            fabric: self.fabric.request(program)?,
            verbs_library,
            json: self.json.target,
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::usage::one_line;
    use clap::Parser;

    #[derive(Debug, Parser)]
    struct Line {
        #[command(flatten)]
        options: Options,
    }

    fn plan(arguments: &[&str]) -> Result<Plan, String> {
        let line = Line::try_parse_from([&["memory"], arguments].concat())
            .map_err(|error| one_line(&error))?;
        line.options
            .plan(Path::new("/nowhere/nccl-spark"), None)
            .map_err(|error| one_line(&error))
    }

    #[test]
    fn sizes_reach_the_given_maximum_and_some_are_odd() {
        let defaults = plan(&[]).unwrap();
        assert_eq!(
            defaults.setup.sizes,
            [8, 13, 300, 4096, 65_540, 1_048_579, 4 << 20]
        );
        assert_eq!((defaults.setup.gpus, defaults.needs_gpu), ([0, 0], false));
        assert_eq!(plan(&["-b", "8"]).unwrap().setup.sizes, [8]);
        assert_eq!(
            plan(&["--bytes", "5000"]).unwrap().setup.sizes,
            [8, 13, 300, 4096, 5000]
        );
        assert_eq!(
            plan(&["-b", "64M"]).unwrap().setup.sizes.last(),
            Some(&MAX_BYTES)
        );
    }

    #[test]
    fn the_litmus_test_runs_within_its_time() {
        let litmus = |arguments: &[&str]| plan(arguments).unwrap().litmus;
        assert_eq!((litmus(&[]), litmus(&["--litmus", "0"])), (None, None));
        assert!(
            plan(&["--litmus", "1"]).unwrap().needs_gpu
                && !plan(&["--litmus", "0"]).unwrap().needs_gpu
        );
        assert_eq!(
            litmus(&["--litmus", "86400"]),
            Some(Order {
                seconds: 86_400,
                planted: false
            })
        );
        assert_eq!(
            litmus(&["--litmus", "1", "--litmus-plant"]),
            Some(Order {
                seconds: 1,
                planted: true
            })
        );
    }

    #[test]
    fn the_receivers_gpu_is_the_senders_by_default() {
        let gpus = |arguments: &[&str]| {
            plan(arguments)
                .map(|plan| (plan.setup.gpus, plan.needs_gpu))
                .unwrap()
        };
        assert_eq!(gpus(&["--gpu", "1"]), ([1, 1], true));
        assert_eq!(gpus(&["--receiver-gpu", "1"]), ([0, 1], true));
        assert_eq!(gpus(&["--gpu", "2", "--receiver-gpu", "1"]), ([2, 1], true));
    }

    #[test]
    fn mistakes_name_the_option_and_what_is_allowed() {
        for (arguments, option, allowed) in [
            (&["-b", "0"][..], "--bytes", "1 to 67108864"),
            (&["-b", "65M"], "--bytes", "1 to 67108864"),
            (&["-b", "x"], "--bytes", "K, M or G"),
            (&["--gpu", "-1"], "-1", ""),
            (&["--gpu", "a"], "--gpu", "whole number"),
            (&["-T", "0"], "--timeout", "must be 1 to 86400"),
            (&["--litmus", "86401"], "--litmus", "must be 0 to 86400"),
            (&["--litmus-plant"], "--litmus", "required"),
            (&["--plugin", "/no/such.so"], "--plugin", "No such file"),
            (
                &["--fabric", "verbs", "--scale", "2"],
                "--scale",
                "--fabric verbs",
            ),
        ] {
            let text = plan(arguments).unwrap_err();
            assert!(
                text.contains(option) && text.contains(allowed),
                "{arguments:?}: {text}"
            );
        }
    }
}
