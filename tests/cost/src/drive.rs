//! Messages from this process to itself under valgrind, in phases. Prints a line for each phase, in
//! the order of valgrind's dumps.

use crate::net::{Pair, Request, cost_phase_ends};
use clap::Args;
use clap::builder::RangedU64ValueParser;
use std::fmt;
use std::path::Path;
use std::str::FromStr;
use std::thread::sleep;
use std::time::Duration;

/// Calls that are counted in a phase. The phase makes the other calls too.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Counted {
    All,
    Receive,
    Send,
    Test,
    /// Repeated `test` of a receive for which nothing has arrived.
    Fruitless,
    /// Repeated `isend` before there is a receive.
    Refused,
}

#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Phase {
    pub counted: Counted,
    pub bytes: usize,
    pub window: usize,
    /// Number of messages, or of calls if the phase repeats one call.
    pub messages: usize,
    pub tests: usize,
    /// Number of `isend` calls that were refused because the grant had not arrived yet, on a busy
    /// machine. The report subtracts their cost.
    pub early: usize,
}

#[derive(Debug, Clone, PartialEq, Args)]
pub struct Plan {
    /// Message sizes in bytes.
    #[arg(long, value_name = "BYTES", value_delimiter = ',', default_values_t = [8, 128, 4096, 65536, 524_288], value_parser = RangedU64ValueParser::<usize>::new().range(1..=1 << 30))]
    pub sizes: Vec<usize>,
    /// Messages under way at a time, 1 to 32.
    #[arg(long = "in-flight", value_name = "N", value_delimiter = ',', default_values_t = [1, 8], value_parser = RangedU64ValueParser::<usize>::new().range(1..=32))]
    pub windows: Vec<usize>,
    /// Messages of each size and kind.
    #[arg(long, value_name = "N", default_value_t = 128, value_parser = RangedU64ValueParser::<usize>::new().range(1..=1 << 20))]
    pub messages: usize,
}

impl Plan {
    /// Checks that whole windows make up the messages.
    ///
    /// # Errors
    /// The numbers do not fit.
    pub fn check(&self) -> Result<(), String> {
        match self
            .windows
            .iter()
            .all(|window| self.messages.is_multiple_of(*window))
        {
            true => Ok(()),
            false => Err("--messages has to be a multiple of each of --in-flight".to_owned()),
        }
    }
}

/// Time in which the fabric carries and confirms all posted requests, so no counted call waits.
const SETTLED: Duration = Duration::from_millis(2);
/// Maximum number of waits for one transfer. Each wait takes [`SETTLED`].
const PATIENCE: usize = 5000;

/// Runs the plan. Fails if the plugin fails or bytes are missing.
pub fn run(library: &Path, plan: &Plan) -> Result<(), String> {
    let most = |numbers: &[usize]| numbers.iter().copied().max().unwrap_or(1);
    let mut pair = Pair::connect(library, most(&plan.sizes) * most(&plan.windows))?;
    for &window in &plan.windows {
        for &bytes in &plan.sizes {
            let warm = Phase {
                counted: Counted::All,
                bytes,
                window,
                messages: plan.messages,
                tests: 0,
                early: 0,
            };
            messages(&mut pair, warm, false)?;
            for counted in [Counted::All, Counted::Receive, Counted::Send, Counted::Test] {
                let phase = Phase { counted, ..warm };
                println!("{}", messages(&mut pair, phase, true)?);
                cost_phase_ends();
            }
        }
    }
    for counted in [Counted::Fruitless, Counted::Refused] {
        println!("{}", repeated_calls(&mut pair, counted, plan.messages)?);
        cost_phase_ends();
    }
    pair.close()
}

/// Sends messages in batches of the phase's window, like NCCL's proxy. A batch posts all receives,
/// then all sends, then tests the oldest request of each side until all are done.
fn messages(pair: &mut Pair, mut phase: Phase, counting: bool) -> Result<Phase, String> {
    let counts = |what| counting && (phase.counted == Counted::All || phase.counted == what);
    let bytes = phase.bytes;
    let window = phase.window;
    for batch in 0..phase.messages / window {
        let mark = (batch % 255) as u8 + 1;
        pair.source()[..bytes * window].fill(mark);
        let mut receives = Vec::with_capacity(window);
        let mut sends = Vec::with_capacity(window);
        for at in 0..window {
            let request = pair.irecv(at * bytes, bytes, counts(Counted::Receive))?;
            receives.push(request.ok_or("irecv was refused although no message was under way")?);
        }
        sleep(SETTLED);
        for at in 0..window {
            let send = |pair: &mut Pair| pair.isend(at * bytes, bytes, counts(Counted::Send));
            sends.push(until_taken(|| send(pair), &mut phase.early)?);
        }
        settle(pair, bytes * window, mark)?;
        phase.tests += finish(pair, &receives, &sends, counts(Counted::Test))?;
    }
    Ok(phase)
}

fn until_taken(
    mut call: impl FnMut() -> Result<Option<Request>, String>,
    early: &mut usize,
) -> Result<Request, String> {
    for _ in 0..PATIENCE {
        if let Some(request) = call()? {
            return Ok(request);
        }
        *early += 1;
        sleep(SETTLED);
    }
    Err("isend was refused although a receive was posted".to_owned())
}

fn settle(pair: &Pair, bytes: usize, mark: u8) -> Result<(), String> {
    for _ in 0..PATIENCE {
        sleep(SETTLED);
        if pair.has_arrived(0..bytes, mark) {
            // The last bytes come before their completion, so wait for that too.
            sleep(SETTLED);
            return Ok(());
        }
    }
    Err(format!("{bytes} bytes did not come"))
}

/// Tests receives and sends in turn until all are done. Returns the number of tests.
fn finish(
    pair: &mut Pair,
    receives: &[Request],
    sends: &[Request],
    counts: bool,
) -> Result<usize, String> {
    let mut waiting = [receives.iter().peekable(), sends.iter().peekable()];
    let mut tests = 0;
    while waiting.iter_mut().any(|side| side.peek().is_some()) {
        for side in &mut waiting {
            while let Some(&&request) = side.peek() {
                tests += 1;
                if tests > PATIENCE * receives.len() {
                    return Err("requests did not end although their bytes had come".to_owned());
                }
                if !pair.test(request, counts)? {
                    break;
                }
                side.next();
            }
        }
    }
    Ok(tests)
}

fn repeated_calls(pair: &mut Pair, counted: Counted, calls: usize) -> Result<Phase, String> {
    const BYTES: usize = 8;
    let mut phase = Phase {
        counted,
        bytes: BYTES,
        window: 1,
        messages: calls,
        tests: 0,
        early: 0,
    };
    pair.source()[..BYTES].fill(0);
    // The first half of the calls is not counted: the first calls of a kind may do extra work.
    for call in 0..2 * calls {
        if counted == Counted::Refused && pair.isend(0, BYTES, call >= calls)?.is_some() {
            return Err("isend was taken although no receive was posted".to_owned());
        }
    }
    let receive = pair
        .irecv(0, BYTES, false)?
        .ok_or("irecv was refused although no message was under way")?;
    sleep(SETTLED);
    for call in 0..2 * calls {
        if counted == Counted::Fruitless && pair.test(receive, call >= calls)? {
            return Err("a receive was done before anything was sent".to_owned());
        }
    }
    let send = until_taken(|| pair.isend(0, BYTES, false), &mut phase.early)?;
    settle(pair, BYTES, 0)?;
    phase.tests = finish(pair, &[receive], &[send], false)?;
    Ok(phase)
}

impl fmt::Display for Phase {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self {
            counted,
            bytes,
            window,
            messages,
            tests,
            early,
        } = self;
        write!(
            f,
            "phase {counted:?} {bytes} {window} {messages} {tests} {early}"
        )
    }
}

impl FromStr for Phase {
    type Err = String;

    fn from_str(line: &str) -> Result<Self, String> {
        let bad = || format!("not a phase: {line:?}");
        let words: Vec<&str> = line.split(' ').collect();
        let ["phase", name, numbers @ ..] = &words[..] else {
            return Err(bad());
        };
        let all = [
            Counted::All,
            Counted::Receive,
            Counted::Send,
            Counted::Test,
            Counted::Fruitless,
            Counted::Refused,
        ];
        let counted = all
            .into_iter()
            .find(|c| format!("{c:?}") == *name)
            .ok_or_else(bad)?;
        let numbers: Vec<usize> = numbers.iter().map_while(|n| n.parse().ok()).collect();
        let [bytes, window, messages, tests, early] = numbers[..] else {
            return Err(bad());
        };
        Ok(Self {
            counted,
            bytes,
            window,
            messages,
            tests,
            early,
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_phase_survives_writing_and_reading() {
        let phase = Phase {
            counted: Counted::Send,
            bytes: 8,
            window: 2,
            messages: 64,
            tests: 130,
            early: 1,
        };
        assert_eq!(phase.to_string().parse(), Ok(phase));
        assert!("phase Send 8 2 64 130".parse::<Phase>().is_err());
        assert!("phase Nothing 8 2 64 130 1".parse::<Phase>().is_err());
    }
}
