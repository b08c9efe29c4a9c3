//! The messages between a doctor and its partner: one asks, the other answers.

use serde::{Deserialize, Serialize};
use std::time::Duration;

/// First word of the line in which a partner prints its address and token.
pub const PARTNER_WORD: &str = "nccl-spark-partner";
/// Time limit of a partner's answer.
pub const ANSWER: Duration = Duration::from_secs(10);

/// A question to the partner.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub enum Ask {
    /// The partner's sheet of this moment.
    Sheet,
    /// A door to a rank that uses these rails of its host.
    Rank {
        /// Names of the rails, as in the sheet.
        rails: Vec<String>,
    },
}

/// The answer to [`Ask::Rank`]: a door whose connection becomes the rank's control connection.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct RankDoor {
    /// The door's port, at the partner's address.
    pub port: u16,
    /// The door's token.
    pub token: String,
    /// What these rails carry in payload, in Mb/s, as far as their host knows.
    pub expected_mbps: Option<f64>,
}
