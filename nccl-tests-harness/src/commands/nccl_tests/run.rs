//! One run of a program of nccl-tests: the table is read from the program's output, the network and
//! its channels from NCCL's log.

use super::mpirun;
use super::options::{Call, Conditions};
use super::printed_table::{PrintedTable, Read, Row};
use crate::scene::Scene;
use crate::scene::network::{Channels, Network, Used};
use anyhow::{Result, ensure};
use std::fmt;
use std::path::Path;

/// Does `call` and returns the rows of its table (1 or more). `own` is this program's file, `who`
/// names the run in the log that the user keeps. `hear` gets each line that the ranks print, and
/// the text to show for it: a complete row of the table, or another line of the program's own.
///
/// # Errors
/// A program that does not start, that fails, or that prints no whole table, and fewer channels
/// than NCCL chooses on a Spark.
pub fn run(
    call: &Call<'_>,
    scene: &Scene,
    network: Network,
    environment: &[(String, String)],
    (own, who): (&Path, &str),
    used: &mut Used,
    mut hear: impl FnMut(&str, Option<&str>) -> Result<()>,
) -> Result<Vec<Row>> {
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
    mpirun::check(end, call, used.complaints(), &last)?;
    table.finish()?;
    ensure!(!table.rows.is_empty(), "the program printed no table; its last line: {last}");
    Ok(table.rows)
}

/// Returns the network that NCCL used, in words.
///
/// # Errors
/// Another network than `network`, or a log without the channels where they count.
pub fn check_network(conditions: &Conditions, network: Network, used: &Used) -> Result<String> {
    let words = used.judge(network, conditions.setting.abi)?;
    match used.channels() {
        None if needs_channels(conditions, network) => Err(ChannelsUnlikeSpark(None).into()),
        _ => Ok(words),
    }
}

fn needs_channels(conditions: &Conditions, network: Network) -> bool {
    conditions.needs_spark_channels() && network.is_plugin()
}

/// The fewest collective channels that NCCL chooses on a DGX Spark: 16 over this plugin with one
/// cable (200,000 Mb/s), 18 with two (224,054 Mb/s).
const SPARK_CHANNELS: u32 = 16;

/// NCCL chose fewer channels than on a Spark: this number, or none if its log does not say.
#[derive(Debug)]
pub struct ChannelsUnlikeSpark(Option<u32>);

impl std::error::Error for ChannelsUnlikeSpark {}

impl fmt::Display for ChannelsUnlikeSpark {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.0 {
            Some(count) => write!(f, "NCCL chose {count} collective channels")?,
            None => write!(f, "NCCL's log does not say how many collective channels it chose")?,
        }
        write!(
            f,
            "; on a DGX Spark it chooses {SPARK_CHANNELS} or more. Their number decides how large messages are and \
             which protocol is used at which size, so the results would not be those of a Spark. --allow-few-channels \
             measures anyway"
        )
    }
}

/// Checks that NCCL chose as many channels as on a Spark.
fn check_channels(channels: &Channels) -> Result<(), ChannelsUnlikeSpark> {
    match channels.collective {
        few if few < SPARK_CHANNELS => Err(ChannelsUnlikeSpark(Some(few))),
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
