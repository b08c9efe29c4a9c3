//! Runs a program of nccl-tests once, with the tuner off or with a table, and reads NCCL's log of
//! the run.
//!
//! Ranks share one output, so one rank's line can split another rank's line. A split line of the
//! log is skipped. A split row of the table that nccl-tests prints is joined again. If that is not
//! possible, the run fails, and `Bench::add` repeats a failed run once.

use super::options::Plan;
use crate::commands::nccl_tests::options::{Call, Place};
use crate::commands::nccl_tests::run;
use crate::commands::tune::keep;
use crate::scene::Scene;
use crate::scene::network::{Network, Used};
use anyhow::{Context, Result, bail, ensure};
use proto::tuner::table::{Fingerprint, Table};
use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;

/// Smallest size, in bytes, of a collective in a group. Smaller collectives all take the same time.
/// With 16 ranks, each rank's part of this size is still a multiple of 16 bytes.
const LEAST_MEMBER: usize = 512;

/// The time of one out-of-place operation in microseconds, by size in bytes.
pub type Times = BTreeMap<u64, f64>;

pub struct Runner<'a> {
    plan: &'a Plan,
    scene: Scene,
    own: &'a Path,
    lookup: &'a dyn Fn(&str) -> Option<String>,
    /// Facts that are the same in all runs. `None` before a run has succeeded.
    pub facts: Option<Facts>,
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Facts {
    pub fingerprint: Fingerprint,
    pub ranks: usize,
    pub used: String,
}

impl<'a> Runner<'a> {
    /// Prepares the fabric and the environment for NCCL ([`Scene`]).
    ///
    /// # Errors
    /// A part of the scene does not exist.
    pub fn new(
        plan: &'a Plan,
        own: &'a Path,
        lookup: &'a dyn Fn(&str) -> Option<String>,
    ) -> Result<Self> {
        let scene = Scene::set(
            &plan.conditions.setting,
            plan.conditions.place.ranks_here(),
            lookup,
        )?;
        Ok(Self {
            plan,
            scene,
            own,
            lookup,
            facts: None,
        })
    }

    pub fn fabric(&self) -> &str {
        &self.scene.fabric.about
    }

    /// Runs `program` once, with `table` or, if that is `None`, with the tuner off. With `members`
    /// above 1, the program measures groups of that many collectives. The bytes of a group then add
    /// up to the size of a single collective, except that no collective is smaller than
    /// `LEAST_MEMBER`.
    ///
    /// # Errors
    /// The run fails, data is wrong, the ranks' hosts differ, or NCCL's log does not show that the
    /// run used the plugin with `table` (or with the tuner off).
    pub fn run(&mut self, program: &Path, table: Option<&Table>, members: u32) -> Result<Times> {
        let conditions = &self.plan.conditions;
        let mut arguments = self.plan.arguments.clone();
        if members > 1 {
            let (smallest, largest) = self.plan.sizes;
            let of_member = |bytes: usize| (bytes / members as usize).max(LEAST_MEMBER).to_string();
            // If an option is given twice, the program uses the last one.
            let more = [
                "-m",
                &members.to_string(),
                "-b",
                &of_member(smallest),
                "-e",
                &of_member(largest),
            ];
            arguments.extend(more.map(str::to_owned));
        }
        let call = Call {
            program,
            arguments: &arguments,
            conditions,
        };
        let environment = self.environment(matches!(conditions.place, Place::Here(_)), table)?;
        let who = table.map_or_else(|| "untuned".to_owned(), Table::to_string);
        let mut used = Used::default();
        let mut log = LogFacts::default();
        let names = (self.own, who.as_str());
        let rows = run::run(
            &call,
            &self.scene,
            &environment,
            names,
            &mut used,
            |line, _| {
                log.note(line);
                Ok(())
            },
        )?;
        let halves = rows
            .iter()
            .flat_map(|row| [row.out_of_place.wrong, row.in_place.wrong]);
        let wrong: f64 = halves.flatten().sum();
        ensure!(wrong == 0.0, "{wrong} WRONG elements");
        ensure!(
            rows.iter().all(|row| row.out_of_place.wrong.is_some()),
            "the program did not check its data"
        );
        let is_time = |us: f64| us.is_finite() && us > 0.0;
        ensure!(
            rows.iter().all(|row| is_time(row.out_of_place.time_us)),
            "the table has a time that is not above 0"
        );
        let words = used.judge(Network::Spark)?;
        log.check_policy(table)?;
        if self.facts.is_none() {
            let version = used.version.as_deref().unwrap_or("of unknown version");
            let ranks = log.ranks(&conditions.place)?;
            let used = format!("NCCL {version} used {words}");
            self.facts = Some(Facts {
                fingerprint: log.fingerprint()?,
                ranks,
                used,
            });
        }
        Ok(rows
            .iter()
            .map(|row| (row.bytes, row.out_of_place.time_us))
            .collect())
    }

    fn environment(&self, is_here: bool, table: Option<&Table>) -> Result<Vec<(String, String)>> {
        let mut environment = self
            .scene
            .environment(Network::Spark, is_here, self.lookup)?;
        let mut set = |name: &str, value: String| {
            environment.retain(|(other, _)| other != name);
            environment.push((name.to_owned(), value));
        };
        match table {
            // The settings file may have a table, which has no effect with the tuner off.
            None => set("NCCL_SPARK_TUNER", "off".to_owned()),
            Some(table) => {
                set("NCCL_SPARK_TUNER", "on".to_owned());
                set(keep::TUNER_TABLE, table.to_string());
            }
        }
        // The settings file that the variable names may not exist before this command writes it.
        // Without that file, the plugin would not start.
        if (self.lookup)(keep::SETTINGS_FILE).is_some_and(|path| !Path::new(&path).exists()) {
            set(keep::SETTINGS_FILE, "/dev/null".to_owned());
        }
        Ok(environment)
    }
}

#[derive(Debug, Default)]
struct LogFacts {
    /// What the tuner does, as the plugin logs it on each rank.
    policies: BTreeSet<String>,
    /// Fingerprints of the ranks' hosts, as text.
    hosts: BTreeSet<String>,
    /// Contains true if some communicator used the plugin's tuner. Contains false if some
    /// communicator did not.
    communicators: BTreeSet<bool>,
    /// Number of ranks and number of nodes of each communicator.
    sizes: BTreeSet<(usize, usize)>,
}

impl LogFacts {
    fn note(&mut self, line: &str) {
        // The plugin's line (`plugin.rs`) counts only if it is complete, because another rank's
        // line may split it.
        let found = line
            .rsplit_once("; this host is ")
            .and_then(|(start, host)| {
                let (_, policy) = start.rsplit_once("tuner: ")?;
                Some((policy, host.split_whitespace().next()?))
            });
        if let Some((policy, host)) =
            found.filter(|(policy, host)| is_whole_policy(policy) && is_whole_host(host))
        {
            self.policies.insert(policy.to_owned());
            self.hosts.insert(host.to_owned());
        }
        // The plugin's tuner logs one of these lines only if NCCL asks this tuner
        // (`abi/tuner_calls.rs`).
        for (words, is_used) in [
            ("tuner: in use for a communicator", true),
            ("tuner: not used for a communicator", false),
        ] {
            if line.contains(words) {
                self.communicators.insert(is_used);
            }
        }
        // NCCL's line: "comm 0x.. rank 0 nRanks 2 nNodes 2 localRanks 1 ..." (init.cc).
        let words: Vec<&str> = line.split_whitespace().collect();
        let number = |name: &str| {
            let at = words.iter().position(|word| *word == name)?;
            words.get(at + 1)?.parse::<usize>().ok()
        };
        if let (Some(ranks), Some(nodes)) = (number("nRanks"), number("nNodes")) {
            self.sizes.insert((ranks, nodes));
        }
    }

    /// Checks that the plugin's tuner was off, or had `table`, on every rank.
    fn check_policy(&self, table: Option<&Table>) -> Result<()> {
        let rows = table.map(|table| table.rows().len());
        let is_expected = |policy: &str| match rows {
            None => policy.starts_with("off: NCCL_SPARK_TUNER=off"),
            Some(rows) => table_of(policy) == Some(("learned", rows)),
        };
        ensure!(
            !self.policies.is_empty(),
            "the log has no whole line on what the plugin's tuner does; is the plugin older?"
        );
        match self.policies.iter().find(|policy| !is_expected(policy)) {
            Some(policy) => bail!(
                "this run needs the tuner {}, but the plugin logs \"{policy}\"",
                rows.map_or("off".to_owned(), |rows| format!(
                    "with a learned table of {rows} row(s)"
                ))
            ),
            None if table.is_none() => Ok(()),
            None => {
                let is_asked = self.communicators.iter().eq([&true]);
                ensure!(
                    is_asked,
                    "NCCL did not use this plugin's tuner on every rank: remove libnccl-tuner.so or unset NCCL_TUNER_PLUGIN"
                );
                Ok(())
            }
        }
    }

    fn fingerprint(&self) -> Result<Fingerprint> {
        let hosts: Vec<&str> = self.hosts.iter().map(String::as_str).collect();
        match hosts[..] {
            [] => bail!("the plugin did not log this host's GPU, rails and NCCL version"),
            [one] => one
                .parse()
                .map_err(anyhow::Error::msg)
                .context("the host's fingerprint in the plugin's log"),
            [one, other, ..] => bail!(
                "the ranks' hosts differ ({one} and {other}, as GPU/RAILS/NCCL), and one table cannot serve both: use \
                 the same GPU, rails and NCCL version on all"
            ),
        }
    }

    fn ranks(&self, place: &Place) -> Result<usize> {
        match (self.sizes.iter().next_back(), place) {
            (Some((ranks, nodes)), _) => {
                ensure!(
                    ranks == nodes,
                    "NCCL counts {ranks} ranks on {nodes} node(s): the tuner acts only with one rank per node"
                );
                Ok(*ranks)
            }
            (None, Place::Here(ranks)) => Ok(*ranks),
            (None, Place::Hosts(_)) => {
                bail!("NCCL's log does not say how many ranks there are (no nRanks)")
            }
        }
    }
}

/// Returns true if the policy text is complete, as the plugin's tuner writes it (`tuner/mod.rs`).
fn is_whole_policy(policy: &str) -> bool {
    policy.starts_with("off: ") || table_of(policy).is_some()
}

/// Returns the origin (learned or shipped) and the number of rows of the table that a policy names.
fn table_of(policy: &str) -> Option<(&str, usize)> {
    let (origin, rest) = policy.split_once(" table of ")?;
    let (rows, _) = rest.split_once(" row")?;
    Some((
        ["learned", "shipped"]
            .into_iter()
            .find(|known| *known == origin)?,
        rows.parse().ok()?,
    ))
}

/// Returns true if `host` is a complete fingerprint. The last part of a fingerprint is the NCCL
/// version. In a split line, the text of another rank follows directly, so that the last part is
/// not a version.
fn is_whole_host(host: &str) -> bool {
    let has_version = host
        .rsplit('/')
        .next()
        .is_some_and(|nccl| nccl == "unknown" || is_version(nccl));
    has_version && host.parse::<Fingerprint>().is_ok()
}

fn is_version(text: &str) -> bool {
    text.contains('.')
        && text
            .bytes()
            .all(|byte| byte.is_ascii_digit() || byte == b'.')
}

#[cfg(test)]
mod tests {
    use super::*;

    fn facts_of(lines: &[&str]) -> LogFacts {
        let mut log = LogFacts::default();
        lines.iter().for_each(|line| log.note(line));
        log
    }

    const OFF: &str = "h:1:1 [0] NCCL INFO tuner: off: NCCL_SPARK_TUNER=off; this host is NVIDIA_H200/4x224054/2.28.3";
    const INIT: &str =
        "h:1:2 [0] NCCL INFO comm 0x55 rank 0 nRanks 2 nNodes 2 localRanks 1 localRank 0 MNNVL 0";

    #[test]
    fn the_log_names_the_hosts_and_the_ranks() {
        let log = facts_of(&[
            OFF,
            OFF,
            INIT,
            "h:1:2 [0] NCCL INFO comm 0x55 rank 0 nranks 9 cudaDev 0",
        ]);
        assert_eq!(
            log.fingerprint().unwrap().to_string(),
            "NVIDIA_H200/4x224054/2.28.3"
        );
        assert_eq!(log.ranks(&Place::Hosts(Vec::new())).unwrap(), 2);
        let cut = OFF.replace("54/2.28.3", "h:1:2 [0] NCCL INFO Channel");
        assert!(
            facts_of(&[OFF, &cut]).fingerprint().is_ok()
                && facts_of(&[&cut]).fingerprint().is_err()
        );
        log.check_policy(None).unwrap();
    }

    #[test]
    fn lines_that_other_ranks_cut_are_skipped() {
        let table: Table = "for=*;all_reduce@2:1-9=ring/ll/2".parse().unwrap();
        let learned = OFF.replace(
            "off: NCCL_SPARK_TUNER=off",
            "learned table of 1 rows, hash 1",
        );
        let used = "h:1:2 [0] NCCL INFO NET/Spark: tuner: in use for a communicator of 2 ranks";
        // Another rank's line splits this line at every possible place.
        for at in 1..learned.len() {
            for other in [learned.as_str(), used, INIT] {
                let log = facts_of(&[
                    &learned,
                    used,
                    &format!("{}{other}", &learned[..at]),
                    &learned[at..],
                    INIT,
                ]);
                let checked = log
                    .check_policy(Some(&table))
                    .and_then(|()| log.fingerprint())
                    .and_then(|host| {
                        assert_eq!(host.to_string(), "NVIDIA_H200/4x224054/2.28.3");
                        log.ranks(&Place::Here(2))
                    });
                assert_eq!(checked.unwrap(), 2, "{at}: {other}");
            }
        }
        // A line that is never complete has no effect.
        let cut = learned.replace("1 rows, hash 1", "1 rh:1:2 [0] NCCL INFO Channel");
        assert!(facts_of(&[&cut, used]).check_policy(Some(&table)).is_err());
    }

    #[test]
    fn hosts_that_differ_and_ranks_that_share_a_node_are_errors() {
        let text = facts_of(&[OFF, &OFF.replace("4x", "2x")])
            .fingerprint()
            .unwrap_err()
            .to_string();
        assert!(
            text.contains("2x224054") && text.contains("4x224054"),
            "{text}"
        );
        assert!(facts_of(&[INIT]).fingerprint().is_err());
        let two = facts_of(&[&INIT.replace("nNodes 2", "nNodes 1")])
            .ranks(&Place::Here(2))
            .unwrap_err()
            .to_string();
        assert!(two.contains("2 ranks on 1 node(s)"), "{two}");
        assert_eq!(facts_of(&[]).ranks(&Place::Here(3)).unwrap(), 3);
        assert!(facts_of(&[]).ranks(&Place::Hosts(Vec::new())).is_err());
    }

    #[test]
    fn a_run_counts_only_if_it_used_the_given_table() {
        let table: Table = "for=*;all_reduce@2:1-9=ring/ll/2".parse().unwrap();
        let learned = |rows: usize| {
            OFF.replace(
                "off: NCCL_SPARK_TUNER=off",
                &format!("learned table of {rows} rows, hash 1"),
            )
        };
        let used = "h:1:2 [0] NCCL INFO NET/Spark: tuner: in use for a communicator of 2 ranks";
        let left = "h:1:2 [0] NCCL INFO NET/Spark: tuner: not used for a communicator of 2 ranks on 2 nodes: why";
        facts_of(&[&learned(1), used, used])
            .check_policy(Some(&table))
            .unwrap();
        for lines in [&[OFF][..], &[&learned(0)], &[&learned(1), OFF], &[]] {
            assert!(
                facts_of(&[lines, &[used]].concat())
                    .check_policy(Some(&table))
                    .is_err(),
                "{lines:?}"
            );
        }
        // On some rank NCCL asked another tuner, or none.
        for lines in [&[][..], &[left], &[used, left]] {
            let error = facts_of(&[&[learned(1).as_str()], lines].concat())
                .check_policy(Some(&table))
                .unwrap_err();
            assert!(
                error
                    .to_string()
                    .contains("did not use this plugin's tuner"),
                "{lines:?}: {error}"
            );
        }
        assert!(facts_of(&[&learned(1)]).check_policy(None).is_err());
    }
}
