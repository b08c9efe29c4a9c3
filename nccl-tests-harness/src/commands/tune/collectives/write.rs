//! Writes the table into the settings file of every machine: directly on a single machine,
//! otherwise by processes that mpirun starts on all machines.
//!
//! All machines get the same table, because ranks with different tables refuse each other. The
//! table keeps the launching machine's older rows. If another machine had a different table, that
//! table is replaced and printed, so that the user can restore it.

use super::options::Plan;
use crate::commands::nccl_tests::options::Place;
use crate::commands::tune::keep;
use crate::lines;
use crate::ranks::placement;
use anyhow::{Context, Result, bail};
use proto::tuner::table::Table;
use std::io::Write;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

/// Options of the hidden command `tune-collectives-write`.
#[derive(Debug, clap::Args)]
pub struct Task {
    /// The table to write; without this option, the table in the file is removed.
    #[arg(long)]
    table: Option<Table>,
    /// The table that the launching machine had.
    #[arg(long)]
    before: Option<Table>,
    /// Text of the comment above the written table.
    #[arg(long, default_value = "")]
    remark: String,
    /// The file [default: as for tune collectives].
    #[arg(long)]
    output: Option<PathBuf>,
}

/// Variables in which launchers number a job's processes on one machine.
const LOCAL_RANK: [&str; 4] = [
    "OMPI_COMM_WORLD_LOCAL_RANK",
    "MPI_LOCALRANKID",
    "PMI_LOCAL_RANK",
    "SLURM_LOCALID",
];

impl Task {
    /// Writes the file, unless another process of the job writes it on this machine. If the
    /// launcher sets no variable of `LOCAL_RANK`, all processes on a machine write the file. This
    /// is harmless, because each process replaces the whole file by the same text.
    pub fn run(self, lookup: &dyn Fn(&str) -> Option<String>, out: &mut impl Write) -> Result<()> {
        let local_rank = LOCAL_RANK.iter().find_map(|name| lookup(name));
        if local_rank.is_some_and(|rank| rank != "0") {
            return Ok(());
        }
        let host = placement::local_host_name();
        let file = keep::place(self.output, lookup(keep::SETTINGS_FILE))?;
        for line in put(
            &file,
            self.table.as_ref(),
            self.before.as_ref(),
            &self.remark,
        )
        .with_context(|| host.clone())?
        {
            writeln!(out, "# {host}: {line}")?;
        }
        Ok(out.flush()?)
    }
}

/// Writes the table into the settings file of every machine. If `table` is `None`, removes the
/// table from these files.
pub fn everywhere(
    plan: &Plan,
    own: &Path,
    table: Option<&Table>,
    remark: &str,
    out: &mut impl Write,
) -> Result<()> {
    let Place::Hosts(arguments) = &plan.conditions.place else {
        for line in put(&plan.file, table, plan.before.as_ref(), remark)? {
            writeln!(out, "# {line}")?;
        }
        return Ok(out.flush()?);
    };
    let mut command = command(plan, arguments, own, table, remark)?;
    command
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped());
    let mut child = [command.spawn().context("start mpirun")?];
    let mut others = Vec::new();
    let ends = lines::follow(
        &mut child,
        Vec::new(),
        plan.conditions.setting.timeout,
        |_, line| {
            match line.starts_with("# ") {
                true => writeln!(out, "{}", line.trim_end())?,
                false => others.push(line.trim().to_owned()),
            }
            Ok(())
        },
    )?;
    out.flush()?;
    let reason = others
        .iter()
        .find(|line| line.starts_with("nccl-spark: "))
        .or(others.iter().find(|line| !line.is_empty()));
    let reason = reason.map_or("mpirun printed nothing", |line| {
        line.trim_start_matches("nccl-spark: ")
    });
    match ends.map(|ends| ends[0].code()) {
        Some(Some(0)) => Ok(()),
        Some(_) => bail!("the settings file was not written on every host: {reason}"),
        None => bail!(
            "the settings file was not written on every host within {} s (-T)",
            plan.conditions.setting.timeout.as_secs()
        ),
    }
}

fn command(
    plan: &Plan,
    arguments: &[String],
    own: &Path,
    table: Option<&Table>,
    remark: &str,
) -> Result<Command> {
    let mut command = Command::new("mpirun");
    command
        .env("OMPI_ALLOW_RUN_AS_ROOT", "1")
        .env("OMPI_ALLOW_RUN_AS_ROOT_CONFIRM", "1");
    command
        .args(arguments)
        .arg(own)
        .args(["tune-collectives-write", "--remark", remark]);
    for (option, table) in [("--table", table), ("--before", plan.before.as_ref())] {
        if let Some(table) = table {
            command.arg(option).arg(table.to_string());
        }
    }
    // mpirun does not pass on this environment, so a file named by a variable becomes an argument.
    if let Some(output) = &plan.output {
        command
            .arg("--output")
            .arg(std::path::absolute(output).context("make the path absolute")?);
    }
    Ok(command)
}

/// Writes the table into one file, or removes the file's table if `table` is `None`. `before` is
/// the previous table of the launching machine. Returns lines for the user.
fn put(
    file: &Path,
    table: Option<&Table>,
    before: Option<&Table>,
    remark: &str,
) -> Result<Vec<String>> {
    // Errors are ignored here, because `write_settings` reports a file that cannot be read.
    let old = keep::check(file)
        .ok()
        .and_then(|settings| settings.tuner.table);
    let pair = table.map(|table| (keep::TUNER_TABLE, table.to_string()));
    let mut lines = keep::write_settings(file, &keep::TABLE, pair.as_slice(), remark)?;
    if let Some(old) = old.filter(|old| ![before, table].contains(&Some(old))) {
        let verb = if table.is_some() {
            "replaced"
        } else {
            "removed"
        };
        lines.push(format!(
            "{verb} a different table of {} row(s) there: {old}",
            old.rows().len()
        ));
    }
    Ok(lines)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_different_table_of_another_machine_is_replaced_and_shown() {
        let folder = tempfile::tempdir().unwrap();
        let file = folder.path().join("spark.conf");
        let [mine, other, new] = ["ring/ll/1", "ring/ll/8", "ring/ll/2"]
            .map(|choice| format!("for=*;all_reduce@2:1-9={choice}"));
        let table = |text: &String| text.parse::<Table>().unwrap();
        let write = |old: Option<&String>, table: Option<&Table>, before: Option<&Table>| {
            std::fs::write(
                &file,
                old.map(|old| format!("NCCL_SPARK_TUNER_TABLE={old}\n"))
                    .unwrap_or_default(),
            )
            .unwrap();
            put(&file, table, before, "r").unwrap().join("; ")
        };
        let before = table(&mine);
        let written = table(&new);
        let output = write(Some(&other), Some(&written), Some(&before));
        assert!(
            output.contains(&format!(
                "replaced a different table of 1 row(s) there: {other}"
            )),
            "{output}"
        );
        assert!(
            std::fs::read_to_string(&file)
                .unwrap()
                .ends_with(&format!("NCCL_SPARK_TUNER_TABLE={new}\n"))
        );
        let output = write(Some(&other), None, None);
        assert!(
            output.contains(&format!(
                "removed a different table of 1 row(s) there: {other}"
            )),
            "{output}"
        );
        // No report is needed if the file had the launching machine's earlier table, the new table,
        // or none.
        for old in [Some(&mine), Some(&new), None] {
            let output = write(old, Some(&written), Some(&before));
            assert!(!output.contains("different"), "{output}");
        }
    }

    #[test]
    fn one_process_of_a_machine_writes() {
        let folder = tempfile::tempdir().unwrap();
        let file = folder.path().join("spark.conf");
        let text = "for=*;all_reduce@2:1-9=ring/ll/2";
        let run = |rank: Option<&str>, table: Option<&str>| {
            let task = Task {
                table: table.map(|text| text.parse().unwrap()),
                before: None,
                remark: "1.1 times".into(),
                output: Some(file.clone()),
            };
            let mut out = Vec::new();
            let lookup = |name: &str| {
                rank.filter(|_| name == "OMPI_COMM_WORLD_LOCAL_RANK")
                    .map(str::to_owned)
            };
            task.run(&lookup, &mut out).unwrap();
            String::from_utf8(out).unwrap()
        };
        assert_eq!(run(Some("1"), Some(text)), "");
        assert!(!file.exists());
        for rank in [Some("0"), None] {
            let output = run(rank, Some(text));
            assert!(
                output.starts_with(&format!("# {}: ", placement::local_host_name())),
                "{output}"
            );
            let expected = format!(
                "# nccl-spark tune collectives: 1.1 times\nNCCL_SPARK_TUNER_TABLE={text}\n"
            );
            assert_eq!(std::fs::read_to_string(&file).unwrap(), expected);
        }
        run(Some("0"), None);
        assert_eq!(std::fs::read_to_string(&file).unwrap(), "");
    }
}
