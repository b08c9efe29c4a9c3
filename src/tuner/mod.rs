//! Which algorithm, protocol and number of channels NCCL takes for a collective, where its own model chooses badly.
//!
//! NCCL's cost model knows nothing of a wire like a Spark's: measured on a twin of one, its choice for 32 KB to 4 MB takes up to 3.4 times
//! as long as the best one (docs/evidence/tuner.md). NCCL asks a tuner for each collective; this one answers from a table.
//!
//! **Every rank must decide alike, or the job hangs**: one rank in LL and its peer in Simple wait for each other. So a decision rests on
//! what is the same everywhere: the collective, the number of ranks and nodes, the bytes, the table. What a host decides for itself
//! (whether the tuner acts, and by which table) is a [`Policy`]; its hash is in the handshake of each connection, which refuses a peer
//! with another one (`comm/setup/negotiate.rs`).
//!
//! Promises: an entry of NCCL's cost table that is disabled (negative) stays so; nothing is changed where no row holds; a decision
//! allocates nothing and takes no lock. It is pure: no I/O, no environment, no clock. The C side is `abi/tuner_*`.

#![forbid(unsafe_code)]

pub mod communicators;
pub mod shipped;
pub mod table;

use std::fmt::{self, Display};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use table::{Algorithm, Collective, Fingerprint, Protocol, Row, Table};

/// What `NCCL_SPARK_TUNER` asks for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Mode {
    /// Acts on a GB10.
    Auto,
    /// Acts on any GPU.
    On,
    /// Never acts.
    Off,
}

/// What a host decides for itself before any communicator asks.
#[derive(Debug, Clone)]
pub enum Policy {
    /// The tuner leaves all to NCCL.
    Inert {
        /// Why, in words.
        reason: String,
    },
    /// The tuner decides by these rules.
    Acting(Arc<Rules>),
}

/// By what the tuner decides.
#[derive(Debug, PartialEq, Eq)]
pub struct Rules {
    /// Where the rows come from.
    pub origin: Origin,
    rows: Vec<Row>,
    ll128: bool,
    ring_only: bool,
}

/// Where rows come from.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Origin {
    /// With the plugin.
    Shipped,
    /// From `nccl-spark tune`, by a setting.
    Learned,
    /// There are none: the machine is not one that they were measured for.
    None,
}

/// What a [`Policy`] is made from.
#[derive(Debug, Clone)]
pub struct Facts {
    /// `NCCL_SPARK_TUNER`.
    pub mode: Mode,
    /// `NCCL_SPARK_TUNER_TABLE`.
    pub learned: Option<Table>,
    /// `NCCL_SPARK_LL128`: whether LL128 may be chosen.
    pub ll128: bool,
    /// `NCCL_SPARK_RING_TCP`: whether some peers may be reached by TCP alone; Ring keeps to neighbours.
    pub ring_tcp: bool,
    /// `NCCL_NET`, where it is set: NCCL brings this network up and then uses another one.
    pub network: Option<String>,
    /// `NCCL_TUNER_PLUGIN`, where it is set: NCCL loads this tuner, or none.
    pub tuner_plugin: Option<String>,
    /// What this host is, as a learned table names it ([`Fingerprint::new`]).
    pub host: Fingerprint,
}

/// The GPU of a DGX Spark, as CUDA calls it.
const GB10: &str = "GB10";

impl Policy {
    /// What `facts` come to, with warnings for the user.
    pub fn new(facts: Facts) -> (Self, Vec<String>) {
        let Facts { mode, learned, ll128, ring_tcp, network, tuner_plugin, host } = facts;
        let inert = |reason: String| (Self::Inert { reason }, Vec::new());
        // The user's will, and not without a word where messages may take a slow way by it.
        let inert_by_wish = |reason: String| {
            let warning = format!(
                "NCCL_SPARK_RING_TCP=1 without this plugin's tuner ({reason}): NCCL may choose algorithms that use TCP; set NCCL_ALGO=Ring"
            );
            (Self::Inert { reason }, if ring_tcp { vec![warning] } else { Vec::new() })
        };
        if mode == Mode::Off {
            return inert_by_wish("NCCL_SPARK_TUNER=off".to_owned());
        }
        let has_rows = mode == Mode::On || host.gpu.contains(GB10);
        if !has_rows && !ring_tcp {
            return inert(format!("the GPU is {}, not a {GB10} (NCCL_SPARK_TUNER=on overrides this)", host.gpu));
        }
        if let Some(other) = network.filter(|name| !name.eq_ignore_ascii_case("Spark")) {
            return inert(format!("NCCL_NET={other} selects another network"));
        }
        if let Some(other) = tuner_plugin.filter(|name| !name.contains("spark")) {
            return inert_by_wish(format!("NCCL_TUNER_PLUGIN={other} selects another tuner or none"));
        }
        let mut warnings = Vec::new();
        let mut chosen = if has_rows { (Origin::Shipped, shipped::rows()) } else { (Origin::None, Vec::new()) };
        if let Some(table) = learned.filter(|_| has_rows) {
            let learned_on = table.fingerprint();
            let is_for = |of: &Fingerprint| (of.gpu == host.gpu) && (of.nccl == host.nccl);
            if learned_on.is_none_or(is_for) {
                chosen = (Origin::Learned, table.rows().to_vec());
            }
            if let Some(of) = learned_on.filter(|of| **of != host) {
                // A port that is down on one host must not keep its jobs from starting, as another table than the peer's would.
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
        (Self::Acting(Arc::new(Rules { origin, rows, ll128, ring_only: ring_tcp })), warnings)
    }

    /// A number that is the same on two hosts exactly if they decide alike.
    pub fn hash(&self) -> u64 {
        match self {
            Self::Inert { .. } => 0,
            Self::Acting(rules) => rules.hash(),
        }
    }

    /// Who decides for a communicator of `ranks` ranks on `nodes` nodes; `is_ours` says whether this network carries it.
    pub fn tuner(&self, ranks: usize, nodes: usize, is_ours: bool) -> Tuner {
        let inert = |reason: &str| Tuner::Inert { reason: reason.to_owned() };
        let rules = match self {
            Self::Inert { reason } => return inert(reason),
            Self::Acting(rules) => rules,
        };
        if !is_ours {
            return inert("the communicator uses another network, or shares its parent's resources");
        }
        if nodes < 2 {
            return inert("the communicator is on one node");
        }
        // Of two nodes each reaches the other by the same connections, whatever the algorithm.
        let ring_only = rules.ring_only && nodes > 2;
        let is_for_rows = ranks == nodes;
        if !is_for_rows && !ring_only {
            return inert("the communicator has more than one rank on a node");
        }
        let is_for = |row: &&Row| is_for_rows && row.ranks == ranks;
        let rows: Vec<Row> = rules.rows.iter().filter(is_for).copied().collect();
        // Where rows do not hold, nothing is known of LL128 either.
        let ll128 = rules.ll128 || !is_for_rows;
        if rows.is_empty() && ll128 && !ring_only {
            return Tuner::Inert { reason: format!("the table has no row for {ranks} ranks") };
        }
        Tuner::Acting(Acting { rows, ll128, ring_only, told: Default::default() })
    }
}

impl Display for Policy {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Inert { reason } => write!(f, "off: {reason}"),
            Self::Acting(rules) => {
                let origin = match rules.origin {
                    Origin::Shipped => "shipped",
                    Origin::Learned => "learned",
                    Origin::None => "empty",
                };
                let ll128 = if rules.ll128 { "" } else { ", no LL128" };
                let ring = if rules.ring_only { ", Ring only above two nodes (NCCL_SPARK_RING_TCP)" } else { "" };
                write!(f, "{origin} table of {} rows{ll128}{ring}, hash {:016x}", rules.rows.len(), rules.hash())
            }
        }
    }
}

impl Rules {
    /// FNV-1a (64 bits) over the rules' text: it must come out alike in every build.
    fn hash(&self) -> u64 {
        let rows: String = self.rows.iter().map(|row| format!("{row};")).collect();
        let ring_only = if self.ring_only { "ring;" } else { "" };
        let text = format!("{DECISION};ll128={};{ring_only}{rows}", self.ll128);
        let step = |hash: u64, byte: u8| (hash ^ u64::from(byte)).wrapping_mul(0x0000_0100_0000_01b3);
        // 0 stands for a tuner that leaves all to NCCL.
        text.bytes().fold(0xcbf2_9ce4_8422_2325, step).max(1)
    }
}

/// Changes when the same table leads to other decisions, so that two builds that decide differently refuse each other.
const DECISION: u32 = 2;

/// Decides for one communicator.
#[derive(Debug)]
pub enum Tuner {
    /// Leaves all to NCCL.
    Inert {
        /// Why, in words.
        reason: String,
    },
    /// Decides.
    Acting(Acting),
}

/// Rows for one communicator.
#[derive(Debug)]
pub struct Acting {
    /// Of its number of ranks.
    rows: Vec<Row>,
    ll128: bool,
    ring_only: bool,
    /// Bit `n`: a decision for this collective and sizes of `n` bits was told to the log.
    told: [AtomicU64; Collective::ALL.len()],
}

/// NCCL's table of costs for one collective: `costs[algorithm * PROTOCOLS + protocol]`, in microseconds, negative where disabled.
pub type Costs = [f32; ALGORITHMS * PROTOCOLS];
/// Algorithms in NCCL's table (`NCCL_NUM_ALGORITHMS`, 2.27 to 2.30); with another number nothing is decided.
pub const ALGORITHMS: usize = 7;
/// Protocols in NCCL's table (`NCCL_NUM_PROTOCOLS`).
pub const PROTOCOLS: usize = 3;

/// A cost that NCCL takes only where nothing else is left: it chooses among entries below an hour (3.6e9, `topoGetAlgoInfo`).
const LAST_RESORT_US: f32 = 1.0e9;
/// One that it takes after that.
const NOT_RING_US: f32 = 2.0e9;

impl Tuner {
    /// Changes NCCL's costs so that it chooses as the table says; the number of channels where a row decided. `collective` is
    /// NCCL's number, `bytes` its count. Rows were measured with one collective at a time. NCCL asks once for the members of a group, with
    /// the sum of their bytes; where `tasks_per_channel` shows a group (it is 2 or more for one with more members than the
    /// communicator has channels), it is left to NCCL. Where only Ring is offered, every other algorithm is a last resort for whatever has
    /// a Ring, and rows that choose another do not hold.
    pub fn decide(&self, collective: i32, bytes: u64, tasks_per_channel: i32, costs: &mut Costs) -> Option<u32> {
        let Self::Acting(acting) = self else { return None };
        if !acting.ll128 {
            keep_from_ll128(costs);
        }
        let is_ring_only = acting.ring_only && keep_to_ring(costs);
        let collective = Collective::of_number(collective)?;
        let row = acting.row(collective, bytes).filter(|_| tasks_per_channel <= 1)?;
        if is_ring_only && row.choice.algorithm != Algorithm::Ring {
            return None;
        }
        let place = row.choice.algorithm.number() * PROTOCOLS + row.choice.protocol.number();
        let is_allowed = costs[place] >= 0.0;
        if acting.is_new(collective, bytes) {
            let what = if is_allowed { "" } else { ", disabled by NCCL: not applied" };
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
    /// Whether it offers NCCL only Ring, where a collective has one.
    pub fn is_ring_only(&self) -> bool {
        self.ring_only
    }

    fn row(&self, collective: Collective, bytes: u64) -> Option<&Row> {
        // Sorted by collective and size: the last that begins at or before `bytes`.
        let above = self.rows.partition_point(|row| (row.collective, row.from_bytes) <= (collective, bytes));
        let row = self.rows.get(above.checked_sub(1)?)?;
        (row.collective == collective && bytes <= row.to_bytes).then_some(row)
    }

    /// Whether this collective and size class was not asked about before.
    fn is_new(&self, collective: Collective, bytes: u64) -> bool {
        let bit = 1_u64 << (u64::BITS - 1 - bytes.max(1).leading_zeros());
        // Relaxed: it decides only whether a line is logged once or twice.
        self.told[collective.number()].fetch_or(bit, Ordering::Relaxed) & bit == 0
    }
}

/// Makes every algorithm but Ring a last resort, where Ring is allowed for the collective at all; whether it is.
fn keep_to_ring(costs: &mut Costs) -> bool {
    let ring = Algorithm::Ring.number();
    let has_ring = costs[ring * PROTOCOLS..(ring + 1) * PROTOCOLS].iter().any(|cost| *cost >= 0.0);
    for (algorithm, row) in costs.chunks_exact_mut(PROTOCOLS).enumerate().filter(|_| has_ring) {
        for cost in row.iter_mut().filter(|cost| **cost >= 0.0 && algorithm != ring) {
            *cost = NOT_RING_US;
        }
    }
    has_ring
}

/// Makes LL128 the last resort where it is allowed at all.
fn keep_from_ll128(costs: &mut Costs) {
    for row in costs.chunks_exact_mut(PROTOCOLS) {
        let cost = &mut row[Protocol::Ll128.number()];
        if *cost >= 0.0 {
            *cost = LAST_RESORT_US;
        }
    }
}

#[cfg(test)]
mod tests;
