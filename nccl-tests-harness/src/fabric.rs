//! The devices that carry the ranks' messages: RDMA devices, or the software fabric.

pub mod limit;
pub mod options;
mod place;

pub use place::SoftPlace;
pub(crate) use place::parse_fabric_name;

use crate::interrupt;
use crate::places;
use crate::usage::wrong;
use anyhow::{Context, Result, anyhow};
use limit::Limit;
use softverbs::control::{self, Action, Prepared};
use softverbs::path::PathFault;
use softverbs::profile::{MAX_NODES, Profile};
use softverbs::settings;
use std::fs;
use std::os::unix::fs::symlink;
use std::path::{Path, PathBuf};

/// A kind of fabric.
#[derive(Debug, Clone, Copy, PartialEq, Eq, clap::ValueEnum)]
pub enum Kind {
    /// The software fabric, between processes of this machine.
    Soft,
    /// RDMA devices, by the machine's libibverbs.
    Verbs,
}

/// The fabric that the command line asks for.
#[derive(Debug, Clone, PartialEq)]
pub struct FabricRequest {
    /// Kind of the fabric. `None`: RDMA devices if the machine has any, else the software fabric.
    pub kind: Option<Kind>,
    /// Profile of the software fabric: the name of a built-in one, or the path of a file.
    pub profile: String,
    /// A factor on all rates of the profile.
    pub scale: f64,
    /// Slowed rails: the name of each, and the fraction of its rate that it keeps on all nodes.
    pub slow_rails: Vec<(String, f64)>,
    /// Rails whose path has a fault: the name of each, and its fault on all nodes.
    pub path_faults: Vec<(String, PathFault)>,
    /// The software fabric's library.
    pub library: PathBuf,
    /// Name of the software fabric. `None`: a name is made for the run.
    pub name: Option<String>,
}

/// The fabric of a run.
pub struct Fabric {
    /// Kind of the fabric.
    pub kind: Kind,
    /// Description, for the lines that a run prints before its results.
    pub about: String,
    environment: Vec<(String, String)>,
    soft: Option<Soft>,
}

struct Soft {
    dir: PathBuf,
    name: String,
    library: PathBuf,
    profile: Profile,
    slow_rails: Vec<(String, f64)>,
    prepared: Prepared,
}

const DEVICES: &str = "/sys/class/infiniband";
/// Start of the name that a run makes for its fabric. The PID follows.
const PREFIX: &str = "nccl-spark-";
/// Name of the built-in profile whose rates have no limit.
pub const UNPACED: &str = "unpaced";
/// Makes the fabric that `request` asks for. `own_library` is the verbs library that the user's
/// environment names (`NCCL_IBVERBS_LIB`).
///
/// # Errors
/// Fails on a mistake on the command line, and when the fabric cannot be made.
pub fn set_up(request: &FabricRequest, ranks: usize, own_library: Option<&str>) -> Result<Fabric> {
    let devices = rdma_devices(Path::new(DEVICES));
    let verbs = |about: String| Fabric {
        kind: Kind::Verbs,
        about,
        environment: Vec::new(),
        soft: None,
    };
    let present = || match devices.is_empty() {
        true => "this machine has no RDMA device".to_owned(),
        false => format!("RDMA devices here: {}", devices.join(", ")),
    };
    match (request.kind, own_library) {
        (Some(Kind::Soft), _) => soft(request, ranks, &format!("as requested ({})", present())),
        (Some(Kind::Verbs), _) => Ok(verbs(format!("verbs, as requested; {}", present()))),
        (None, Some(library)) => Ok(verbs(format!(
            "verbs, for NCCL_IBVERBS_LIB={library}; {}",
            present()
        ))),
        (None, None) if !devices.is_empty() => Ok(verbs(format!("verbs; {}", present()))),
        (None, None) if request.library.is_file() => {
            soft(request, ranks, "because this machine has no RDMA device")
        }
        (None, None) => Ok(verbs(format!(
            "verbs, although this machine has no RDMA device: the software fabric's library is not at {}",
            request.library.display()
        ))),
    }
}

fn rdma_devices(folder: &Path) -> Vec<String> {
    let Ok(entries) = fs::read_dir(folder) else {
        return Vec::new();
    };
    let mut names: Vec<_> = entries
        .flatten()
        .map(|entry| entry.file_name().to_string_lossy().into_owned())
        .collect();
    names.sort();
    names
}

fn soft(request: &FabricRequest, ranks: usize, why: &str) -> Result<Fabric> {
    let profile = Profile::load(&request.profile, request.scale)
        .map_err(|error| wrong(format!("--profile: {error}")))?;
    // Every rank is a node.
    let most = profile.wires.nodes().unwrap_or(MAX_NODES);
    if ranks > most {
        let profile = &request.profile;
        Err(wrong(format!(
            "{ranks} ranks: the software fabric with --profile {profile} has at most {most}"
        )))?;
    }
    let library = place::library(&request.library)?;
    let dir = settings::dir().map_err(|error| anyhow!(error))?;
    control::remove_unused(&dir, is_of_a_run);
    let name = request.name.clone().unwrap_or_else(|| own_name(&dir));
    let prepared = control::prepare(&dir, &name, &profile, ranks);
    let prepared = prepared.map_err(|error| anyhow!("make a software fabric: {error}"))?;
    interrupt::remove_at_exit(prepared.folder());
    let mut environment = prepared.environment.clone();
    environment.push(("NCCL_IBVERBS_LIB".to_owned(), library.display().to_string()));
    let about = about(request, &name, why);
    let soft = Soft {
        dir,
        name,
        library,
        profile,
        slow_rails: request.slow_rails.clone(),
        prepared,
    };
    let slowed = request
        .slow_rails
        .iter()
        .map(|(rail, factor)| ("--slow-rail", rail, Action::Slow(*factor)));
    let broken = request
        .path_faults
        .iter()
        .map(|(rail, fault)| ("--path-fault", rail, Action::Path(*fault, true)));
    for (option, rail, action) in slowed.chain(broken) {
        if let Err(error) = soft.act(None, rail, action) {
            soft.remove();
            Err(wrong(format!("{option}: {error}")))?;
        }
    }
    Ok(Fabric {
        kind: Kind::Soft,
        about,
        environment,
        soft: Some(soft),
    })
}

/// Returns a name that no running fabric has. The PID is not enough, because a process in another
/// PID namespace may have the same PID.
fn own_name(dir: &Path) -> String {
    let plain = format!("{PREFIX}{}", std::process::id());
    let numbered = (2..).map(|number| format!("{plain}-{number}"));
    std::iter::once(plain.clone())
        .chain(numbered)
        .find(|name| !control::is_used(dir, name))
        .unwrap_or(plain)
}

fn is_of_a_run(name: &str) -> bool {
    name.strip_prefix(PREFIX).is_some_and(|numbers| {
        numbers.split('-').count() <= 2
            && numbers
                .split('-')
                .all(|number| number.parse::<u32>().is_ok())
    })
}

fn about(request: &FabricRequest, name: &str, why: &str) -> String {
    let scale = if request.scale == 1.0 {
        String::new()
    } else {
        format!(" x {}", request.scale)
    };
    let slow = request
        .slow_rails
        .iter()
        .map(|(rail, factor)| format!(", {rail} at {factor} of its rate"));
    let broken = request
        .path_faults
        .iter()
        .map(|(rail, fault)| format!(", {rail} with path fault {fault}"));
    let faults = slow.chain(broken).collect::<String>();
    format!(
        "soft, {why}: profile {}{scale}{faults}; each rank is a node; fabric {name}",
        request.profile
    )
}

impl Fabric {
    pub(crate) fn shared_environment(&self) -> &[(String, String)] {
        &self.environment
    }

    /// Returns the environment of one rank.
    pub fn environment(&self, rank: usize) -> Vec<(String, String)> {
        let Some((soft, place)) = self.soft.as_ref().zip(self.place(rank)) else {
            return self.environment.clone();
        };
        place.environment(&soft.library)
    }

    /// Returns the place of one rank in the software fabric, or `None` with RDMA devices.
    pub fn place(&self, rank: usize) -> Option<SoftPlace> {
        let Soft { dir, name, .. } = self.soft.as_ref()?;
        Some(SoftPlace {
            dir: dir.clone(),
            fabric: name.clone(),
            node: rank,
        })
    }

    /// Makes a folder with links to the software fabric's library under the names of libibverbs,
    /// for programs that load libibverbs by name. The folder is removed with the fabric.
    pub(crate) fn verbs_names(&self) -> Result<Option<PathBuf>> {
        let Some(soft) = &self.soft else {
            return Ok(None);
        };
        let folder = soft.prepared.folder().join("lib");
        let make = || -> std::io::Result<()> {
            fs::create_dir_all(&folder)?;
            for name in ["libibverbs.so", "libibverbs.so.1"] {
                let link = folder.join(name);
                if link.symlink_metadata().is_err() {
                    symlink(&soft.library, link)?;
                }
            }
            Ok(())
        };
        make().with_context(|| format!("make {}", folder.display()))?;
        Ok(Some(folder))
    }

    /// Returns the highest payload rate and the lowest latency from node 0 to node 1 of a software
    /// fabric; `None` if this is no software fabric. Between any two cabled nodes, both figures are
    /// the same. `slowed_rails` has the names of slowed rails, each with the fraction of its rate
    /// that it keeps. For these rails, [`FabricRequest::slow_rails`] does not count.
    pub fn limit(&self, slowed_rails: &[(String, f64)]) -> Option<Limit> {
        let Soft {
            profile,
            slow_rails,
            ..
        } = self.soft.as_ref()?;
        let factor = |name: &str| {
            let slowed = slowed_rails
                .iter()
                .rev()
                .chain(slow_rails.iter().rev())
                .find(|(rail, _)| rail == name);
            slowed.map_or(1.0, |(_, factor)| *factor)
        };
        let count = profile.rails.len();
        let used = (0..count).filter(|at| (0..count).any(|to| profile.reaches((0, *at), (1, to))));
        let rails: Vec<_> = used
            .map(|at| (at, factor(&profile.rails[at].name)))
            .collect();
        Some(limit::of_rails(profile, &rails))
    }

    /// Returns the names of a software fabric's rails, the same on each node.
    pub fn rails(&self) -> impl Iterator<Item = &str> {
        self.soft
            .iter()
            .flat_map(|soft| &soft.profile.rails)
            .map(|rail| rail.name.as_str())
    }

    /// Sets a rail of the software fabric to `factor` of its rate, on all nodes. With 1, restores
    /// the rate that the rail had at the start.
    ///
    /// # Errors
    /// Fails when there is no such rail, or no software fabric.
    pub fn slow(&self, rail: &str, factor: f64) -> Result<()> {
        let soft = self.soft()?;
        let own = soft
            .slow_rails
            .iter()
            .find(|(slow, _)| slow == rail)
            .map_or(1.0, |(_, factor)| *factor);
        soft.act(
            None,
            rail,
            Action::Slow(if factor >= 1.0 { own } else { factor }),
        )
        .map_err(|error| anyhow!(error))
    }

    /// If `is_plugged` is false, takes the device of a node's rail off the bus. Otherwise adds a
    /// new device of the same name.
    ///
    /// # Errors
    /// Fails when there is no such node or rail, or no software fabric.
    pub fn plug(&self, node: usize, rail: &str, is_plugged: bool) -> Result<()> {
        let action = if is_plugged {
            Action::Plug
        } else {
            Action::Unplug
        };
        self.soft()?
            .act(Some(node), rail, action)
            .map_err(|error| anyhow!(error))
    }

    /// Returns the number of queue pairs of all processes on a node of the software fabric.
    ///
    /// # Errors
    /// Fails when there is no such node or no software fabric, or the fabric's state cannot be
    /// read.
    pub fn queue_pairs(&self, node: usize) -> Result<usize> {
        let Soft { dir, name, .. } = self.soft()?;
        let status = control::status(dir, name).map_err(|error| anyhow!(error))?;
        let of_node = status.nodes.iter().find(|known| known.node == node);
        of_node
            .map(|known| known.queue_pairs)
            .with_context(|| format!("the fabric has no node {node}"))
    }

    fn soft(&self) -> Result<&Soft> {
        self.soft
            .as_ref()
            .context("this run has no software fabric")
    }
}

/// The rails of the software fabric that this process's environment names.
#[derive(Debug, Clone)]
pub(crate) struct SoftRails(Profile);

impl SoftRails {
    /// Returns the rails of the fabric in the environment, or `None` if `verbs_library` is not the
    /// software fabric's library. Fails when the fabric does not exist.
    pub(crate) fn of_environment(verbs_library: &str) -> Result<Option<Self>> {
        let is_soft = Path::new(verbs_library).file_name() == Path::new(places::FABRIC).file_name();
        if !is_soft {
            return Ok(None);
        }
        let name = settings::fabric().map_err(|error| anyhow!(error))?;
        let profile = settings::dir().and_then(|dir| control::profile(&dir, &name));
        let profile = profile.map_err(|error| anyhow!(error))?;
        Ok(Some(Self(profile)))
    }

    /// Returns the payload rate of the rails of `devices` together in Mb/s, or `None` if there is
    /// no limit.
    pub fn payload_mbps(&self, devices: &[&str]) -> Option<f64> {
        let rails = self.0.rails.iter().enumerate();
        let used: Vec<_> = rails
            .filter(|(_, rail)| devices.contains(&rail.name.as_str()))
            .map(|(at, _)| (at, 1.0))
            .collect();
        limit::of_rails(&self.0, &used).payload_mbps
    }
}

impl Soft {
    fn act(&self, node: Option<usize>, rail: &str, action: Action) -> Result<(), String> {
        control::control(&self.dir, &self.name, node, rail, action)
    }

    fn remove(&self) {
        self.prepared.remove();
        interrupt::keep_at_exit(self.prepared.folder());
    }
}

impl Drop for Fabric {
    fn drop(&mut self) {
        if let Some(soft) = &self.soft {
            soft.remove();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::usage;

    fn request(kind: Option<Kind>) -> FabricRequest {
        let profile = "spark-1cable".to_owned();
        let scale = 1.0;
        FabricRequest {
            kind,
            profile,
            scale,
            slow_rails: Vec::new(),
            path_faults: Vec::new(),
            library: "/no/library".into(),
            name: None,
        }
    }

    #[test]
    fn a_users_own_library_counts_as_verbs() {
        let fabric = set_up(&request(None), 2, Some("libmine.so")).unwrap();
        assert_eq!(
            (fabric.kind, fabric.environment(1)),
            (Kind::Verbs, Vec::new())
        );
        assert!(fabric.about.contains("libmine.so"), "{}", fabric.about);
    }

    #[test]
    fn missing_objects_are_named() {
        let error = |request: &FabricRequest, ranks| {
            usage::text(&set_up(request, ranks, None).map(|_| ()).unwrap_err())
        };
        assert!(error(&request(Some(Kind::Soft)), 2).contains("/no/library"));
        let of = |profile: &str| FabricRequest {
            profile: profile.to_owned(),
            ..request(Some(Kind::Soft))
        };
        let room = |profile: &str, most: usize| {
            format!("the software fabric with --profile {profile} has at most {most}")
        };
        assert_eq!(
            error(&of("unpaced"), 17),
            format!("17 ranks: {}", room("unpaced", 16))
        );
        assert_eq!(
            error(&of("spark-triangle"), 4),
            format!("4 ranks: {}", room("spark-triangle", 3))
        );
        assert!(
            error(&of("/no/profile"), 2)
                .starts_with("--profile: profile \"/no/profile\" is neither built in (")
        );
    }

    /// Computed by hand: two of a Spark's four rails lead to the next Spark, over one cable that
    /// carries 195 Gb/s of payload.
    #[test]
    fn between_two_sparks_of_a_triangle_is_one_cable() {
        for profile in ["spark-triangle", "spark-ring"] {
            let profile = profile.to_owned();
            let library = "/dev/null".into();
            let fabric = set_up(
                &FabricRequest {
                    profile,
                    library,
                    ..request(Some(Kind::Soft))
                },
                3,
                None,
            )
            .unwrap();
            assert_eq!(fabric.limit(&[]).unwrap().payload_mbps, Some(195_000.0));
        }
    }

    #[test]
    fn only_automatically_named_fabrics_are_removed() {
        for name in ["nccl-spark-7", "nccl-spark-7-2"] {
            assert!(is_of_a_run(name), "{name}");
        }
        for name in [
            "nccl-spark-mine",
            "nccl-spark-",
            "nccl-spark-7-2-1",
            "default",
            "7",
        ] {
            assert!(!is_of_a_run(name), "{name}");
        }
        let dir = tempfile::tempdir().unwrap();
        let first = own_name(dir.path());
        let profile = Profile::load(UNPACED, 1.0).unwrap();
        let prepared = control::prepare(dir.path(), &first, &profile, 1).unwrap();
        let second = own_name(dir.path());
        assert!(
            second == format!("{first}-2") && is_of_a_run(&second),
            "{first} {second}"
        );
        drop(prepared);
        assert_eq!(own_name(dir.path()), first);
    }

    #[test]
    fn help_names_all_profiles() {
        use clap::CommandFactory;
        let mut command = crate::cli::Cli::command();
        let help = command
            .find_subcommand_mut("all-gather")
            .unwrap()
            .render_long_help()
            .to_string();
        let help = help.split_whitespace().collect::<Vec<_>>().join(" ");
        assert!(
            help.contains(&format!("({})", Profile::names().join(", "))),
            "{help}"
        );
    }

    #[test]
    fn devices_are_those_that_the_kernel_lists() {
        let folder = tempfile::tempdir().unwrap();
        assert!(
            rdma_devices(folder.path()).is_empty()
                && rdma_devices(Path::new("/no/where")).is_empty()
        );
        fs::create_dir(folder.path().join("mlx5_1")).unwrap();
        fs::create_dir(folder.path().join("mlx5_0")).unwrap();
        assert_eq!(rdma_devices(folder.path()), ["mlx5_0", "mlx5_1"]);
    }
}
