//! What other connections have under way on a connection's rails, for the choice of a rail.

use super::lane::Lane;
use crate::flow::striping::Others;
use crate::wire::ids::LaneId;

/// The lanes of a connection that sends, beside the other connections on their rails.
pub struct Sending<'a>(pub &'a [Lane]);

impl Others for Sending<'_> {
    #[inline(always)]
    fn waiting_bytes(&self, lane: LaneId) -> u64 {
        self.0.get(lane.index()).map_or(0, |lane| lane.rail.backlog_bytes())
    }

    #[inline(always)]
    fn busy_bytes(&self, lane: LaneId) -> u64 {
        self.0.get(lane.index()).map_or(0, |lane| lane.rail.busy_bytes())
    }

    fn confer(&self, lane: LaneId, kept: f64) -> f64 {
        self.0.get(lane.index()).map_or(kept, |lane| lane.path_quality.add(kept))
    }
}

/// The lanes of a connection that receives, and so sends nothing but grants, which show no rate. A slow rail has little to carry
/// and takes long for it, and a grant that waits behind that holds up the other direction: so what counts is how long, not how
/// much.
pub struct Granting<'a>(pub &'a [Lane]);

impl Others for Granting<'_> {
    #[inline(always)]
    fn waiting_bytes(&self, lane: LaneId) -> u64 {
        self.0.get(lane.index()).map_or(0, |lane| lane.path_quality.weigh(lane.rail.backlog_bytes()))
    }

    fn confer(&self, _lane: LaneId, kept: f64) -> f64 {
        kept
    }
}
