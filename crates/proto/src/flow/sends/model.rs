//! Hash of all sends, for the search through recovery's states
//! (`recovery/tests/search.rs`).

use super::{Left, Request, Sends};
use std::hash::{Hash, Hasher};

impl<const N: usize, const R: usize> Sends<N, R> {
    pub(in crate::flow) fn hash_state(&self, hasher: &mut impl Hasher) {
        (
            &self.free[..self.free_count],
            &self.next,
            self.epochs,
            self.has_lost_shares,
        )
            .hash(hasher);
        for (request, shares) in self.requests.iter().zip(self.shares.iter()) {
            request.hash(hasher);
            let Request::Cut(running) = request else {
                continue;
            };
            for (number, share) in shares.iter().enumerate().take(usize::from(running.count)) {
                if running.unfinished & 1 << number != 0 {
                    (
                        share.lane,
                        share.offset,
                        share.bytes,
                        share.full_chunks,
                        share.left,
                    )
                        .hash(hasher);
                    (share.left != Left::Nothing)
                        .then_some(share.route)
                        .hash(hasher);
                }
            }
        }
    }
}
