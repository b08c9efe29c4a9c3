//! Communicators that use this network. NCCL passes their ids to the network and the tuner.

use std::collections::VecDeque;

/// Largest number of ids in each list; the newest are kept. An id is needed only from the start of
/// a communicator's network to the start of its tuner. NCCL starts both in one call, so far fewer
/// ids are needed at the same moment.
const KEPT: usize = 4096;

/// The communicators for which NCCL has chosen this network. `K` identifies the calling thread.
///
/// NCCL before 2.28.7 calls this network's `init` and may then choose another network by name
/// (`ncclNetInit`, plugin/net.cc). The choice is certain only when the same thread queries the
/// device's properties: NCCL does that for the chosen network alone.
#[derive(Debug)]
pub struct Communicators<K> {
    announced: VecDeque<(K, u64)>,
    on_this_network: VecDeque<u64>,
}

impl<K: PartialEq> Communicators<K> {
    /// Creates an empty set.
    pub const fn new() -> Self {
        Self {
            announced: VecDeque::new(),
            on_this_network: VecDeque::new(),
        }
    }

    /// Records that `thread` has started the network for communicator `id`.
    pub fn announce(&mut self, thread: K, id: u64) {
        self.announced.retain(|(other, _)| *other != thread);
        push(&mut self.announced, (thread, id));
    }

    /// Records that NCCL uses this network for the communicator that `thread` announced last.
    pub fn confirm(&mut self, thread: &K) {
        if let Some(at) = self.announced.iter().position(|(other, _)| other == thread)
            && let Some((_, id)) = self.announced.remove(at)
        {
            push(&mut self.on_this_network, id);
        }
    }

    /// Returns true if communicator `id` uses this network.
    pub fn is_on_this_network(&self, id: u64) -> bool {
        self.on_this_network.contains(&id)
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
    fn a_communicator_is_on_this_network_once_nccl_uses_it() {
        let mut all = Communicators::new();
        all.confirm(&'a');
        all.announce('a', 7);
        all.confirm(&'b');
        assert!(!all.is_on_this_network(7));
        all.announce('a', 8);
        all.announce('b', 9);
        all.confirm(&'a');
        all.confirm(&'a');
        assert!(
            all.is_on_this_network(8) && !all.is_on_this_network(7) && !all.is_on_this_network(9)
        );
        all.confirm(&'b');
        assert!(all.is_on_this_network(9));
        for id in 100..100 + KEPT as u64 {
            all.announce('a', id);
            all.confirm(&'a');
        }
        assert!(!all.is_on_this_network(8) && all.is_on_this_network(100));
        assert!(all.on_this_network.len() == KEPT && all.announced.is_empty());
    }
}
