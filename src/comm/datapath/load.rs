//! Load of all connections of this process on the rails of one connection, for the choice of a
//! rail.

use super::lane::Lane;
use proto::flow::striping::OtherConnections;
use proto::wire::ids::LaneId;

/// Lanes of a sending connection, with the load of all connections on their rails.
pub struct Sending<'a>(pub &'a [Lane]);

impl OtherConnections for Sending<'_> {
    #[inline(always)]
    fn waiting_bytes(&self, lane: LaneId) -> u64 {
        self.0
            .get(lane.index())
            .map_or(0, |lane| lane.rail.backlog_bytes())
    }

    #[inline(always)]
    fn busy_bytes(&self, lane: LaneId) -> u64 {
        self.0
            .get(lane.index())
            .map_or(0, |lane| lane.rail.busy_bytes())
    }

    fn share_quality(&self, lane: LaneId, quality: f64) -> f64 {
        self.0
            .get(lane.index())
            .map_or(quality, |lane| lane.path_quality.add(quality))
    }
}

/// Lanes of a receiving connection, with the load of all connections on their rails. A receiver
/// writes only CTS entries, which are too small to measure a rail's rate. A CTS write that waits
/// behind a slow rail's backlog delays the peer's send. So a backlog counts by the time that it
/// takes, not by its bytes.
pub struct Granting<'a>(pub &'a [Lane]);

impl OtherConnections for Granting<'_> {
    #[inline(always)]
    fn waiting_bytes(&self, lane: LaneId) -> u64 {
        self.0.get(lane.index()).map_or(0, |lane| {
            lane.path_quality
                .bytes_at_expected_rate(lane.rail.backlog_bytes())
        })
    }

    fn share_quality(&self, _lane: LaneId, quality: f64) -> f64 {
        quality
    }
}
