//! Messages between a doctor and its partner on the other host. The doctor sends an [`Ask`], and
//! the partner sends the answer.

use serde::{Deserialize, Serialize};
use std::time::Duration;

/// First word of the line with which a partner prints its address and token.
pub const PARTNER_WORD: &str = "nccl-spark-partner";
pub const ANSWER_TIMEOUT: Duration = Duration::from_secs(10);

#[derive(Debug, Clone, Serialize, Deserialize)]
pub enum Ask {
    Sheet,
    /// Requests a rank on the partner's host that uses only these rails, named as in the sheet.
    Rank {
        rails: Vec<String>,
    },
}

/// The answer to [`Ask::Rank`]: port of a `ranks::token_port` at the partner's address, with the
/// partner's token. The connection to this port becomes the rank's control connection.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct RankPort {
    pub port: u16,
    /// Expected payload rate of the rank's rails in Mb/s, if the partner's host knows it.
    pub expected_mbps: Option<f64>,
}
