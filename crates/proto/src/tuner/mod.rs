//! The tuner: chooses algorithm, protocol and channels of a collective where NCCL chooses badly.
//!
//! NCCL's cost model does not cover a network like a Spark's. On a software twin of a Spark, NCCL's
//! choice for 32 KB to 24 MB takes up to 3.4 times as long as the best one
//! (docs/evidence/tuner.md). NCCL calls the tuner for each collective; this tuner looks the
//! collective up in a table.
//!
//! **Every rank must decide alike, or the job hangs**: a rank that uses LL and a peer that uses
//! Simple wait for each other. So a decision depends only on facts that are the same everywhere:
//! the collective, the number of ranks and nodes, the bytes, the table. Each host's own decisions
//! (whether the tuner is active, and with which table) are a [`Policy`]. The handshake of each
//! connection compares the policies' hashes and refuses a peer with another hash
//! (`comm/setup/negotiate.rs`).
//!
//! Guarantees: an entry that NCCL has disabled in its cost table (a negative cost) stays disabled.
//! If no row matches, only two restrictions change costs: LL128 is not allowed, or only Ring is. A
//! decision allocates nothing and takes no lock. This module does no I/O and reads neither
//! environment nor clock. The C side is `abi/tuner_*`.

#![forbid(unsafe_code)]

pub mod communicators;
pub mod shipped;
pub mod table;

use std::fmt::{self, Display};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use strum::VariantNames;
use table::{Algorithm, Collective, Fingerprint, Protocol, Row, Table};

/// Settings of the tuner.
#[derive(Debug, Clone, Default)]
pub struct TunerConfig {
    /// `NCCL_SPARK_TUNER`.
    pub mode: Mode,
    /// `NCCL_SPARK_TUNER_TABLE`.
    pub table: Option<Table>,
    /// `NCCL_SPARK_LL128`: true if LL128 may be chosen.
    pub ll128: bool,
    /// `NCCL_NET`, if set. NCCL initialises this plugin's network, but then uses the named one.
    pub network: Option<String>,
    /// `NCCL_TUNER_PLUGIN`, if set. NCCL loads the named tuner, or none.
    pub tuner_plugin: Option<String>,
}

/// Value of `NCCL_SPARK_TUNER`.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub enum Mode {
    /// Active on a GB10.
    #[default]
    Auto,
    /// Active on any GPU.
    On,
    /// Never active.
    Off,
}

/// A host's decision about the tuner, for all its communicators.
#[derive(Debug, Clone)]
pub enum Policy {
    /// NCCL makes every choice.
    Inert {
        /// The reason, as text.
        reason: String,
    },
    /// The tuner follows these rules.
    Acting(Arc<Rules>),
}

/// Rules of an active tuner.
#[derive(Debug, PartialEq, Eq)]
pub struct Rules {
    /// Source of the rows.
    pub origin: RowSource,
    rows: Vec<Row>,
    ll128: bool,
    ring_only: bool,
}

/// Source of a table's rows.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum RowSource {
    /// Shipped with the plugin.
    Shipped,
    /// Measured by `nccl-spark tune` and passed in a setting.
    Learned,
    /// No rows: all rows are for another kind of GPU.
    None,
}

/// Part of CUDA's name for the GPU of a DGX Spark.
const GB10: &str = "GB10";

/// Returns true if the tuner with the setting `auto` is active on a host with this GPU.
pub fn is_for(gpu: &str) -> bool {
    gpu.contains(GB10)
}

impl Policy {
    /// Decides for `host`. Also returns warnings for the user. With `ring_tcp`, some peers may be
    /// reachable only over TCP; above two nodes the tuner then offers only Ring, which connects
    /// only neighbours.
    pub fn new(config: TunerConfig, ring_tcp: bool, host: &Fingerprint) -> (Self, Vec<String>) {
        let TunerConfig {
            mode,
            table,
            ll128,
            network,
            tuner_plugin,
        } = config;
        let inert = |reason: String| (Self::Inert { reason }, Vec::new());
        // Makes the tuner inactive by the user's choice. Warns if messages may then take a slow
        // path.
        let inert_by_wish = |reason: String| {
            let warning = format!(
                "NCCL_SPARK_RING_TCP=1 without this plugin's tuner ({reason}): NCCL may choose algorithms that use TCP; set NCCL_ALGO=Ring"
            );
            (
                Self::Inert { reason },
                if ring_tcp { vec![warning] } else { Vec::new() },
            )
        };
        if mode == Mode::Off {
            return inert_by_wish("NCCL_SPARK_TUNER=off".to_owned());
        }
        let has_rows = mode == Mode::On || is_for(&host.gpu);
        if !has_rows && !ring_tcp {
            return inert(format!(
                "the GPU is {}, not a {GB10} (NCCL_SPARK_TUNER=on overrides this)",
                host.gpu
            ));
        }
        if let Some(other) = network.filter(|name| !name.eq_ignore_ascii_case("Spark")) {
            return inert(format!("NCCL_NET={other} selects another network"));
        }
        if let Some(other) = tuner_plugin.filter(|name| !name.contains("spark")) {
            return inert_by_wish(format!(
                "NCCL_TUNER_PLUGIN={other} selects another tuner or none"
            ));
        }
        let mut warnings = Vec::new();
        let mut chosen = if has_rows {
            (RowSource::Shipped, shipped::rows())
        } else {
            (RowSource::None, Vec::new())
        };
        if let Some(table) = table.filter(|_| has_rows) {
            let learned_on = table.fingerprint();
            let is_for = |of: &Fingerprint| (of.gpu == host.gpu) && (of.nccl == host.nccl);
            if learned_on.is_none_or(is_for) {
                chosen = (RowSource::Learned, table.rows().to_vec());
            }
            if let Some(of) = learned_on.filter(|of| *of != host) {
                // A table for other rails is still used: otherwise a host with a port down would
                // differ from its peers, and its jobs would not start.
                let what = match is_for(of) {
                    true => "used, although the rails differ",
                    false => "not used",
                };
                warnings.push(format!(
                    "NCCL_SPARK_TUNER_TABLE was learned on {of}, this host is {host}: {what}; run nccl-spark tune collectives again, \
                     or remove the table from the settings file"
                ));
            }
        }
        let (origin, mut rows) = chosen;
        rows.retain(|row| ll128 || row.choice.protocol != Protocol::Ll128);
        (
            Self::Acting(Arc::new(Rules {
                origin,
                rows,
                ll128,
                ring_only: ring_tcp,
            })),
            warnings,
        )
    }

    /// Returns a hash of the rows and restrictions, by which two hosts find out whether they decide
    /// alike. The origin of the rows does not count. An inactive tuner has the hash 0.
    pub fn hash(&self) -> u64 {
        match self {
            Self::Inert { .. } => 0,
            Self::Acting(rules) => rules.hash(),
        }
    }

    /// Returns the tuner for a communicator of `ranks` ranks on `nodes` nodes; `is_ours` is true if
    /// the communicator uses this network.
    pub fn tuner(&self, ranks: usize, nodes: usize, is_ours: bool) -> Tuner {
        let inert = |reason: &str| Tuner::Inert {
            reason: reason.to_owned(),
        };
        let rules = match self {
            Self::Inert { reason } => return inert(reason),
            Self::Acting(rules) => rules,
        };
        if !is_ours {
            return inert(
                "the communicator uses another network, or shares its parent's resources",
            );
        }
        if nodes < 2 {
            return inert("the communicator is on one node");
        }
        // With two nodes, all algorithms use the same connections, so Ring has no advantage.
        let ring_only = rules.ring_only && nodes > 2;
        let is_for_rows = ranks == nodes;
        if !is_for_rows && !ring_only {
            return inert("the communicator has more than one rank on a node");
        }
        let is_for = |row: &&Row| is_for_rows && row.ranks == ranks;
        let rows: Vec<Row> = rules.rows.iter().filter(is_for).copied().collect();
        // With several ranks on a node, no row holds and nothing is known against LL128. So NCCL
        // may choose it.
        let ll128 = rules.ll128 || !is_for_rows;
        if rows.is_empty() && ll128 && !ring_only {
            return Tuner::Inert {
                reason: format!("the table has no row for {ranks} ranks"),
            };
        }
        Tuner::Acting(Acting {
            rows,
            ll128,
            ring_only,
            logged_sizes: Default::default(),
        })
    }
}

impl Display for Policy {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Inert { reason } => write!(f, "off: {reason}"),
            Self::Acting(rules) => {
                let origin = match rules.origin {
                    RowSource::Shipped => "shipped",
                    RowSource::Learned => "learned",
                    RowSource::None => "empty",
                };
                let ll128 = if rules.ll128 { "" } else { ", no LL128" };
                let ring = if rules.ring_only {
                    ", Ring only above two nodes (NCCL_SPARK_RING_TCP)"
                } else {
                    ""
                };
                write!(
                    f,
                    "{origin} table of {} rows{ll128}{ring}, hash {:016x}",
                    rules.rows.len(),
                    rules.hash()
                )
            }
        }
    }
}

impl Rules {
    /// FNV-1a (64 bits) over the rules' text, equal in every build.
    fn hash(&self) -> u64 {
        let rows: String = self.rows.iter().map(|row| format!("{row};")).collect();
        let ring_only = if self.ring_only { "ring;" } else { "" };
        let text = format!("{DECISION_VERSION};ll128={};{ring_only}{rows}", self.ll128);
        let step =
            |hash: u64, byte: u8| (hash ^ u64::from(byte)).wrapping_mul(0x0000_0100_0000_01b3);
        // 0 is the hash of an inactive tuner.
        text.bytes().fold(0xcbf2_9ce4_8422_2325, step).max(1)
    }
}

/// Version of the decision procedure. Raise it if the same table leads to other decisions: builds
/// that decide differently then refuse each other.
const DECISION_VERSION: u32 = 2;

/// The tuner of one communicator.
#[derive(Debug)]
pub enum Tuner {
    /// NCCL makes every choice.
    Inert {
        /// The reason, as text.
        reason: String,
    },
    /// The tuner changes NCCL's costs.
    Acting(Acting),
}

/// Rows and restrictions for one communicator.
#[derive(Debug)]
pub struct Acting {
    rows: Vec<Row>,
    ll128: bool,
    ring_only: bool,
    /// For each collective, the sizes for which a decision was logged. Bit `n` stands for all sizes
    /// from `2^n` to `2^(n + 1) - 1` bytes.
    logged_sizes: [AtomicU64; Collective::VARIANTS.len()],
}

/// NCCL's costs for one collective in microseconds, negative if disabled. Algorithm and protocol
/// have index `algorithm * PROTOCOLS + protocol`.
pub type Costs = [f32; ALGORITHMS * PROTOCOLS];
/// Algorithms in NCCL's table (`NCCL_NUM_ALGORITHMS`, 2.27 to 2.30). A table of another size is not
/// changed.
pub const ALGORITHMS: usize = 7;
/// Protocols in NCCL's table (`NCCL_NUM_PROTOCOLS`).
pub const PROTOCOLS: usize = 3;

/// A cost that NCCL accepts only if no cheaper entry is enabled. NCCL ignores entries of 3.6e9 us
/// (an hour) or more (`topoGetAlgoInfo`).
const LAST_RESORT_US: f32 = 1.0e9;
/// The cost of other algorithms where only Ring should be used. It is above [`LAST_RESORT_US`], so
/// NCCL prefers even Ring with LL128.
const NOT_RING_US: f32 = 2.0e9;

impl Tuner {
    /// Changes NCCL's costs so that NCCL makes the table's choice. Returns the number of channels
    /// if a row matches and NCCL has not disabled the row's choice. `collective` is NCCL's number,
    /// and `bytes` the size as NCCL counts it.
    ///
    /// Rows were measured with one collective at a time. For a group, NCCL asks once, with the sum
    /// of the members' bytes. The tuner applies no row to a group if `tasks_per_channel` is 2 or
    /// more, that is, if the group has more members than the communicator has channels.
    ///
    /// If LL128 is not allowed, it becomes a last resort for every collective. If only Ring is
    /// allowed, all other algorithms become a last resort for each collective that has a Ring, and
    /// rows with other algorithms are ignored for this collective.
    pub fn decide(
        &self,
        collective: i32,
        bytes: u64,
        tasks_per_channel: i32,
        costs: &mut Costs,
    ) -> Option<u32> {
        let Self::Acting(acting) = self else {
            return None;
        };
        if !acting.ll128 {
            disfavour_ll128(costs);
        }
        let is_ring_only = acting.ring_only && disfavour_all_but_ring(costs);
        let collective = Collective::from_repr(collective)?;
        let row = acting
            .row(collective, bytes)
            .filter(|_| tasks_per_channel <= 1)?;
        if is_ring_only && row.choice.algorithm != Algorithm::Ring {
            return None;
        }
        let place = row.choice.algorithm as usize * PROTOCOLS + row.choice.protocol as usize;
        let is_allowed = costs[place] >= 0.0;
        if acting.is_new(collective, bytes) {
            let what = if is_allowed {
                ""
            } else {
                ", disabled by NCCL: not applied"
            };
            tracing::debug!("tuner: {collective} of {bytes} bytes: {}{what}", row.choice);
        }
        if !is_allowed {
            return None;
        }
        costs[place] = 0.0;
        Some(row.choice.channels)
    }
}

impl Acting {
    /// Returns true if the tuner offers NCCL only Ring, for each collective that has a Ring.
    pub fn is_ring_only(&self) -> bool {
        self.ring_only
    }

    fn row(&self, collective: Collective, bytes: u64) -> Option<&Row> {
        // Rows are sorted by collective and size: take the last that starts at or below `bytes`.
        let above = self.rows.partition_point(|row| {
            (row.collective as i32, row.from_bytes) <= (collective as i32, bytes)
        });
        let row = self.rows.get(above.checked_sub(1)?)?;
        (row.collective == collective && bytes <= row.to_bytes).then_some(row)
    }

    fn is_new(&self, collective: Collective, bytes: u64) -> bool {
        let bit = 1_u64 << (u64::BITS - 1 - bytes.max(1).leading_zeros());
        // Relaxed: the bit decides only whether a line is logged, and orders nothing else.
        self.logged_sizes[collective as usize].fetch_or(bit, Ordering::Relaxed) & bit == 0
    }
}

/// If Ring is enabled, makes every other algorithm a last resort and returns true. Otherwise
/// changes nothing and returns false.
fn disfavour_all_but_ring(costs: &mut Costs) -> bool {
    let ring = Algorithm::Ring as usize;
    let has_ring = costs[ring * PROTOCOLS..(ring + 1) * PROTOCOLS]
        .iter()
        .any(|cost| *cost >= 0.0);
    for (algorithm, row) in costs
        .chunks_exact_mut(PROTOCOLS)
        .enumerate()
        .filter(|_| has_ring)
    {
        for cost in row
            .iter_mut()
            .filter(|cost| **cost >= 0.0 && algorithm != ring)
        {
            *cost = NOT_RING_US;
        }
    }
    has_ring
}

/// Makes LL128 a last resort where it is enabled.
fn disfavour_ll128(costs: &mut Costs) {
    for row in costs.chunks_exact_mut(PROTOCOLS) {
        let cost = &mut row[Protocol::Ll128 as usize];
        if *cost >= 0.0 {
            *cost = LAST_RESORT_US;
        }
    }
}

#[cfg(test)]
mod tests;
