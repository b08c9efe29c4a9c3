//! Files of the plugin's `comm/datapath`.

#[path = "../../../../src/comm/datapath/peer.rs"]
pub mod peer;
#[path = "../../../../src/comm/datapath/try_cell.rs"]
pub mod try_cell;
#[path = "../../../../src/comm/datapath/waker.rs"]
pub mod waker;
