//! The two ends of a memory test, each with its memory and the GPU or CPU that acts on it, and the
//! connection between them.

use crate::gpu::{Block, Gpu, Pattern, Wrong};
use crate::net::{RecvComm, Registration, Request, SendComm};
use anyhow::{Context as _, Result, ensure};
use std::ops::Range;
use std::rc::Rc;

/// Tag of all messages: an arbitrary number, the same on both sides.
pub const TAG: i32 = 7;

pub struct End {
    pub block: Block,
    pub user: MemoryUser,
}

pub struct Ends {
    pub from: End,
    pub into: End,
}

pub enum MemoryUser {
    Gpu(Rc<Gpu>),
    Processor,
}

impl End {
    pub fn name(&self) -> String {
        match &self.user {
            MemoryUser::Gpu(gpu) => gpu.name(),
            MemoryUser::Processor => "CPU".to_owned(),
        }
    }

    pub fn fill(&self, range: Range<usize>, pattern: Pattern) -> Result<()> {
        match &self.user {
            MemoryUser::Gpu(gpu) => gpu.fill(&self.block, range, pattern),
            MemoryUser::Processor => {
                let first = u32::try_from(range.start)?;
                self.block
                    .buffer()
                    .with_bytes(|bytes| pattern.fill(first, &mut bytes[range]))
            }
        }
    }

    pub fn check(&self, range: Range<usize>, pattern: Pattern) -> Result<Wrong> {
        match &self.user {
            MemoryUser::Gpu(gpu) => gpu.check(&self.block, range, pattern),
            MemoryUser::Processor => {
                let first = u32::try_from(range.start)?;
                self.block
                    .buffer()
                    .with_bytes(|bytes| pattern.compare(first, &bytes[range]))
            }
        }
    }
}

/// The connection, and the memory registered at each end.
pub struct Wire {
    // Fields are dropped in the order in which NCCL closes them: registrations, then comms.
    pub from: Rc<Registration>,
    pub into: Rc<Registration>,
    pub send: SendComm,
    pub recv: RecvComm,
}

/// State of a request: not yet accepted by the plugin, in flight, or done with a number of bytes.
pub enum Step {
    NotPosted,
    Posted(Request),
    Done(usize),
}

impl Step {
    pub fn advance(
        &mut self,
        ask: impl FnOnce() -> Result<Option<Request>>,
    ) -> Result<Option<usize>> {
        match self {
            Self::NotPosted => {
                if let Some(request) = ask()? {
                    *self = Self::Posted(request);
                }
                Ok(None)
            }
            Self::Posted(request) => {
                if let Some(bytes) = request.test()? {
                    *self = Self::Done(bytes);
                }
                Ok(None)
            }
            Self::Done(bytes) => Ok(Some(*bytes)),
        }
    }
}

impl Wire {
    /// Moves a message from one end's memory to the other's. This loop has no time limit: the
    /// command ends a process that makes no progress for the seconds of `--timeout`.
    pub fn move_message(&self, bytes: usize) -> Result<()> {
        let mut receiving = Step::NotPosted;
        let mut sending = Step::NotPosted;
        loop {
            let received = receiving
                .advance(|| self.recv.irecv(&self.into, 0, bytes, TAG))
                .context("receive")?;
            let sent = sending
                .advance(|| self.send.isend(&self.from, 0, bytes, TAG))
                .context("send")?;
            if let (Some(received), Some(sent)) = (received, sent) {
                ensure!(
                    (received, sent) == (bytes, bytes),
                    "{sent} bytes were sent and {received} received"
                );
                return Ok(());
            }
            std::thread::yield_now();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_processor_writes_and_checks_where_no_gpu_does() {
        let end = End {
            block: Block::pageable(100).unwrap(),
            user: MemoryUser::Processor,
        };
        let pattern = Pattern { seed: 3, flip: 0 };
        end.fill(
            0..100,
            Pattern {
                flip: 0xff,
                ..pattern
            },
        )
        .unwrap();
        end.fill(0..60, pattern).unwrap();
        assert_eq!(end.check(0..60, pattern).unwrap(), Wrong::default());
        assert_eq!(
            end.check(50..70, pattern).unwrap(),
            Wrong {
                count: 10,
                first: Some(60)
            }
        );
        assert_eq!(end.name(), "CPU");
    }
}
