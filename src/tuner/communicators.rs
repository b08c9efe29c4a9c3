//! The communicators that this network carries, by the ids that NCCL gives to network and tuner alike.

use std::collections::VecDeque;

/// So many ids are kept, the newest ones. An id counts from a communicator's start of the network to its start of the tuner, which
/// follows in the same call of NCCL's; more are never between the two at a time.
const KEPT: usize = 4096;

/// What NCCL has said of its communicators. `K` names the thread that called.
///
/// NCCL before 2.28.7 calls a network's `init` and then may choose another one by name (`ncclNetInit`, plugin/net.cc): only when it asks for the
/// device's properties next has it taken this one. It does both on one thread.
#[derive(Debug)]
pub struct Communicators<K> {
    announced: VecDeque<(K, u64)>,
    carried: VecDeque<u64>,
}

impl<K: PartialEq> Communicators<K> {
    /// None yet.
    pub const fn new() -> Self {
        Self { announced: VecDeque::new(), carried: VecDeque::new() }
    }

    /// The network was started for communicator `id` by `thread`.
    pub fn announce(&mut self, thread: K, id: u64) {
        self.announced.retain(|(other, _)| *other != thread);
        push(&mut self.announced, (thread, id));
    }

    /// NCCL goes on with this network for the communicator that `thread` announced last.
    pub fn confirm(&mut self, thread: &K) {
        if let Some(at) = self.announced.iter().position(|(other, _)| other == thread)
            && let Some((_, id)) = self.announced.remove(at)
        {
            push(&mut self.carried, id);
        }
    }

    /// Whether this network carries communicator `id`.
    pub fn is_carried(&self, id: u64) -> bool {
        self.carried.contains(&id)
    }
}

impl<K: PartialEq> Default for Communicators<K> {
    fn default() -> Self {
        Self::new()
    }
}

fn push<T>(newest: &mut VecDeque<T>, value: T) {
    if newest.len() == KEPT {
        newest.pop_front();
    }
    newest.push_back(value);
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_communicator_is_carried_once_nccl_goes_on_with_this_network() {
        let mut all = Communicators::new();
        all.confirm(&'a');
        all.announce('a', 7);
        // Another thread looks at the device meanwhile.
        all.confirm(&'b');
        assert!(!all.is_carried(7));
        // NCCL went on with another network.
        all.announce('a', 8);
        all.announce('b', 9);
        all.confirm(&'a');
        all.confirm(&'a');
        assert!(all.is_carried(8) && !all.is_carried(7) && !all.is_carried(9));
        all.confirm(&'b');
        assert!(all.is_carried(9));
        for id in 100..100 + KEPT as u64 {
            all.announce('a', id);
            all.confirm(&'a');
        }
        assert!(!all.is_carried(8) && all.is_carried(100) && all.carried.len() == KEPT && all.announced.is_empty());
    }
}
