//! What the plugin knows of this machine and of its settings.

use anyhow::Result;
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

/// Prints every setting.
///
/// # Errors
/// When `out` cannot be written.
pub fn settings(mut out: impl Write) -> Result<()> {
    for row in nccl_net_spark::config::table() {
        let default = if row.default.is_empty() { "chosen by the plugin" } else { row.default };
        writeln!(out, "{} [default: {default}]\n    {}", row.name, row.doc)?;
    }
    Ok(out.flush()?)
}
