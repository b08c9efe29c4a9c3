//! The messages between a doctor, which asks, and its partner, which answers.

use serde::{Deserialize, Serialize};
use std::time::Duration;

/// First word of the line in which a partner prints its address and token.
pub const PARTNER_WORD: &str = "nccl-spark-partner";
pub const ANSWER_TIMEOUT: Duration = Duration::from_secs(10);

#[derive(Debug, Clone, Serialize, Deserialize)]
pub enum Ask {
    Sheet,
    /// Asks for a door to a rank of the partner's host with these rails (named as in the sheet).
    Rank {
        rails: Vec<String>,
    },
}

/// The answer to [`Ask::Rank`]: port and token of a door at the partner's address. The connection
/// to it becomes the rank's control connection.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct RankDoor {
    pub port: u16,
    pub token: String,
    /// Payload rate of these rails in Mb/s, if their host knows it.
    pub expected_mbps: Option<f64>,
}
