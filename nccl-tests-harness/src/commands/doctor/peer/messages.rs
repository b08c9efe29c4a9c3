//! The messages between a doctor and its partner: one asks, the other answers.

use super::sheet::Sheet;
use serde::{Deserialize, Serialize};
use std::time::Duration;

/// First word of the line by which a partner says where it is.
pub const PARTNER_WORD: &str = "nccl-spark-partner";
/// How long a partner may take to answer.
pub const ANSWER: Duration = Duration::from_secs(10);

/// A question to the partner.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub enum Ask {
    /// The result of its own doctor, with its host's facts of this moment.
    Sheet,
    /// A door to a rank that uses these rails of its host.
    Rank {
        /// Their names, as the sheet has them.
        rails: Vec<String>,
    },
}

/// The partner's answer.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub enum Told {
    /// To [`Ask::Sheet`].
    Sheet(Box<Sheet>),
    /// To [`Ask::Rank`]: the door's connection becomes the rank's control connection.
    Rank {
        /// The door's port, at the partner's address.
        port: u16,
        /// The door's token.
        token: String,
        /// What these rails carry in payload, in Mb/s, as far as their host knows.
        expected_mbps: Option<f64>,
    },
    /// It cannot do that.
    Failed {
        /// The reason.
        why: String,
    },
}
