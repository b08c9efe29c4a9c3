//! `nccl-spark settings`: the plugin's settings and their current values.

use crate::output;
use anyhow::Result;
use host::config::{self, SettingRow, Settings, Source};
use host::rails::wrapped;
use std::io::Write;

const INDENT: &str = "    ";

/// Returns a setting's default as text: `unset` if the plugin chooses the value.
pub fn default_text(row: &SettingRow) -> &'static str {
    if row.default.is_empty() {
        "unset"
    } else {
        row.default
    }
}

/// Prints the default and meaning of every setting, and its current value if it is not the default.
///
/// # Errors
/// A setting is not valid, or `out` cannot be written.
pub fn show(mut out: impl Write) -> Result<()> {
    let settings = Settings::of_this_process();
    for (index, row) in config::table().iter().enumerate() {
        writeln!(out, "{} [default: {}]", row.name, default_text(row))?;
        write!(
            out,
            "{}",
            wrapped(output::columns(), INDENT, &format!("{INDENT}{}", row.doc))
        )?;
        let held = settings
            .as_ref()
            .ok()
            .and_then(|settings| settings.in_effect().get(index));
        match held.map(|held| (&held.value, &held.source)) {
            Some((value, Source::Environment)) => {
                writeln!(out, "    current value: {value} (environment)")?
            }
            Some((value, Source::File { path, line })) => {
                writeln!(
                    out,
                    "    current value: {value} ({}, line {line})",
                    path.display()
                )?;
            }
            _ => {}
        }
    }
    out.flush()?;
    // The error follows the table, which helps to correct the setting.
    settings.map(|_| ()).map_err(Into::into)
}
