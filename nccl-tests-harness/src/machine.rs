//! What the plugin finds on this machine, and its settings.

use anyhow::Result;
use nccl_net_spark::config::{self, Settings, Source};
use std::io::Write;

/// Prints which RoCE ports are rails, which are not, and why.
///
/// # Errors
/// When the machine cannot be looked at, or `out` not be written.
pub fn rails(mut out: impl Write) -> Result<()> {
    let survey = nccl_net_spark::plugin::survey()?;
    write!(out, "{}", nccl_net_spark::rails::report(&survey))?;
    Ok(out.flush()?)
}

/// Prints every setting: its default, its meaning, and its current value where that is not the default.
///
/// # Errors
/// When one is not valid, or `out` cannot be written.
pub fn settings(mut out: impl Write) -> Result<()> {
    let settings = Settings::of_this_process();
    for (index, row) in config::table().iter().enumerate() {
        let default = if row.default.is_empty() { "chosen by the plugin" } else { row.default };
        writeln!(out, "{} [default: {default}]\n    {}", row.name, row.doc)?;
        let held = settings.as_ref().ok().and_then(|settings| settings.held().get(index));
        match held.map(|held| (&held.value, &held.source)) {
            Some((value, Source::Environment)) => writeln!(out, "    current value: {value} (environment)")?,
            Some((value, Source::File { path, line })) => {
                writeln!(out, "    current value: {value} ({}, line {line})", path.display())?;
            }
            _ => {}
        }
    }
    out.flush()?;
    // After the table, which helps to correct the setting.
    settings.map(|_| ()).map_err(Into::into)
}
