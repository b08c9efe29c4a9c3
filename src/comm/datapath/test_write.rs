//! Test writes: a packet on each new queue pair of a lane, before it is used.

use super::lane::Lane;
use super::wr_id::WrId;
use crate::verbs::CompletionBuffer;

/// How the test writes on a lane's queue pairs go.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Tested {
    /// Some are not confirmed yet.
    UnderWay,
    /// All are confirmed.
    Carries,
    /// One was not acknowledged: the path does not carry. The reason, for a message.
    Silent(String),
    /// One has failed otherwise, which says nothing of the path.
    Failed(String),
}

/// Looks at the test writes of a lane that carries nothing else yet.
pub fn look(lane: &mut Lane, buffer: &mut CompletionBuffer) -> Tested {
    let completions = match lane.poll(buffer) {
        Ok(completions) => completions,
        Err(error) => return Tested::Failed(error.to_string()),
    };
    for completion in completions {
        if completion.status() != 0 {
            let why = format!("test write failed: {}", completion.status_text());
            return if completion.is_unacknowledged() { Tested::Silent(why) } else { Tested::Failed(why) };
        }
        lane.retire(WrId::of(completion.wr_id()));
    }
    if lane.has_pending() { Tested::UnderWay } else { Tested::Carries }
}
