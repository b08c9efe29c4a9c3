//! Puts the table into the settings file of every machine: here, or by a process on each that mpirun starts.

use super::options::Plan;
use crate::lines;
use crate::nccl_tests::options::Place;
use crate::seats;
use crate::tune::keep::{self, Pair};
use anyhow::{Context, Result, bail};
use nccl_net_spark::tuner::table::Table;
use nix::unistd::geteuid;
use std::io::Write;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

/// What the hidden command is told.
#[derive(Debug, clap::Args)]
pub struct Task {
    /// The table; without one, the file's is taken out.
    #[arg(long)]
    table: Option<Table>,
    /// The comment above it.
    #[arg(long, default_value = "")]
    remark: String,
    /// The file [default: as for tune collectives].
    #[arg(long)]
    output: Option<PathBuf>,
}

/// What launchers call a process's number among those of the job on its machine.
const LOCAL_RANK: [&str; 4] = ["OMPI_COMM_WORLD_LOCAL_RANK", "MPI_LOCALRANKID", "PMI_LOCAL_RANK", "SLURM_LOCALID"];

impl Task {
    /// Writes the file, unless another process of the job does so on this machine. Where the launcher does not tell, several write
    /// the same: each replaces the file whole.
    ///
    /// # Errors
    /// When the file cannot be written.
    pub fn run(self, lookup: &dyn Fn(&str) -> Option<String>, out: &mut impl Write) -> Result<()> {
        let local_rank = LOCAL_RANK.iter().find_map(|name| lookup(name));
        if local_rank.is_some_and(|rank| rank != "0") {
            return Ok(());
        }
        let host = seats::host();
        let file = keep::place(self.output, lookup(keep::SETTINGS_FILE), geteuid().is_root())?;
        for line in put(&file, self.table.as_ref(), &self.remark).with_context(|| host.clone())? {
            writeln!(out, "# {host}: {line}")?;
        }
        Ok(out.flush()?)
    }
}

/// Writes the table into the file of every machine, or takes it out of them.
///
/// # Errors
/// When a file cannot be written.
pub fn everywhere(plan: &Plan, own: &Path, table: Option<&Table>, remark: &str, out: &mut impl Write) -> Result<()> {
    let Place::Hosts(arguments) = &plan.tests.place else {
        for line in put(&plan.file, table, remark)? {
            writeln!(out, "# {line}")?;
        }
        return Ok(out.flush()?);
    };
    let mut command = Command::new("mpirun");
    command.env("OMPI_ALLOW_RUN_AS_ROOT", "1").env("OMPI_ALLOW_RUN_AS_ROOT_CONFIRM", "1");
    command.args(arguments).arg(own).args(["tune-collectives-write", "--remark", remark]);
    if let Some(table) = table {
        command.arg("--table").arg(table.to_string());
    }
    if let Some(output) = &plan.output {
        command.arg("--output").arg(std::path::absolute(output).context("make the path absolute")?);
    }
    command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped());
    let mut child = [command.spawn().context("start mpirun")?];
    let mut others = Vec::new();
    let ends = lines::follow(&mut child, Vec::new(), plan.tests.setting.timeout, |_, line| {
        match line.starts_with("# ") {
            true => writeln!(out, "{}", line.trim_end())?,
            false => others.push(line.trim().to_owned()),
        }
        Ok(())
    })?;
    out.flush()?;
    let said =
        others.iter().find(|line| line.starts_with("nccl-spark: ")).or(others.iter().find(|line| !line.is_empty()));
    let said = said.map_or("mpirun said nothing", |line| line.trim_start_matches("nccl-spark: "));
    match ends.map(|ends| ends[0].code()) {
        Some(Some(0)) => Ok(()),
        Some(_) => bail!("the settings file was not written on every host: {said}"),
        None => bail!(
            "the settings file was not written on every host within {} s (-T)",
            plan.tests.setting.timeout.as_secs()
        ),
    }
}

fn put(file: &Path, table: Option<&Table>, remark: &str) -> Result<Vec<String>> {
    let pair: Option<[Pair; 1]> = table.map(|table| [(keep::TUNER_TABLE, table.to_string())]);
    keep::keep(file, &keep::TABLE, pair.as_ref().map(|pair| &pair[..]), remark)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn one_process_of_a_machine_writes() {
        let folder = tempfile::tempdir().unwrap();
        let file = folder.path().join("spark.conf");
        let text = "for=*;all_reduce@2:1-9=ring/ll/2";
        let run = |rank: Option<&str>, table: Option<&str>| {
            let task = Task {
                table: table.map(|text| text.parse().unwrap()),
                remark: "1.1 times".into(),
                output: Some(file.clone()),
            };
            let mut out = Vec::new();
            let lookup = |name: &str| rank.filter(|_| name == "OMPI_COMM_WORLD_LOCAL_RANK").map(str::to_owned);
            task.run(&lookup, &mut out).unwrap();
            String::from_utf8(out).unwrap()
        };
        assert_eq!(run(Some("1"), Some(text)), "");
        assert!(!file.exists());
        for rank in [Some("0"), None] {
            let said = run(rank, Some(text));
            assert!(said.starts_with(&format!("# {}: ", seats::host())), "{said}");
            let expected = format!("# nccl-spark tune collectives: 1.1 times\nNCCL_SPARK_TUNER_TABLE={text}\n");
            assert_eq!(std::fs::read_to_string(&file).unwrap(), expected);
        }
        run(Some("0"), None);
        assert_eq!(std::fs::read_to_string(&file).unwrap(), "");
    }
}
