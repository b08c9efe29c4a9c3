//! Epochs: the generations of a receiver's memory keys. When a device of the receiver returns with
//! new keys, a new epoch begins. The control message JOINED gives the sender the first epoch in
//! which a lane's keys are valid.

use crate::wire::MAX_RAILS;
use crate::wire::cts::Epoch;
use crate::wire::ids::LaneId;

/// The newest epoch, and the first epoch in which each lane's keys are valid.
#[derive(Debug, Clone, Copy, Default, Hash)]
pub(super) struct Epochs {
    newest: Epoch,
    first_valid: [Epoch; MAX_RAILS],
}

impl Epochs {
    #[inline(always)]
    pub(super) fn newest(&self) -> Epoch {
        self.newest
    }

    pub(super) fn first_valid(&self, lane: LaneId) -> Epoch {
        self.first_valid[lane.index()]
    }

    /// Begins the next epoch, because the device of `lane` has returned with new keys. The new
    /// epoch is the first one in which the lane's keys are valid.
    pub(super) fn begin(&mut self, lane: LaneId) {
        self.learn(lane, self.newest.next());
    }

    /// Sets the first epoch in which a lane's keys are valid. If this epoch is later than the
    /// newest one, it becomes the newest. Returns true if the lane's first epoch has changed.
    pub(super) fn learn(&mut self, lane: LaneId, epoch: Epoch) -> bool {
        let before = std::mem::replace(&mut self.first_valid[lane.index()], epoch);
        if epoch.is_since(self.newest) {
            self.newest = epoch;
        }
        self.first_valid
            .iter_mut()
            .for_each(|epoch| *epoch = epoch.near(self.newest));
        before != epoch
    }

    /// Returns those lanes of the bit set `open` for which a CTS entry of this epoch has valid
    /// keys.
    pub(super) fn lanes_with_keys(&self, open: u8, epoch: Epoch) -> u8 {
        let has_key = |lane: &LaneId| epoch.is_since(self.first_valid[lane.index()]);
        LaneId::all(MAX_RAILS)
            .filter(has_key)
            .fold(0, |lanes, lane| lanes | lane.bit())
            & open
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::wire::ids::lane;

    #[test]
    fn entries_of_earlier_epochs_have_no_key_for_a_lane_whose_device_returned() {
        let mut receiver = Epochs::default();
        let mut sender = Epochs::default();
        let first = receiver.newest();
        receiver.begin(lane(1));
        assert!(sender.learn(lane(1), receiver.first_valid(lane(1))));
        assert!(
            !sender.learn(lane(1), receiver.first_valid(lane(1))),
            "the sender knows it"
        );
        assert!(
            !sender.learn(lane(0), receiver.first_valid(lane(0))),
            "lane 0 has its first keys"
        );
        assert_eq!(sender.newest(), receiver.newest());
        assert_eq!(sender.lanes_with_keys(0b111, first), 0b101);
        assert_eq!(sender.lanes_with_keys(0b111, receiver.newest()), 0b111);
        assert_eq!(sender.lanes_with_keys(0b010, first), 0);
        for _ in 0..300 {
            receiver.begin(lane(0));
            assert!(sender.learn(lane(0), receiver.first_valid(lane(0))));
            let newest = receiver.newest();
            assert_eq!(
                (sender.newest(), sender.lanes_with_keys(0b11, newest)),
                (newest, 0b11)
            );
        }
    }
}
