//! One run of a program of nccl-tests: the table is read from what the program prints, the network and its channels from NCCL's log.

use super::mpirun::{self, End};
use super::options::{Call, Conditions};
use super::printed_table::{PrintedTable, Read, Row};
use crate::scene::Scene;
use crate::scene::network::{Channels, Network, Used};
use anyhow::{Result, ensure};
use std::fmt;
use std::path::Path;

/// The output of a run, without NCCL's log.
pub struct Printed {
    end: End,
    table: PrintedTable,
    /// The last line that is not part of the table.
    last: String,
}

/// Does `call`; `own` is this program's file, `who` names the run in the log that the user keeps. `hear` gets each line that
/// the ranks print, and the text to show for it: a complete row of the table, or another line of the program's own.
///
/// # Errors
/// When it cannot be started, its table cannot be read, or NCCL chose other channels than on a Spark.
pub fn run(
    call: &Call<'_>,
    scene: &Scene,
    network: Network,
    environment: &[(String, String)],
    (own, who): (&Path, &str),
    used: &mut Used,
    mut hear: impl FnMut(&str, Option<&str>) -> Result<()>,
) -> Result<Printed> {
    let (mut table, mut last) = (PrintedTable::default(), String::new());
    let end = mpirun::run(call, &scene.fabric, environment, own, |line| {
        scene.log(who, line.trim_end())?;
        let is_log = used.note(line);
        if needs_channels(call.conditions, network)
            && let Some(channels) = used.channels()
        {
            check_channels(channels)?;
        }
        let row = match table.read(line)? {
            Read::Row(row) => Some(row),
            Read::Part => None,
            Read::Other if is_log => None,
            Read::Other => {
                if !line.trim().is_empty() {
                    line.trim_end().clone_into(&mut last);
                }
                return hear(line, Some(line));
            }
        };
        hear(line, row.as_deref())
    })?;
    Ok(Printed { end, table, last })
}

impl Printed {
    /// The table's rows, one or more.
    ///
    /// # Errors
    /// When the program failed, or printed no whole table.
    pub fn rows(self, call: &Call<'_>, used: &Used) -> Result<Vec<Row>> {
        let Self { end, table, last } = self;
        mpirun::check(end, call, used.complaints(), &last)?;
        table.finish()?;
        ensure!(!table.rows.is_empty(), "the program printed no table; its last line: {last}");
        Ok(table.rows)
    }
}

/// The network that NCCL used, in words.
///
/// # Errors
/// When it is not `network`, or the log does not say which channels NCCL chose and they count.
pub fn check_network(conditions: &Conditions, network: Network, used: &Used) -> Result<String> {
    let words = used.judge(network, conditions.setting.abi)?;
    match used.channels() {
        None if needs_channels(conditions, network) => Err(ChannelsUnlikeSpark::Unknown.into()),
        _ => Ok(words),
    }
}

fn needs_channels(conditions: &Conditions, network: Network) -> bool {
    conditions.needs_spark_channels() && network.is_plugin()
}

/// Collective channels that NCCL chooses at least on a DGX Spark: 16 over this plugin with one cable (200,000 Mb/s), 18 with
/// two (224,054 Mb/s).
const SPARK_CHANNELS: u32 = 16;

/// NCCL's channels are not those that it chooses on a Spark.
#[derive(Debug)]
pub enum ChannelsUnlikeSpark {
    /// It chose so few.
    Few(u32),
    /// Its log does not say how many it chose.
    Unknown,
}

impl std::error::Error for ChannelsUnlikeSpark {}

impl fmt::Display for ChannelsUnlikeSpark {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Few(count) => write!(f, "NCCL chose {count} collective channels")?,
            Self::Unknown => write!(f, "NCCL's log does not say how many collective channels it chose")?,
        }
        write!(
            f,
            "; on a DGX Spark it chooses {SPARK_CHANNELS} or more. Their number decides how large messages are and \
             which protocol is used at which size, so the results would not be those of a Spark. --allow-few-channels \
             measures anyway"
        )
    }
}

/// Whether NCCL chose as many channels as on a Spark.
///
/// # Errors
/// When it chose fewer.
fn check_channels(channels: &Channels) -> Result<(), ChannelsUnlikeSpark> {
    match channels.collective {
        few if few < SPARK_CHANNELS => Err(ChannelsUnlikeSpark::Few(few)),
        _ => Ok(()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn few_channels_are_refused_with_the_reason_and_the_flag() {
        let channels = |collective| Channels { collective, text: String::new() };
        assert!(check_channels(&channels(16)).is_ok());
        let text = check_channels(&channels(15)).unwrap_err().to_string();
        for part in ["chose 15", "16 or more", "protocol", "--allow-few-channels"] {
            assert!(text.contains(part), "{part}: {text}");
        }
    }
}
