//! Runs the commands.

use super::{Cli, Command};
use crate::commands::collectives::rank::Collectives;
use crate::commands::collectives::{Collective, lead, options};
use crate::commands::doctor::{Ended, Verdict};
use crate::commands::memory::rank::Memory;
use crate::commands::{memory, nccl_tests, rails, settings, tune};
use crate::output::{self, report};
use crate::program::{self, Outcome, check_settings, variable, variables, world};
use crate::ranks::{launch, process};
use anyhow::Result;
use clap::CommandFactory;
use std::path::Path;

/// Exit status of the doctor if the plugin works here, but is slow or fragile. With `--hosts`, the
/// exit status if no order of ranks has a cable between all neighbours.
const IMPAIRED: u8 = 1;
/// Exit status of the doctor if the plugin does not work here.
const BROKEN: u8 = 3;

impl Command {
    pub fn execute(self) -> Result<Outcome> {
        let out = output::standard();
        let program = program::file()?;
        if self.starts_processes() {
            program::clean_up_on_signal()?;
        }
        match self {
            Self::AllGather(options) => collective(options, Collective::AllGather, &program),
            Self::AllReduce(options) => collective(options, Collective::AllReduce, &program),
            Self::ReduceScatter(options) => {
                collective(options, Collective::ReduceScatter, &program)
            }
            Self::Broadcast(options) => collective(options, Collective::Broadcast, &program),
            Self::AllToAll(options) => collective(options, Collective::AllToAll, &program),
            Self::SendRecv(options) => collective(options, Collective::SendRecv, &program),
            Self::Tune(options) => tune(*options, &program),
            Self::TuneCollectivesWrite(task) => done(task.run(&variable, &mut output::standard())),
            Self::NcclTests(options) => {
                let plan = options.plan(&program, variable("PATH").as_deref())?;
                nccl_tests::run(
                    &plan,
                    &program,
                    &variable,
                    &mut report::beside(plan.json.as_ref()),
                )
                .map(Outcome::from)
            }
            Self::NcclTestsRank(rank) => {
                let number = launch::detect(variable, std::os::unix::process::parent_id())?
                    .map_or(0, |world| world.rank);
                done(rank.run(number, variable))
            }
            Self::Memory(options) => {
                let plan = options.plan(&program, variable("NCCL_IBVERBS_LIB"))?;
                check_settings(&plan.setup.plugin, &program)?;
                memory::run(&plan, &program).map(Outcome::from)
            }
            Self::Fabric(options) => options.run().map(Outcome::from),
            Self::Rails(options) => rails::rails(*options, &program).map(Outcome::Status),
            Self::Doctor(options) => Ok(match options.run(&program, variables())? {
                Ended::ServedAsPartner | Ended::Judged(Verdict::Good) => Outcome::Good,
                Ended::Judged(Verdict::Impaired) => Outcome::Status(IMPAIRED),
                Ended::Judged(Verdict::Broken) => Outcome::Status(BROKEN),
            }),
            Self::Report(options) => done(options.run(&program, &variables())),
            Self::Top(options) => done(options.run(variable("NO_COLOR").is_none())),
            Self::Settings => done(settings::show(out)),
            Self::Env(options) => done(options.run(&program, out)),
            Self::Install(options) => {
                done(options.run(&program, variable("PATH").as_deref(), &Cli::command(), out))
            }
            Self::Uninstall(options) => done(options.run(&program, out)),
            Self::Completions(options) => done(options.run(&Cli::command(), out)),
            Self::Manual(options) => done(options.run(&Cli::command(), out)),
            Self::Rank(start) => done(process::run::<Collectives>(
                &start,
                variable("NCCL_DEBUG").as_deref(),
            )),
            Self::MemoryRank(start) => done(process::run::<Memory>(
                &start,
                variable("NCCL_DEBUG").as_deref(),
            )),
        }
    }

    /// Returns true for a command that starts processes or makes files that must not outlive the
    /// command.
    fn starts_processes(&self) -> bool {
        match self {
            Self::AllGather(_)
            | Self::AllReduce(_)
            | Self::ReduceScatter(_)
            | Self::Broadcast(_)
            | Self::AllToAll(_)
            | Self::SendRecv(_)
            | Self::Tune(_)
            | Self::NcclTests(_)
            | Self::Memory(_) => true,
            Self::Doctor(options) => options.starts_processes(),
            Self::Report(options) => options.starts_processes(),
            _ => false,
        }
    }
}

fn done(outcome: Result<()>) -> Result<Outcome> {
    outcome.map(|()| Outcome::Good)
}

fn collective(
    options: options::Options,
    collective: Collective,
    program: &Path,
) -> Result<Outcome> {
    let world = world(options.run.is_local())?;
    let plan = options
        .run
        .plan(collective, program, world, variable("NCCL_IBVERBS_LIB"))?;
    let plan = lead::Plan {
        shows_percentiles: options.percentiles,
        ..plan
    };
    check_settings(&plan.plugin, program)?;
    lead::run(&plan, program).map(Outcome::from)
}

fn tune(mut options: tune::options::Options, program: &Path) -> Result<Outcome> {
    if let Some(tune::options::What::Collectives(options)) = options.what.take() {
        let plan = options.plan(program, &variable)?;
        let mut out = report::beside(plan.json.as_ref());
        return done(tune::collectives::run(plan, program, &variable, &mut out));
    }
    let world = world(options.run.is_local())?;
    tune::run(options, program, world, variable).map(Outcome::from)
}
