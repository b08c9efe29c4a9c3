//! A tuner's table and its text form for settings. It maps a collective of a given size to an
//! algorithm, a protocol and a number of channels.
//!
//! ```text
//! for=NVIDIA_GB10/4x224054/2.28.9;all_reduce@2:24577-49152=ring/ll/2;all_gather@2:1-4096=ring/ll/1
//! ```
//!
//! `for=` names the GPU, rails and NCCL version of the host that the table was measured on; a table
//! with `for=*` is for every host. Each row names a collective, a number of ranks, the first and
//! last size in bytes, and the choice. Sizes are those of the whole buffer, as NCCL counts them.

use std::fmt;
use std::str::FromStr;
use strum::{Display, EnumString, FromRepr, VariantNames};

/// Largest number of ranks that a row may name: no table has been measured for more. The smallest
/// number is 2, because one rank needs no network.
pub const MAX_RANKS: usize = 64;
/// Largest number of channels that a row may choose: NCCL's maximum (`MAXCHANNELS`).
pub const MAX_CHANNELS: u32 = 64;
/// Largest number of rows in a table.
pub const MAX_ROWS: usize = 512;

/// A collective that NCCL passes to a tuner (`ncclFunc_t`, nccl_common.h).
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Display, EnumString, FromRepr, VariantNames)]
#[strum(serialize_all = "snake_case")]
#[strum(parse_err_ty = String, parse_err_fn = unknown_word::<Collective>)]
#[repr(i32)]
pub enum Collective {
    /// From one rank to all.
    Broadcast = 0,
    /// From all ranks to one.
    Reduce = 1,
    /// Every rank's part to all.
    AllGather = 2,
    /// A part of the sum to each rank.
    ReduceScatter = 3,
    /// The sum to all ranks.
    AllReduce = 4,
}

/// An algorithm for a row (`NCCL_ALGO_*`). Other algorithms need hardware that a Spark lacks.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Display, EnumString, VariantNames)]
#[strum(serialize_all = "snake_case")]
#[strum(parse_err_ty = String, parse_err_fn = unknown_word::<Algorithm>)]
pub enum Algorithm {
    /// Two trees.
    Tree = 0,
    /// A ring.
    Ring = 1,
}

/// A protocol (`NCCL_PROTO_*`).
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Display, EnumString, VariantNames)]
#[strum(serialize_all = "snake_case")]
#[strum(parse_err_ty = String, parse_err_fn = unknown_word::<Protocol>)]
pub enum Protocol {
    /// Units of 8 bytes: 4 of data and 4 of flag.
    Ll = 0,
    /// Units of 128 bytes: 120 of data and 8 of flag.
    Ll128 = 1,
    /// Whole chunks of data, then a counter.
    Simple = 2,
}

/// The choice of a row.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Choice {
    /// The algorithm.
    pub algorithm: Algorithm,
    /// The protocol.
    pub protocol: Protocol,
    /// Channels, 1 to [`MAX_CHANNELS`]; NCCL uses no more than the communicator has.
    pub channels: u32,
}

/// One row: a choice for a range of sizes.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Row {
    /// Collective for which the row holds.
    pub collective: Collective,
    /// Number of ranks for which the row holds.
    pub ranks: usize,
    /// Smallest size in bytes for which the row holds.
    pub from_bytes: u64,
    /// Largest size in bytes for which the row holds.
    pub to_bytes: u64,
    /// The choice.
    pub choice: Choice,
}

/// Identity of the host that a table was measured on.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Fingerprint {
    /// Name of the GPU, from CUDA.
    pub gpu: String,
    /// Number of rails and their combined bandwidth in Mb/s, such as `4x224054`.
    pub rails: String,
    /// Version of NCCL, such as `2.28.9`.
    pub nccl: String,
}

/// A sorted table of rows that do not overlap.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Table {
    fingerprint: Option<Fingerprint>,
    rows: Vec<Row>,
}

impl Table {
    /// Creates a table for hosts with this fingerprint, or for all hosts.
    ///
    /// # Errors
    /// The reason as text: overlapping rows, a row out of range, or more than [`MAX_ROWS`].
    pub fn new(fingerprint: Option<Fingerprint>, mut rows: Vec<Row>) -> Result<Self, String> {
        if rows.len() > MAX_ROWS {
            return Err(format!("{} rows; {MAX_ROWS} are allowed", rows.len()));
        }
        rows.sort_by_key(|row| (row.collective as i32, row.ranks, row.from_bytes));
        for row in &rows {
            let channels = row.choice.channels;
            if !(2..=MAX_RANKS).contains(&row.ranks) {
                return Err(format!("row {row}: ranks must be 2 to {MAX_RANKS}"));
            }
            if !(1..=MAX_CHANNELS).contains(&channels) {
                return Err(format!("row {row}: channels must be 1 to {MAX_CHANNELS}"));
            }
            if row.from_bytes > row.to_bytes {
                return Err(format!("row {row}: the first size is above the last"));
            }
        }
        for pair in rows.windows(2) {
            let is_same =
                (pair[0].collective, pair[0].ranks) == (pair[1].collective, pair[1].ranks);
            if is_same && pair[1].from_bytes <= pair[0].to_bytes {
                return Err(format!("rows {} and {} overlap", pair[0], pair[1]));
            }
        }
        Ok(Self { fingerprint, rows })
    }

    /// Returns the fingerprint of the hosts that the table is for; `None` means all hosts.
    pub fn fingerprint(&self) -> Option<&Fingerprint> {
        self.fingerprint.as_ref()
    }

    /// Returns the rows, sorted by collective, ranks and size.
    pub fn rows(&self) -> &[Row] {
        &self.rows
    }
}

impl Fingerprint {
    /// Creates a fingerprint. Separators of the table's text become `_`.
    pub fn new(gpu: &str, rails: &str, nccl: &str) -> Self {
        Self {
            gpu: plain(gpu),
            rails: plain(rails),
            nccl: plain(nccl),
        }
    }
}

impl fmt::Display for Fingerprint {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}/{}/{}", self.gpu, self.rails, self.nccl)
    }
}

impl FromStr for Fingerprint {
    type Err = String;
    fn from_str(text: &str) -> Result<Self, String> {
        match text.split('/').collect::<Vec<_>>()[..] {
            [gpu, rails, nccl] if ![gpu, rails, nccl].contains(&"") => {
                Ok(Self::new(gpu, rails, nccl))
            }
            _ => Err(format!(
                "for={} is not GPU/RAILS/NCCL, as in NVIDIA_GB10/4x224054/2.28.9",
                quoted(text)
            )),
        }
    }
}

fn plain(text: &str) -> String {
    text.replace([' ', '/', ';', '=', '\t'], "_")
}

impl fmt::Display for Choice {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}/{}/{}", self.algorithm, self.protocol, self.channels)
    }
}

impl FromStr for Choice {
    type Err = String;
    fn from_str(text: &str) -> Result<Self, String> {
        let [algorithm, protocol, channels] = text.split('/').collect::<Vec<_>>()[..] else {
            return Err(format!(
                "{} is not ALGORITHM/PROTOCOL/CHANNELS, as in ring/ll/2",
                quoted(text)
            ));
        };
        let channels = channels
            .parse()
            .map_err(|_| format!("{} is not a number of channels", quoted(channels)))?;
        Ok(Self {
            algorithm: algorithm.parse()?,
            protocol: protocol.parse()?,
            channels,
        })
    }
}

impl fmt::Display for Row {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self {
            collective,
            ranks,
            from_bytes,
            to_bytes,
            choice,
        } = self;
        write!(f, "{collective}@{ranks}:{from_bytes}-{to_bytes}={choice}")
    }
}

impl FromStr for Row {
    type Err = String;
    fn from_str(text: &str) -> Result<Self, String> {
        let parts = || {
            let (collective, rest) = text.split_once('@')?;
            let (ranks, rest) = rest.split_once(':')?;
            let (sizes, choice) = rest.split_once('=')?;
            let (from, to) = sizes.split_once('-')?;
            Some((collective, ranks, from, to, choice))
        };
        let (collective, ranks, from, to, choice) =
            parts().ok_or("not a row, as in all_reduce@2:24577-49152=ring/ll/2")?;
        let number = |text: &str| {
            text.parse::<u64>()
                .map_err(|_| format!("{} is not a number", quoted(text)))
        };
        Ok(Self {
            collective: collective.parse()?,
            ranks: number(ranks)? as usize,
            from_bytes: number(from)?,
            to_bytes: number(to)?,
            choice: choice.parse()?,
        })
    }
}

impl fmt::Display for Table {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match &self.fingerprint {
            Some(fingerprint) => write!(f, "for={fingerprint}")?,
            None => f.write_str("for=*")?,
        }
        self.rows.iter().try_for_each(|row| write!(f, ";{row}"))
    }
}

impl FromStr for Table {
    type Err = String;
    fn from_str(text: &str) -> Result<Self, String> {
        let mut parts = text.trim().trim_end_matches(';').split(';').map(str::trim);
        let head = parts.next().and_then(|head| head.strip_prefix("for="));
        let fingerprint = match head {
            None => return Err("a table must begin with for=GPU/RAILS/NCCL, or for=*".to_owned()),
            Some("*") => None,
            Some(text) => Some(text.parse()?),
        };
        let row = |(index, text): (usize, &str)| {
            text.parse()
                .map_err(|why| format!("row {} ({}): {why}", index + 1, quoted(text)))
        };
        Self::new(
            fingerprint,
            parts.enumerate().map(row).collect::<Result<_, _>>()?,
        )
    }
}

fn unknown_word<T: VariantNames>(text: &str) -> String {
    format!("{} is not one of {}", quoted(text), T::VARIANTS.join(", "))
}

fn quoted(text: &str) -> String {
    const MOST: usize = 60;
    let start: String = text.chars().take(MOST).collect();
    if start.len() == text.len() {
        format!("{text:?}")
    } else {
        format!("{start:?}...")
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn a_table_survives_printing_and_parsing() {
        let text = "for=NVIDIA_GB10/4x224054/2.28.9;all_gather@2:1-4096=ring/ll/1;all_reduce@2:24577-49152=ring/ll128/2;\
                    all_reduce@2:49153-98304=tree/simple/4";
        let table: Table = text.parse().unwrap();
        assert_eq!(
            (table.to_string(), table.rows().len()),
            (text.to_owned(), 3)
        );
        assert_eq!(table.fingerprint().unwrap().gpu, "NVIDIA_GB10");
        let any: Table = " for=*; all_reduce@3:0-18446744073709551615=ring/simple/64; "
            .parse()
            .unwrap();
        assert_eq!(
            any.to_string(),
            "for=*;all_reduce@3:0-18446744073709551615=ring/simple/64"
        );
    }

    #[test]
    fn a_fingerprint_is_one_word_for_any_gpu_name() {
        let named = Fingerprint::new("NVIDIA GB10; a/b", "4x224054", "2.28.9");
        assert_eq!(named.to_string(), "NVIDIA_GB10__a_b/4x224054/2.28.9");
        assert_eq!(
            named
                .to_string()
                .parse::<Fingerprint>()
                .unwrap()
                .to_string(),
            named.to_string()
        );
    }

    #[test]
    fn text_that_is_no_table_is_refused_with_an_error() {
        for (text, words) in [
            ("", "must begin with for="),
            ("all_reduce@2:1-2=ring/ll/1", "must begin with for="),
            ("for=a/b", "GPU/RAILS/NCCL"),
            ("for=*;all_reduce", "row 1 (\"all_reduce\"): not a row"),
            (
                "for=*;all_to_all@2:1-2=ring/ll/1",
                "is not one of broadcast, reduce",
            ),
            (
                "for=*;all_reduce@2:1-2=nvls/ll/1",
                "is not one of tree, ring",
            ),
            (
                "for=*;all_reduce@2:1-2=ring/ll129/1",
                "is not one of ll, ll128, simple",
            ),
            (
                "for=*;all_reduce@2:1-2=ring/ll",
                "ALGORITHM/PROTOCOL/CHANNELS",
            ),
            (
                "for=*;all_reduce@2:1-2=ring/ll/0",
                "channels must be 1 to 64",
            ),
            (
                "for=*;all_reduce@2:1-2=ring/ll/65",
                "channels must be 1 to 64",
            ),
            ("for=*;all_reduce@1:1-2=ring/ll/1", "ranks must be 2 to 64"),
            ("for=*;all_reduce@2:3-2=ring/ll/1", "above the last"),
            (
                "for=*;all_reduce@2:1-8=ring/ll/1;all_reduce@2:8-9=ring/ll/1",
                "overlap",
            ),
            ("for=*;all_reduce@2:x-9=ring/ll/1", "\"x\" is not a number"),
        ] {
            let told = text.parse::<Table>().unwrap_err();
            assert!(told.contains(words), "{text}: {told}");
        }
    }

    proptest! {
        #[test]
        fn any_text_is_parsed_or_refused(text in "(for=[*])?[;@:=/a-z0-9_-]{0,60}") {
            if let Ok(table) = text.parse::<Table>() {
                prop_assert_eq!(table.to_string().parse::<Table>().unwrap(), table);
            }
        }
    }
}
