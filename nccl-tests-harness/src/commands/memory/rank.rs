//! The process that tests one kind of memory. It is both ends of one connection.

use super::ends::{End, Ends, MemoryUser, Wire};
use super::litmus::{Found, rounds};
use super::messages::{Answer, Message, Moved, Ready, Setup, TestResult};
use crate::gpu::{self, Block, Driver, Gpu, Kind, Pattern};
use crate::net::{Context, Plugin, RecvComm, SendComm};
use crate::ranks::activity;
use crate::ranks::control::Work;
use crate::ranks::device::{self, DEVICE};
use crate::ranks::log;
use anyhow::{Context as _, Result};
use std::path::Path;
use std::rc::Rc;
use std::sync::mpsc;

/// Bytes after each message that must not change.
const GUARD_BYTES: usize = 4096;

/// The work of this process. If memory is refused or absent, that is an answer, not an error.
pub struct Memory;

impl Work for Memory {
    const COMMAND: &'static str = "memory-rank";
    type Order = Setup;
    type Answer = Answer;

    fn work(
        library: Option<&Path>,
        orders: &mpsc::Receiver<Setup>,
        answer: &dyn Fn(Answer) -> Result<()>,
    ) -> Result<()> {
        let setup = orders.recv()?;
        activity::stage("starting the GPU");
        let gpus = look(setup.gpus)?;
        activity::stage("connecting");
        let context = Plugin::load(library.unwrap_or(&setup.plugin), None)?.init(setup.job)?;
        let network = device::examine(&context)?;
        let (send, recv) = connect_with_itself(&context)?;
        let about = gpus
            .as_ref()
            .map(|gpus| gpus.each_ref().map(|gpu| gpu.about().clone()))
            .map_err(String::clone);
        answer(Answer::Ready(Ready {
            network,
            connections: log::take_rail_lines(),
            gpus: about,
        }))?;

        let ends = match allocate(&setup, gpus)? {
            Ok(ends) => ends,
            Err(reason) => return answer(Answer::Registered(Err(TestResult::NotTried { reason }))),
        };
        activity::stage(format!("registering {}", setup.kind.name()));
        let pointer = setup.kind.pointer();
        let registered = send
            .register_as(ends.from.block.buffer(), pointer)
            .and_then(|from| Ok((from, recv.register_as(ends.into.block.buffer(), pointer)?)));
        let (from, into) = match registered {
            Ok(registered) => registered,
            Err(error) => {
                let reason = format!("{error:#}");
                return answer(Answer::Registered(Err(TestResult::Refused { reason })));
            }
        };
        answer(Answer::Registered(Ok(())))?;

        let wire = Wire {
            send,
            recv,
            from,
            into,
        };
        let result = match &setup.litmus {
            Some(order) => rounds::run(&ends, &wire, order).map(Answer::Litmus),
            None => move_messages(&setup, &ends, &wire).map(Answer::Moved),
        };
        let is_through = matches!(
            &result,
            Ok(Answer::Moved(_) | Answer::Litmus(Found { missing: 0, .. }))
        );
        if !is_through {
            // Nothing is closed: unfinished calls of the plugin or the driver may still use the
            // memory, and missing messages may still arrive.
            std::mem::forget((wire, ends));
        }
        answer(result?)
    }
}

fn move_messages(setup: &Setup, ends: &Ends, wire: &Wire) -> Result<Moved> {
    let mut messages = Vec::new();
    for (number, &bytes) in setup.sizes.iter().enumerate() {
        let message = exchange(ends, wire, setup.kind, bytes, number as u32 + 1);
        messages.push(message.with_context(|| format!("a message of {bytes} bytes"))?);
    }
    Ok(Moved {
        written_by: ends.from.name(),
        checked_by: ends.into.name(),
        messages,
    })
}

/// Opens and tests the writing and the checking GPU. The inner `Err` is the reason why this machine
/// has no GPU.
fn look(numbers: [u32; 2]) -> Result<Result<[Rc<Gpu>; 2], String>> {
    let driver = match Driver::load() {
        Ok(driver) => driver,
        Err(reason) => return Ok(Err(reason)),
    };
    let open = |number| -> Result<Rc<Gpu>> {
        let gpu = Gpu::open(&driver, number)?;
        gpu::self_check(&gpu)?;
        activity::tick();
        Ok(Rc::new(gpu))
    };
    let [writer, checker] = numbers;
    let writer = open(writer)?;
    let checker = if numbers[0] == checker {
        Rc::clone(&writer)
    } else {
        open(checker)?
    };
    Ok(Ok([writer, checker]))
}

fn connect_with_itself(context: &Rc<Context>) -> Result<(SendComm, RecvComm)> {
    let (listener, handle) = context.listen(DEVICE)?;
    let (sends, receives) =
        device::connect(context, &[listener], vec![handle]).map_err(|(_, error)| error)?;
    sends
        .into_iter()
        .zip(receives)
        .next()
        .context("no connection")
}

/// Allocates the memory of both ends. The inner `Err` is the reason why this kind of memory is not
/// available.
fn allocate(setup: &Setup, gpus: Result<[Rc<Gpu>; 2], String>) -> Result<Result<Ends, String>> {
    activity::stage(format!("allocating {}", setup.kind.name()));
    let bytes = setup.sizes.last().context("no sizes")?;
    let from = *bytes;
    let into = bytes + GUARD_BYTES;
    if setup.kind == Kind::Malloc {
        // An end uses its GPU if the GPU can access pageable memory, and the CPU otherwise.
        let gpus = gpus.ok().map(|gpus| gpus.map(Some)).unwrap_or_default();
        let end = |gpu: &Option<Rc<Gpu>>, bytes| {
            let gpu = gpu
                .as_ref()
                .filter(|gpu| gpu.about().pageable_memory_access);
            let user = gpu.map_or(MemoryUser::Processor, |gpu| MemoryUser::Gpu(Rc::clone(gpu)));
            anyhow::Ok(End {
                block: Block::pageable(bytes)?,
                user,
            })
        };
        return Ok(Ok(Ends {
            from: end(&gpus[0], from)?,
            into: end(&gpus[1], into)?,
        }));
    }
    let gpus = match gpus {
        Ok(gpus) => gpus,
        Err(reason) => return Ok(Err(reason)),
    };
    if setup.kind == Kind::Managed {
        for gpu in &gpus {
            let free = gpu.free_bytes()?;
            if let Some(reason) =
                without_managed(&gpu.name(), gpu.about().managed_memory, from + into, free)
            {
                return Ok(Err(reason));
            }
        }
    }
    let [writer, checker] = gpus;
    let end = |gpu: Rc<Gpu>, bytes| {
        anyhow::Ok(End {
            block: gpu.allocate(setup.kind, bytes)?,
            user: MemoryUser::Gpu(gpu),
        })
    };
    Ok(Ok(Ends {
        from: end(writer, from)?,
        into: end(checker, into)?,
    }))
}

/// Returns the reason not to try managed memory, if any. More managed memory than the card has free
/// can crash the card.
fn without_managed(gpu: &str, has_it: bool, bytes: usize, free: usize) -> Option<String> {
    if !has_it {
        return Some(format!("{gpu} has no managed memory"));
    }
    (bytes > free / 4).then(|| {
        format!("{bytes} bytes are more than a quarter of the {free} bytes that {gpu} has free")
    })
}

fn exchange(ends: &Ends, wire: &Wire, kind: Kind, bytes: usize, seed: u32) -> Result<Message> {
    let name = kind.name();
    let sent = Pattern { seed, flip: 0 };
    let stale = Pattern { seed, flip: 0xff };
    activity::stage(format!(
        "writing {bytes} bytes of {name} by {}",
        ends.from.name()
    ));
    ends.from.fill(0..bytes, sent)?;
    // Every byte differs from the sent byte, so that the check finds bytes that did not arrive.
    ends.into.fill(0..bytes + GUARD_BYTES, stale)?;
    activity::stage(format!("moving {bytes} bytes of {name}"));
    wire.move_message(bytes)?;
    activity::stage(format!(
        "checking {bytes} bytes of {name} by {}",
        ends.into.name()
    ));
    let inside = ends.into.check(0..bytes, sent)?;
    let beyond = ends.into.check(bytes..bytes + GUARD_BYTES, stale)?;
    Ok(Message {
        bytes,
        wrong: inside.count,
        first_wrong: inside.first,
        beyond: beyond.count,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn managed_memory_leaves_room_on_the_card() {
        assert_eq!(without_managed("GPU 0", true, 25, 100), None);
        let reason = without_managed("GPU 0", true, 26, 100).unwrap();
        assert!(
            reason
                .contains("26 bytes are more than a quarter of the 100 bytes that GPU 0 has free"),
            "{reason}"
        );
        assert!(
            without_managed("GPU 1", false, 1, 100)
                .unwrap()
                .contains("GPU 1 has no managed memory")
        );
    }
}
