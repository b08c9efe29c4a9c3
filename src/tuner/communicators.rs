//! The communicators that this network carries, by the ids that NCCL gives to network and tuner alike.

use std::collections::VecDeque;

/// So many ids are kept, the newest ones. An id counts from a communicator's start of the network to its start of the tuner, which
/// follows in the same call of NCCL's; more are never between the two at a time.
const KEPT: usize = 4096;

/// What NCCL has said of its communicators.
///
/// NCCL before 2.28.9 calls a network's `init` and then may choose another one by name (`ncclNetInit`, plugin/net.cc): only when it asks for the
/// device's properties next has it taken this one. It holds one lock meanwhile, so the last id that was announced is the one meant.
#[derive(Debug, Default)]
pub struct Communicators {
    announced: Option<u64>,
    carried: VecDeque<u64>,
}

impl Communicators {
    /// None yet.
    pub const fn new() -> Self {
        Self { announced: None, carried: VecDeque::new() }
    }

    /// The network was started for communicator `id`.
    pub fn announce(&mut self, id: u64) {
        self.announced = Some(id);
    }

    /// NCCL goes on with this network for the communicator that it announced last.
    pub fn confirm(&mut self) {
        if let Some(id) = self.announced.take() {
            if self.carried.len() == KEPT {
                self.carried.pop_front();
            }
            self.carried.push_back(id);
        }
    }

    /// Whether this network carries communicator `id`.
    pub fn is_carried(&self, id: u64) -> bool {
        self.carried.contains(&id)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_communicator_is_carried_once_nccl_goes_on_with_this_network() {
        let mut all = Communicators::new();
        all.confirm();
        all.announce(7);
        assert!(!all.is_carried(7));
        // NCCL went on with another network.
        all.announce(8);
        all.confirm();
        all.confirm();
        assert!(all.is_carried(8) && !all.is_carried(7));
        for id in 100..100 + KEPT as u64 {
            all.announce(id);
            all.confirm();
        }
        assert!(!all.is_carried(8) && all.is_carried(100) && all.carried.len() == KEPT);
    }
}
